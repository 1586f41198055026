"""What stock Megatron reduces over data-parallel ranks: gradient buffers, sums over the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recover_megatron.errors import InvariantViolation


class MegatronGradients:
    """The gradient buffers of all model chunks (gradients.GradientSource).

    Without `--overlap-grad-reduce`, and always on later pipeline stages, Megatron has one bucket
    per buffer.
    """

    def __init__(self, model: Sequence[Any]):
        self._model = model

    def views(self) -> list[torch.Tensor]:
        return list(_reduced_views(self._model))

    def zero(self) -> None:
        for chunk in self._model:
            chunk.zero_grad_buffer()


def _reduced_views(model: Sequence[Any]) -> Iterator[torch.Tensor]:
    """What stock Megatron all-reduces over data parallel ranks: whole buckets, or with the
    distributed optimizer this rank's shard (param_and_grad_buffer.py, start_grad_sync)."""
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                if not group.ddp_config.use_distributed_optimizer:
                    yield bucket.grad_data.view(-1)
                    continue
                size = group.intra_distributed_optimizer_instance_size
                if bucket.grad_data.numel() % size:
                    raise InvariantViolation(
                        f"a gradient bucket of {bucket.grad_data.numel()} does not split by {size}"
                    )
                shards = bucket.grad_data.view(-1).chunk(size)
                yield shards[group.intra_distributed_optimizer_instance_rank]


def batch_counters(model: Sequence[Any]) -> list[torch.Tensor]:
    """Megatron's sums over an iteration's microbatches, which stock data parallelism reduces over
    all of its ranks: tokens by expert, from which the router's bias is updated (router.py), and the
    losses that only the log shows (moe_utils.py, multi_token_prediction.py)."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    counters = [
        module.local_tokens_per_expert
        for chunk in model
        for module in chunk.modules()
        if getattr(module, "local_tokens_per_expert", None) is not None
    ]
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # from core_v0.18 on
        metrics = moe_utils.get_moe_metrics_tracker().metrics
        counters += [metrics[name].values for name in sorted(metrics)]
    else:
        trackers = moe_utils.get_moe_layer_wise_logging_tracker()
        counters += [trackers[name]["values"] for name in sorted(trackers)]
    predicted = MTPLossLoggingHelper.tracker
    return counters + [
        predicted[name] for name in sorted(predicted) if isinstance(predicted[name], torch.Tensor)
    ]
