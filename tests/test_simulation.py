"""The production machine, policy, driver and guard over the scripted transport, seeded."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.collectives.scripted import Death, ScriptedJob, ScriptedTransport
from recover_megatron.inject import Injector
from recover_megatron.recovery.driver import Driver
from recover_megatron.recovery.snapshot import Bucket
from recover_megatron.workload.policy import ExactPolicy
from recover_megatron.world import ReplicaLayout, World

STEPS, MICROBATCHES, BUCKETS = 2, 7, 2


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


def simulate(layout: ReplicaLayout, deaths: dict[int, Death], seed: int, together: bool = False):
    """Runs the job; returns the job and, by surviving rank, (final world, commits)."""
    job = ScriptedJob(layout, deaths, seed, together)

    def rank_main(transport: ScriptedTransport):
        communicator = GuardedCommunicator(transport, layout, transport.rank, 1e-9, 1e-9)
        world = communicator.begin(World.initial(layout))
        driver = Driver(
            communicator,
            ExactPolicy(),
            world,
            layout.replica_of(transport.rank),
            Injector([], lambda *a, **k: None),
            lambda *a, **k: None,
        )
        commits: list[np.ndarray] = []
        for step in range(STEPS):
            driver.run_step(step, MICROBATCHES, CountingWork(commits))
        return driver.world, commits

    return job, job.run(rank_main)


def check(
    layout: ReplicaLayout, deaths: dict[int, Death], seed: int, together: bool = False
) -> int:
    """All invariants of one schedule; returns the number of surviving replicas."""
    story = f"seed {seed}, deaths {deaths}"
    job, results = simulate(layout, deaths, seed, together)
    story += "\n" + "\n".join(job.transcript)
    doomed = {layout.replica_of(r) for r in deaths if r in job.failed()}
    survivors = set(range(layout.ranks)) - set(job.failed())
    assert set(results) == survivors, story
    # I4: whoever's replica lost nobody reaches the end; nobody else does, unless a death came late.
    for replica in range(layout.replicas):
        whole = all(r in survivors for r in layout.ranks_of(replica))
        assert whole or replica in doomed, story
    for _, commits in results.values():
        assert len(commits) == STEPS, story
        for commit in commits:
            assert (commit == 1).all(), story  # I1: every microbatch exactly once, in every bucket
    assert len({world for world, _ in results.values()}) <= 1, story
    return len({layout.replica_of(r) for r in survivors})


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rank", range(6))
def test_every_single_failure_point_of_three_replicas_of_two_ranks(rank: int, inside: bool):
    layout = ReplicaLayout(3, 2)
    for call, seed in itertools.product(range(9), range(4)):
        assert check(layout, {rank: Death(call, inside)}, seed) >= 2


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_commit_every_microbatch_exactly_once(block: int):
    for seed in range(block * 300, block * 300 + 300):
        draw = random.Random(seed)
        layout = ReplicaLayout(draw.choice([2, 3, 4]), draw.choice([1, 2, 3]))
        number = draw.randrange(1, layout.ranks)
        deaths = {
            rank: Death(draw.randrange(16), draw.random() < 0.5)
            for rank in draw.sample(range(layout.ranks), number)
        }
        check(layout, deaths, seed, together=draw.random() < 0.3)


def test_a_seed_replays_the_same_transcript():
    layout, deaths = ReplicaLayout(3, 2), {1: Death(2, True), 4: Death(6, False)}
    first, second = simulate(layout, deaths, 5)[0], simulate(layout, deaths, 5)[0]
    assert first.transcript == second.transcript
    assert any("shrinks" in line for line in first.transcript)
