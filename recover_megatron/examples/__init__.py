"""Training scripts that show, and test, the plugin without a Megatron-LM checkout."""
