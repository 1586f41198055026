"""What travels beside the gradient: counts, losses, and the framework's own sums over the batch.

They are reduced in a bucket of their own, together with the gradient's, so that one agreement
commits all of it or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from recover_megatron.errors import InvariantViolation
from recover_megatron.recovery.bucket import Bucket

Losses = list[dict[str, torch.Tensor]]


class Statistics:
    """One small float64 bucket: the number of microbatches, of tokens, the sum of each reported
    loss, and the framework's counters. Its first element makes the reduction itself count what is
    committed (I1).

    `counters()` are tensors that the framework adds to in every forward pass and that must hold the
    sum over the whole batch before it uses them: zeroed before a pass, added here
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


def _bucket(size: int) -> Bucket:
    return Bucket(np.zeros(size, dtype=np.float64), np.zeros(size, dtype=np.float64))
