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

    A NaN in a first pass ends the replica by Megatron's own check. A NaN in microbatches that a
    lost replica owed is the second one: the fault is not the hardware's. It must end the whole job,
    not one replica after the other, so it travels in the reduction (`poisoned`).

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
    ):
        self._model = model
        self._gradients = gradients
        self._microbatches = microbatches
        self._run_pass = run_pass
        self._any_in_replica = any_in_replica
        self._not_finite = False
        self._started = False
        self._sums: dict[str, torch.Tensor] = {}  # float64, summed over this replica's microbatches
        self._computed = 0
        self._tokens = 0.0
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
        if kept is not None:
            finite = all(np.isfinite(bucket.local).all() for bucket in self._gradients.buckets)
            finite = finite and all(v.isfinite().all() for loss in losses for v in loss.values())
            self._not_finite |= self._any_in_replica(not finite)
            kept.add_back(self._gradients.buckets)
        self._started = True
        self._add_statistics(losses, tokens, len(microbatches))

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
        if not self._sums:
            return []
        result, offset = {}, 2
        for key, local in self._sums.items():
            total = self._statistics.reduced[offset : offset + local.numel()]
            offset += local.numel()
            if local.numel() == 1:
                total = total / self._microbatches
            result[key] = torch.tensor(total, dtype=torch.float32)
        return [result]

    def _add_statistics(
        self, losses: list[dict[str, torch.Tensor]], tokens: float, microbatches: int
    ) -> None:
        for loss in losses:
            for key in sorted(loss):
                value = loss[key].detach().view(-1).double().cpu()
                self._sums[key] = self._sums.get(key, torch.zeros_like(value)) + value
        self._computed += microbatches
        self._tokens += tokens
        count = math.nan if self._not_finite else float(self._computed)
        values = [count, self._tokens]
        for key in self._sums:
            values.extend(self._sums[key].tolist())
        self._statistics = _statistics_bucket(len(values))
        self._statistics.local[:] = values


def _statistics_bucket(size: int) -> Bucket:
    return Bucket(np.zeros(size, dtype=np.float64), np.zeros(size, dtype=np.float64))
