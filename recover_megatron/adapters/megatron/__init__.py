"""Megatron-LM and megatron-core as host framework. With pretrain.py the only owner of Megatron."""
