"""What travels beside the gradient: counts, losses, and Megatron's own sums over the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from recover_megatron.errors import InvariantViolation
from recover_megatron.recovery.snapshot import Bucket

Losses = list[dict[str, torch.Tensor]]


class Statistics:
    """One small float64 bucket: the number of microbatches, of tokens, the sum of each reported
    loss, and Megatron's counters. Its first element makes the reduction itself count what is
    committed (I1).

    `counters()` are tensors that Megatron adds to in every forward pass and that must hold the sum
    over the whole batch before it uses them (`batch_counters`): zeroed before a pass, added here
    after it, and set to the whole job's sum by `commit`.
    """

    def __init__(self, counters: Callable[[], list[torch.Tensor]] = list):
        self._counters = counters
        self._sizes: dict[str, int] = {}  # of each reported loss, in order
        self.bucket = _bucket(0)

    def begin_pass(self) -> None:
        for counter in self._counters():
            counter.zero_()

    def add(self, losses: Losses, tokens: float, count: float) -> None:
        """After a pass over `count` microbatches; NaN marks a poisoned one."""
        sums: dict[str, torch.Tensor] = {}  # float64, over the microbatches of one pass
        for loss in losses:
            for key in sorted(loss):
                value = loss[key].detach().view(-1).double().cpu()
                sums[key] = sums.get(key, torch.zeros_like(value)) + value
        parts = [*sums.values(), *(c.detach().view(-1).double().cpu() for c in self._counters())]
        values = [count, tokens, *(x for part in parts for x in part.tolist())]
        if not self.bucket.local.size:
            self._sizes = {key: total.numel() for key, total in sums.items()}
            self.bucket = _bucket(len(values))
        self.bucket.local[:] += values

    def commit(self, microbatches: int) -> None:
        """Raises InvariantViolation unless exactly `microbatches` were reduced."""
        if self.poisoned:
            return
        committed = int(self.bucket.reduced[0])
        if committed != microbatches:
            raise InvariantViolation(
                f"the reduction holds {committed} microbatches, expected {microbatches} (I1)"
            )
        offset = 2 + sum(self._sizes.values())
        for counter in self._counters():
            total = self.bucket.reduced[offset : offset + counter.numel()]
            counter.copy_(torch.from_numpy(total).view(counter.shape))
            offset += counter.numel()

    @property
    def poisoned(self) -> bool:
        """A replica found NaN or infinity in microbatches that it computed for a lost one. The same
        at every rank of the job."""
        return math.isnan(self.bucket.reduced[0])

    @property
    def tokens(self) -> int:
        """Loss tokens of the whole batch (last pipeline stage; 0 elsewhere)."""
        return int(self.bucket.reduced[1])

    def losses(self, microbatches: int) -> Losses:
        """The whole batch's losses in the form of Megatron's schedule: one dict of [sum, tokens],
        or of the mean where a loss function reports one number per microbatch. Empty but on the
        last pipeline stage."""
        result, offset = {}, 2
        for key, size in self._sizes.items():
            total = self.bucket.reduced[offset : offset + size]
            offset += size
            if size == 1:
                total = total / microbatches
            result[key] = torch.tensor(total, dtype=torch.float32)
        return [result] if result else []


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


def _bucket(size: int) -> Bucket:
    return Bucket(np.zeros(size, dtype=np.float64), np.zeros(size, dtype=np.float64))
