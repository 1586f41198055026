"""Simulates whole jobs: the production machine, policy, driver and guard, R x M ranks, one seed."""

from __future__ import annotations

import numpy as np

from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.collectives.scripted import Death, ScriptedJob, ScriptedTransport
from recover_megatron.inject import Injector
from recover_megatron.recovery.driver import Driver
from recover_megatron.recovery.snapshot import Bucket
from recover_megatron.workload.policy import ExactPolicy
from recover_megatron.world import ReplicaLayout, World

MICROBATCHES, BUCKETS = 7, 2


class CountingWork:
    """Its gradient counts by microbatch id how often each was computed: a right commit is all 1."""

    def __init__(self, log: list[np.ndarray]):
        self._buckets = [
            Bucket(np.zeros(MICROBATCHES), np.zeros(MICROBATCHES)) for _ in range(BUCKETS)
        ]
        self._log = log

    def compute(self, microbatches):
        for bucket in self._buckets:
            bucket.local[list(microbatches)] += 1

    def buckets(self):
        return self._buckets

    def commit(self):
        self._log.append(np.array([bucket.reduced.copy() for bucket in self._buckets]))


def simulate(
    layout: ReplicaLayout,
    deaths: dict[int, Death],
    seed: int,
    together: bool = False,
    steps: int = 2,
):
    """Runs the job; returns the job and, by surviving rank, (final world, commits)."""
    job = ScriptedJob(layout, deaths, seed, together)

    def rank_main(transport: ScriptedTransport):
        def emit(event, **facts):
            if event == "committed":
                shares = facts["assignment"].replace("\n", "; ")
                job.say(transport.rank, f"commits iteration {facts['iteration']}: {shares}")
            elif event == "repaired":
                lost = " ".join(f"r{r}" for r in facts["replicas_lost"])
                job.say(transport.rank, f"world epoch {facts['world_epoch']}, lost {lost}")

        communicator = GuardedCommunicator(transport, layout, transport.rank, 1e-9, 1e-9)
        world = communicator.begin(World.initial(layout))
        driver = Driver(
            communicator,
            ExactPolicy(),
            world,
            layout.replica_of(transport.rank),
            Injector([], emit),
            emit,
        )
        commits: list[np.ndarray] = []
        for step in range(steps):
            driver.run_step(step, MICROBATCHES, CountingWork(commits))
        return driver.world, commits

    return job, job.run(rank_main)


def check(
    layout: ReplicaLayout,
    deaths: dict[int, Death],
    seed: int,
    together: bool = False,
    steps: int = 2,
) -> int:
    """All invariants of one schedule; returns the number of surviving replicas."""
    story = f"seed {seed}, deaths {deaths}"
    job, results = simulate(layout, deaths, seed, together, steps)
    story += "\n" + "\n".join(job.transcript)
    doomed = {layout.replica_of(r) for r in deaths if r in job.failed()}
    survivors = set(range(layout.ranks)) - set(job.failed())
    assert set(results) == survivors, story
    # I4: a replica that lost nobody reaches the end.
    for replica in range(layout.replicas):
        whole = all(r in survivors for r in layout.ranks_of(replica))
        assert whole or replica in doomed, story
    for _, commits in results.values():
        assert len(commits) == steps, story
        for commit in commits:
            assert (commit == 1).all(), story  # I1: every microbatch exactly once, in every bucket
    assert len({world for world, _ in results.values()}) <= 1, story
    return len({layout.replica_of(r) for r in survivors})
