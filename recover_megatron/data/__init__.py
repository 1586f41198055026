"""Text to Megatron's indexed datasets."""
