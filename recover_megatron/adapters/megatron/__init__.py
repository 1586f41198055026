"""Megatron-LM and megatron-core as host framework. With examples/ the only owner of Megatron."""
