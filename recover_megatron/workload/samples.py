"""Which dataset indices a microbatch holds: a pure function, the same for any membership."""

from __future__ import annotations


def sample_ids(
    consumed_samples: int,
    microbatch: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> range:
    """Dataset indices of microbatch `microbatch` of the iteration that starts after
    `consumed_samples` samples.

    `dp_rank` of `dp_size` is the place among the data-parallel ranks *inside* the replica. Equals
    Megatron's own MegatronPretrainingSampler (training/datasets/data_samplers.py) for a job whose
    data-parallel ranks all take the same number of microbatches.
    """
    first = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(first, first + micro_batch_size)
