"""One training iteration, or one batch of an evaluation, of Megatron as the driver's Work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recover_megatron.adapters.megatron.gradients import GradientBuckets
from recover_megatron.adapters.megatron.statistics import Losses, Statistics
from recover_megatron.recovery.snapshot import Bucket, Snapshot

RunPass = Callable[[Sequence[int]], tuple[Losses, float]]


class Iteration:
    """Runs the stock schedule for whatever microbatches this replica is given.

    `run_pass(ids)` runs Megatron's own forward-backward schedule over those ids and its gradient
    sync inside the replica, and returns the list of loss dicts (empty but on the last pipeline
    stage) and the number of tokens. `any_in_replica(flag)` is a logical or over the replica.

    A NaN in a first pass ends the replica by Megatron's own check. Where a replica recomputes the
    lost one's samples (`same_samples`), a NaN in them is the second one: the fault is not the
    hardware's. It must end the whole job, not one replica after the other, so it travels in the
    reduction (`poisoned`). A NaN in other samples of a later pass ends the replica here. Without
    `check_for_nan` none is looked for: with a dynamic loss scale it is no fault.
    """

    def __init__(
        self,
        model: Sequence[Any],
        gradients: GradientBuckets,
        statistics: Statistics,
        microbatches: int,
        run_pass: RunPass,
        any_in_replica: Callable[[bool], bool],
        same_samples: bool,
        check_for_nan: bool,
    ):
        self.statistics = statistics
        self._model = model
        self._gradients = gradients
        self._microbatches = microbatches
        self._run_pass = run_pass
        self._any_in_replica = any_in_replica
        self._same_samples = same_samples
        self._check_for_nan = check_for_nan
        self._started = False

    def compute(self, microbatches: Sequence[int]) -> None:
        if not microbatches:
            return
        kept = Snapshot(self._gradients.buckets) if self._started else None
        self._gradients.before_compute()
        if kept is not None:
            for chunk in self._model:
                chunk.zero_grad_buffer()
        self.statistics.begin_pass()
        losses, tokens = self._run_pass(microbatches)
        self._gradients.stage_in()
        count = float(len(microbatches))
        if kept is not None:
            if self._check_for_nan and self._any_in_replica(not self._finite(losses)):
                if not self._same_samples:
                    raise FloatingPointError("found NaN or infinity in a further pass")
                count = math.nan
            kept.add_back(self._gradients.buckets)
        self._started = True
        self.statistics.add(losses, tokens, count)

    def _finite(self, losses: Losses) -> bool:
        for bucket in self._gradients.buckets:
            bucket.ready()
        return all(np.isfinite(bucket.local).all() for bucket in self._gradients.buckets) and all(
            bool(value.isfinite().all()) for loss in losses for value in loss.values()
        )

    def buckets(self) -> Sequence[Bucket]:
        return (*self._gradients.buckets, self.statistics.bucket)

    def commit(self) -> None:
        self._gradients.stage_out()
        self.statistics.commit(self._microbatches)


class Evaluation:
    """A forward-only batch: nothing but its losses is reduced. `run_pass` as in Iteration."""

    def __init__(self, microbatches: int, run_pass: RunPass):
        self.statistics = Statistics()
        self._microbatches = microbatches
        self._run_pass = run_pass

    def compute(self, microbatches: Sequence[int]) -> None:
        if microbatches:
            self.statistics.add(*self._run_pass(microbatches), float(len(microbatches)))

    def buckets(self) -> Sequence[Bucket]:
        return (self.statistics.bucket,)

    def commit(self) -> None:
        self.statistics.commit(self._microbatches)
