"""The event loop. Time goes from iteration to iteration; iterations that no failure touches are
taken many at once, and one that is hit goes through recovery/machine.py step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, sqrt

from recover_megatron.goodput.costs import Recover, Restart, SimulatedJob, System
from recover_megatron.goodput.failures import Failure
from recover_megatron.recovery import machine
from recover_megatron.workload.assignment import Assignment
from recover_megatron.workload.policy import make_policy
from recover_megatron.world import ReplicaLayout, World


@dataclass(frozen=True)
class Moment:
    """The state of the job at one time; `iterations` are those committed and not lost again."""

    time_s: float
    gpu_s: float  # live GPUs x seconds so far
    iterations: int
    replicas: int
    failures: int

    @property
    def progress(self) -> tuple[float, float, int]:
        return self.time_s, self.gpu_s, self.iterations


@dataclass(frozen=True)
class Cost:
    """Where the time of one failure went, in seconds."""

    time_s: float
    detect_s: float
    repair_s: float = 0.0  # the repair; or, of a restart, starting and loading
    redo_s: float = 0.0  # what was lost, computed and reduced again
    load_s: float = 0.0


@dataclass
class Result:
    """`moments` has one at least for each change, ascending in time."""

    job: SimulatedJob
    moments: list[Moment]
    costs: list[Cost]
    saves: int = 0
    ended: str = ""

    @property
    def last(self) -> Moment:
        return self.moments[-1]

    @property
    def tokens(self) -> int:
        return self.last.iterations * self.job.tokens

    def at(self, known: str, value: float) -> tuple[float, float, float]:
        """(time_s, gpu_s, iterations) where `known`, one of these, came to that value: for the last
        time, if a restart went back. Linear between two moments.

        Raises ValueError for a value that the run did not reach.
        """
        for before, after in zip(self.moments[-2::-1], self.moments[:0:-1], strict=True):
            low, high = getattr(before, known), getattr(after, known)
            if low < value <= high:
                share = (value - low) / (high - low)
                pairs = zip(before.progress, after.progress, strict=True)
                time_s, gpu_s, iterations = (a + share * (b - a) for a, b in pairs)
                return time_s, gpu_s, iterations
        raise ValueError(f"the run did not reach {known} {value}; its last moment is {self.last}")


def simulate(
    job: SimulatedJob,
    system: System,
    failures: Iterable[Failure],
    *,
    until_s: float = float("inf"),
    until_iteration: int = 1 << 62,
    mean_s: float | None = None,
) -> Result:
    """The job under `system` until a time or an iteration is reached, or too few replicas are left.

    `mean_s`, the mean time between failures, is for Daly's interval.
    """
    run: _Run
    if isinstance(system, Restart):
        run = _Restarting(job, system, iter(failures), until_s, mean_s)
    else:
        run = _Recovering(job, system, iter(failures), until_s)
    while run.time_s < until_s and run.iterations < until_iteration and not run.result.ended:
        run.advance(until_iteration)
    return run.result


class _Run:
    """The clock, the pending failure, and the record."""

    def __init__(self, job: SimulatedJob, failures: Iterator[Failure], until_s: float):
        self.job = job
        self.until_s = until_s
        self.failures = failures
        self.pending = next(failures, None)
        self.time_s = self.gpu_s = 0.0
        self.iterations = 0
        self.replicas = job.replicas
        self.seen = 0
        self.result = Result(job, [Moment(0.0, 0.0, 0, job.replicas, 0)], [])

    def advance(self, until_iteration: int) -> None:
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds
        self.gpu_s += seconds * self.replicas * self.job.gpus_per_replica

    def note(self) -> None:
        moment = Moment(self.time_s, self.gpu_s, self.iterations, self.replicas, self.seen)
        self.result.moments.append(moment)

    def take_failure(self) -> Failure:
        assert self.pending is not None
        failure, self.pending = self.pending, next(self.failures, None)
        self.seen += 1
        return failure

    def strikes(self, seconds: float, reducing: bool = False) -> float | None:
        """When the pending failure strikes, if within the `seconds` from now; one that is given by
        its iteration does so in the middle of the reduction."""
        if self.pending is None:
            return None
        if self.pending.time_s is None:
            due = reducing and (self.pending.iteration or 0) <= self.iterations + 1
            return self.time_s + seconds / 2 if due else None
        at = max(self.time_s, self.pending.time_s)
        return at if at < self.time_s + seconds else None

    def untouched(self, iteration_s: float, limit: float, until_iteration: int) -> int:
        """How many whole iterations of this length come before the failure and `limit`."""
        count = until_iteration - self.iterations
        if self.pending is not None and self.pending.iteration is not None:
            count = min(count, self.pending.iteration - 1 - self.iterations)
        elif self.pending is not None and self.pending.time_s is not None:
            limit = min(limit, self.pending.time_s)
        if limit < float("inf"):
            count = min(count, int((limit - self.time_s) / iteration_s))
        return max(0, count)


class _Restarting(_Run):
    def __init__(
        self,
        job: SimulatedJob,
        system: Restart,
        failures: Iterator[Failure],
        until_s: float,
        mean_s: float | None,
    ):
        super().__init__(job, failures, until_s)
        self.system = system
        each = ceil(job.microbatches / job.replicas)
        self.reduce_s = system.reduce.at(job.replicas)
        self.iteration_s = each * job.compute_s + self.reduce_s
        best = sqrt(2 * system.save_s * mean_s) / self.iteration_s if mean_s else 32
        self.interval = system.interval or max(1, round(best))
        self.saved = 0

    def advance(self, until_iteration: int) -> None:
        """To the next save, or through a failure."""
        goal = min(until_iteration, self.saved + self.interval)
        count = self.untouched(self.iteration_s, self.until_s, goal)
        self.pass_time(count * self.iteration_s)
        self.iterations += count
        if self.iterations < goal:
            if not self._survives(self.iteration_s - self.reduce_s):
                return
            if not self._survives(self.reduce_s, reducing=True):
                return
            self.iterations += 1
        if self.iterations == self.saved + self.interval and self._survives(self.system.save_s):
            self.saved = self.iterations
            self.result.saves += 1
        self.note()

    def _survives(self, seconds: float, reducing: bool = False) -> bool:
        """False if a failure struck meanwhile; the job has started again then."""
        at = self.strikes(seconds, reducing)
        if at is None:
            self.pass_time(seconds)
            return True
        self._restart(at)
        return False

    def _restart(self, at: float) -> None:
        system = self.system
        self.pass_time(at - self.time_s)
        self.note()
        self.take_failure()
        lost = self.iterations - self.saved
        self.iterations = self.saved
        self.note()
        down_s = system.detect_s + system.restart_s + system.load_s + system.warmup_s
        while (again := self.strikes(down_s)) is not None and again < self.until_s:
            self.take_failure()  # the restart starts anew
            self.pass_time(again - self.time_s)
        self.pass_time(down_s)
        redo = lost * self.iteration_s + system.warmup_s
        cost = Cost(at, system.detect_s, system.restart_s, redo, system.load_s)
        self.result.costs.append(cost)
        self.note()


class _Recovering(_Run):
    def __init__(
        self, job: SimulatedJob, system: Recover, failures: Iterator[Failure], until_s: float
    ):
        super().__init__(job, failures, until_s)
        self.system = system
        self.policy = make_policy(system.policy)
        self.layout = ReplicaLayout(job.replicas, job.gpus_per_replica)
        self.world = World.initial(self.layout)
        self.settled = True
        self._lost: list[int] = []  # replicas of which the world does not know it yet
        self.regain_at = system.regain_interval_s or float("inf")
        self._plan()

    def _plan(self) -> None:
        """The iteration's length while this membership lasts."""
        assignment = self.policy.plan(self.world, self.job.microbatches)
        self.reduce_s = self.system.reduce.at(self.replicas)
        self.agree_s = self.system.agree.at(self.replicas)
        compute_s = _longest(Assignment(()), assignment) * self.job.compute_s
        self.iteration_s = compute_s + self.reduce_s + self.agree_s

    def advance(self, until_iteration: int) -> None:
        """Through the iterations that nothing touches, then through the one that a failure hits."""
        if self.settled:
            limit = min(self.until_s, self.regain_at)
            count = self.untouched(self.iteration_s, limit, until_iteration)
            self.pass_time(count * self.iteration_s)
            self.iterations += count
            if count:
                self.note()
        if self.time_s + self.iteration_s > self.regain_at and self.settled:
            self._regain()
            self.note()
        elif self.iterations < until_iteration and self.time_s < self.until_s:
            self._iterate()
            self.note()

    def _regain(self) -> None:
        if self.replicas < self.job.replicas:
            self.pass_time(self.system.regain_s)
            self.replicas = self.job.replicas
            self.world = World.initial(self.layout)
            self._plan()
        self.regain_at = self.time_s + self.system.regain_interval_s

    def _iterate(self) -> None:
        """One iteration by the decision table, as the lowest live replica sees it: every replica
        that is given the same events decides alike."""
        job, begun = self.job, self.time_s
        state, (action,) = machine.begin(
            self.policy, self.world, self.world.leader, job.microbatches
        )
        before = Assignment(())
        struck: list[float] = []  # failures that the world does not know yet
        if not self.settled:
            self.pass_time(self.system.settle_s)
            self.settled = True
        while True:
            event: machine.Event
            match action:
                case machine.Compute():
                    self._act(_longest(before, state.assignment) * job.compute_s, struck)
                    before, event = state.assignment, machine.Computed(1)
                case machine.Reduce(bucket):
                    self._act(self.reduce_s, struck, reducing=True)
                    failed = machine.ReduceFailed(bucket)
                    event = failed if struck else machine.Reduced(bucket)
                case machine.Agree(vote):
                    self._act(self.agree_s, struck)
                    event = machine.Agreed(vote and not struck)
                case machine.Repair():
                    repaired = self._repair(struck)
                    if repaired is None:
                        return
                    event = repaired
                    state = replace(state, replica_id=self.world.leader)
                case machine.Commit():
                    break
            state, (action,) = machine.handle(self.policy, state, event)
        self.iterations += 1
        if self.result.costs and self.result.costs[-1].time_s >= begun:
            # What the last repair left to do, against an iteration without a failure.
            last = self.result.costs[-1]
            whole = self.time_s - begun - self.iteration_s - last.detect_s - last.repair_s
            self.result.costs[-1] = replace(last, redo_s=max(0.0, whole))

    def _act(self, seconds: float, struck: list[float], reducing: bool = False) -> None:
        """Let `seconds` pass; failures in them are put into `struck`."""
        while (at := self.strikes(seconds, reducing)) is not None:
            replica = self.layout.replica_of(self.take_failure().gpu % self.job.gpus)
            if replica in self.world.replicas:
                struck.append(at)
                self._lost.append(replica)
        self.pass_time(seconds)

    def _repair(self, struck: list[float]) -> machine.Repaired | None:
        """Waits until the losses are known, repairs, and again if more were lost meanwhile."""
        known = 0
        while known < len(struck):
            known = len(struck)
            wait = max(0.0, max(struck) + self.system.detect_s - self.time_s)
            repair_s = self.system.repair.at(self.replicas)
            self.result.costs.append(Cost(max(struck), wait, repair_s))
            self._act(wait + repair_s, struck)
        struck.clear()
        left = set(self.world.replicas) - set(self._lost)
        self._lost.clear()
        if not left:
            self.result.ended = "no replica is left"
            self.replicas = 0
            return None
        self.world = self.world.shrunk_to(left)
        self.replicas = len(left)
        self._plan()
        self.settled = self.system.settle_s == 0
        self.note()
        return machine.Repaired(self.world)


def _longest(before: Assignment, after: Assignment) -> int:
    """The most microbatches that one replica has to compute to come from one assignment to the
    other. What a spare withholds, it computes with the first; parts that are promoted cost nothing
    (workload/policy.py)."""
    had, has = _computed(before), _computed(after)
    return max(count - had.get(replica, 0) for replica, count in has.items())


def _computed(assignment: Assignment) -> dict[int, int]:
    """By replica, contributed or withheld."""
    counts = {replica: len(ids) for replica, ids in assignment.shares}
    for replica, parts in assignment.withheld:
        counts[replica] += sum(parts)
    return counts
