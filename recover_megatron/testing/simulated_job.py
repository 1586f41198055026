"""Simulates whole jobs: the production machine, policy, driver and guard, R x M ranks, one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.config import RecoveryConfig
from recover_megatron.errors import NoQuorum
from recover_megatron.events import Committed, Event, Repaired
from recover_megatron.inject import Injector
from recover_megatron.recovery.bucket import Bucket
from recover_megatron.recovery.driver import Driver
from recover_megatron.recovery.present import PresentWorld
from recover_megatron.testing.scripted import (
    Death,
    ScriptedFabric,
    ScriptedJob,
    ScriptedMembership,
)
from recover_megatron.workload.policy import make_policy
from recover_megatron.workload.samples import Streams
from recover_megatron.world import ReplicaLayout, World

MICROBATCHES, BUCKETS = 7, 2
Outcome = tuple[World, list[np.ndarray], Streams | None]
QUICK = RecoveryConfig(settle_s=1e-9, settle_limit_s=1e-9, proof_poll_s=1e-9, proof_polls=2)


class CountingWork:
    """Its gradient counts how often each microbatch was computed: by id, or, with streams, by its
    number in the dataset. It counts in units of the step, as a gradient of another step's weights
    is another gradient. A right commit holds B times one unit."""

    SIZE = 64  # more than any stream reaches in the steps of a simulation

    def __init__(self, log: list[np.ndarray], step: int, streams: Streams | None, replica: int):
        self._buckets = [Bucket(np.zeros(self.SIZE), np.zeros(self.SIZE)) for _ in range(BUCKETS)]
        self._log = log
        self._unit = step + 1.0
        self._streams, self._replica, self._offset = streams, replica, 0

    def compute(self, microbatches: Sequence[int]) -> None:
        numbers = list(microbatches)
        if self._streams is not None:
            offsets = range(self._offset, self._offset + len(numbers))
            numbers = [self._streams.microbatch(self._replica, k) for k in offsets]
            self._offset = offsets.stop
        for bucket in self._buckets:
            bucket.local[numbers] += self._unit

    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def commit(self) -> None:
        self._log.append(np.array([bucket.reduced / self._unit for bucket in self._buckets]))


@dataclass(frozen=True)
class Schedule:
    """One simulated job: who dies where, and a seed for all that is left to chance."""

    layout: ReplicaLayout
    deaths: dict[int, Death]
    seed: int
    together: bool = False
    steps: int = 2
    policy: str = "exact"
    microbatches: int = MICROBATCHES


def simulate(schedule: Schedule) -> tuple[ScriptedJob, dict[int, Outcome]]:
    """Runs the job; returns the job and, by surviving rank, (final world, commits)."""
    layout, replicas = schedule.layout, schedule.layout.replicas
    job = ScriptedJob(layout, schedule.deaths, schedule.seed, schedule.together)

    def rank_main(membership: ScriptedMembership, fabric: ScriptedFabric) -> Outcome:
        try:
            return steps_of_a_rank(membership, fabric)
        except NoQuorum as error:
            membership.die(str(error))

    def steps_of_a_rank(membership: ScriptedMembership, fabric: ScriptedFabric) -> Outcome:
        rank = membership.rank

        def emit(event: Event) -> None:
            if isinstance(event, Committed):
                shares = event.assignment.replace("\n", "; ")
                job.say(rank, f"commits iteration {event.iteration}: {shares}")
            elif isinstance(event, Repaired):
                lost = " ".join(f"r{r}" for r in event.replicas_lost)
                job.say(rank, f"world epoch {event.world_epoch}, lost {lost}")

        replica = layout.replica_of(rank)
        communicator = GuardedCommunicator(membership, fabric, layout, QUICK, job.proven_dead)
        present = PresentWorld(World.initial(layout))
        policy = make_policy(schedule.policy)
        driver = Driver(communicator, policy, present, replica, Injector([], emit))
        driver.begin()
        streams = Streams.after(0, replicas) if schedule.policy == "versatile" else None
        commits: list[np.ndarray] = []
        for step in range(schedule.steps):
            work = CountingWork(commits, step, streams, replica)
            assignment = driver.run_step(step, schedule.microbatches, work)
            streams = streams.committed(assignment) if streams else None
        return driver.world, commits, streams

    return job, job.run(rank_main)


def check(schedule: Schedule) -> int:
    """All invariants of one schedule; returns the number of surviving replicas."""
    job, results = simulate(schedule)
    story = "\n".join([str(schedule), *job.transcript])
    layout = schedule.layout
    doomed = {layout.replica_of(r) for r in schedule.deaths if r in job.failed()}
    survivors = set(range(layout.ranks)) - set(job.failed())
    assert set(results) == survivors, story
    # I4: a replica that lost nobody reaches the end, unless it is behind a partition (I5).
    behind = not results and any(death.silent for death in schedule.deaths.values())
    for replica in range(layout.replicas):
        whole = all(r in survivors for r in layout.ranks_of(replica))
        assert whole or replica in doomed or behind, story
    for _, commits, _ in results.values():
        assert len(commits) == schedule.steps, story
        for commit in commits:  # I1: B microbatches, each once, the same in every bucket
            assert (commit.sum(axis=1) == schedule.microbatches).all(), story
            assert set(commit.flat) <= {0, 1}, story
            assert (commit == commit[0]).all(), story
            assert schedule.policy != "exact" or commit[0, : schedule.microbatches].all(), story
        if schedule.policy == "versatile":  # no microbatch of a stream in two iterations
            assert max(sum(commit[0] for commit in commits)) <= 1, story
    assert len({(world, streams) for world, _, streams in results.values()}) <= 1, story
    first = [np.array(commits) for _, commits, _ in results.values()]
    assert all((commits == first[0]).all() for commits in first), story
    return len({layout.replica_of(r) for r in survivors})
