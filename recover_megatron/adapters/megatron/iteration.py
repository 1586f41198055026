"""One training iteration of Megatron as the driver's Work: compute, buckets, commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from recover_megatron.adapters.megatron.gradients import GradientBuckets
from recover_megatron.errors import InvariantViolation
from recover_megatron.recovery.snapshot import Bucket, Snapshot


class Iteration:
    """Runs the stock schedule for whatever microbatches this replica is given.

    `run_pass(ids)` runs Megatron's own forward-backward schedule over those ids and its gradient
    sync inside the replica, and returns the list of loss dicts (empty but on the last pipeline
    stage) and the number of tokens. `any_in_replica(flag)` is a logical or over the replica.

    A NaN in a first pass ends the replica by Megatron's own check. Where a replica recomputes the
    lost one's samples (`same_samples`), a NaN in them is the second one: the fault is not the
    hardware's. It must end the whole job, not one replica after the other, so it travels in the
    reduction (`poisoned`). A NaN in other samples of a later pass ends the replica here.

    Beside the gradient one small float64 bucket travels: the number of microbatches, of tokens,
    and the sum of each reported loss. Its first element makes the reduction itself count what is
    committed (I1).
    """

    def __init__(
        self,
        model: Sequence[Any],
        gradients: GradientBuckets,
        microbatches: int,
        run_pass: Callable[[Sequence[int]], tuple[list[dict[str, torch.Tensor]], float]],
        any_in_replica: Callable[[bool], bool],
        same_samples: bool,
    ):
        self._model = model
        self._gradients = gradients
        self._microbatches = microbatches
        self._run_pass = run_pass
        self._any_in_replica = any_in_replica
        self._same_samples = same_samples
        self._started = False
        self._sizes: dict[str, int] = {}  # of each reported loss, as they stand in the statistics
        self._statistics = _statistics_bucket(0)

    # --- Work ----------------------------------------------------------------------------------

    def compute(self, microbatches: Sequence[int]) -> None:
        if not microbatches:
            return
        kept = Snapshot(self._gradients.buckets) if self._started else None
        if kept is not None:
            for chunk in self._model:
                chunk.zero_grad_buffer()
        losses, tokens = self._run_pass(microbatches)
        self._gradients.stage_in()
        count = float(len(microbatches))
        if kept is not None:
            if self._any_in_replica(not self._finite(losses)):
                if not self._same_samples:
                    raise FloatingPointError("found NaN or infinity in a further pass")
                count = math.nan
            kept.add_back(self._gradients.buckets)
        self._started = True
        self._add_statistics(losses, tokens, count)

    def _finite(self, losses: list[dict[str, torch.Tensor]]) -> bool:
        return all(np.isfinite(bucket.local).all() for bucket in self._gradients.buckets) and all(
            bool(value.isfinite().all()) for loss in losses for value in loss.values()
        )

    def buckets(self) -> Sequence[Bucket]:
        return (*self._gradients.buckets, self._statistics)

    def commit(self) -> None:
        self._gradients.stage_out()
        if self.poisoned:
            return
        committed = int(self._statistics.reduced[0])
        if committed != self._microbatches:
            raise InvariantViolation(
                f"the reduction holds {committed} microbatches, expected {self._microbatches} (I1)"
            )

    # --- after the commit ----------------------------------------------------------------------

    @property
    def poisoned(self) -> bool:
        """A replica found NaN or infinity in microbatches that it computed for a lost one. The same
        at every rank of the job."""
        return bool(np.isnan(self._statistics.reduced[0]))

    @property
    def tokens(self) -> int:
        """Loss tokens of the whole batch (last pipeline stage; 0 elsewhere)."""
        return int(self._statistics.reduced[1])

    def losses(self) -> list[dict[str, torch.Tensor]]:
        """The whole batch's losses in the form of Megatron's schedule: one dict of [sum, tokens],
        or of the mean where a loss function reports one number per microbatch."""
        if not self._sizes:
            return []
        result, offset = {}, 2
        for key, size in self._sizes.items():
            total = self._statistics.reduced[offset : offset + size]
            offset += size
            if size == 1:
                total = total / self._microbatches
            result[key] = torch.tensor(total, dtype=torch.float32)
        return [result]

    def _add_statistics(
        self, losses: list[dict[str, torch.Tensor]], tokens: float, count: float
    ) -> None:
        sums: dict[str, torch.Tensor] = {}  # float64, over the microbatches of one pass
        for loss in losses:
            for key in sorted(loss):
                value = loss[key].detach().view(-1).double().cpu()
                sums[key] = sums.get(key, torch.zeros_like(value)) + value
        values = [count, tokens, *(x for total in sums.values() for x in total.tolist())]
        if not self._statistics.local.size:
            self._sizes = {key: total.numel() for key, total in sums.items()}
            self._statistics = _statistics_bucket(len(values))
        self._statistics.local[:] += values


def _statistics_bucket(size: int) -> Bucket:
    return Bucket(np.zeros(size, dtype=np.float64), np.zeros(size, dtype=np.float64))
