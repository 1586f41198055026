"""Pre-training a GPT on megatron-core alone; `pretrain.py` is the script.

megatron.training is not on PyPI. This is its training loop reduced to what a LLaMA-style GPT needs.
Modules, functions, flags and the log line bear Megatron's names, so that the same hooks, flags and
tools serve both. It knows nothing of recovery: adapters/megatron/hooks.py replaces names of these
modules, just as it replaces those of megatron.training.
"""
