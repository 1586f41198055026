"""Is everyone alive; reduce, agree and repair across replicas. Knows no gradients, no Megatron."""
