"""One training iteration, or one batch of an evaluation, of a framework as the driver's Work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from recover_megatron.recovery.bucket import Bucket, Snapshot
from recover_megatron.session.gradients import GradientBuckets
from recover_megatron.session.statistics import Losses, Statistics

RunPass = Callable[[Sequence[int]], tuple[Losses, float]]


@dataclass(frozen=True)
class NanRule:
    """What a NaN or infinity in a further pass of an iteration means.

    Where a replica computes the lost one's samples again, a NaN in them is the second one: the
    fault is not the hardware's. It must end the whole job, not one replica after the other, so it
    travels in the reduction (`Statistics.poisoned`). A NaN in other samples ends the replica.

    Attributes:
        looks: Whether it is looked for; with a dynamic loss scale it is no fault.
        same_samples: A further pass computes the lost replica's samples again.
        any_in_replica: Logical or over the ranks of the replica.
    """

    looks: bool
    same_samples: bool
    any_in_replica: Callable[[bool], bool]

    def count(self, microbatches: float, finite: Callable[[], bool]) -> float:
        """What the pass counts in the reduction: its `microbatches`, or NaN, which poisons the sum
        and so ends the whole job. Raises FloatingPointError where it is this replica's fault. All
        ranks of the replica call it and come to the same end."""
        if not self.looks or not self.any_in_replica(not finite()):
            return microbatches
        if not self.same_samples:
            raise FloatingPointError("found NaN or infinity in a further pass")
        return math.nan


class Iteration:
    """Runs the framework's schedule for whatever microbatches this replica is given.

    `run_pass(ids)` runs the framework's own forward-backward schedule over those ids and its
    gradient sync inside the replica, and returns the list of loss dicts (empty but on the last
    pipeline stage) and the number of tokens.

    A NaN in a first pass ends the replica by the framework's own check; for later ones see NanRule.
    """

    def __init__(
        self,
        gradients: GradientBuckets,
        statistics: Statistics,
        microbatches: int,
        run_pass: RunPass,
        nan_rule: NanRule,
    ):
        self.statistics = statistics
        self._gradients = gradients
        self._microbatches = microbatches
        self._run_pass = run_pass
        self._nan_rule = nan_rule
        self._started = False

    def compute(self, microbatches: Sequence[int]) -> None:
        if not microbatches:
            return
        kept = Snapshot(self._gradients.buckets) if self._started else None
        self._gradients.before_compute()
        if kept is not None:
            self._gradients.zero()
        self.statistics.begin_pass()
        losses, tokens = self._run_pass(microbatches)
        self._gradients.stage_in()
        count = float(len(microbatches))
        if kept is not None:
            count = self._nan_rule.count(count, lambda: self._finite(losses))
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
