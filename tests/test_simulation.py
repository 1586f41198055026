"""Seeded failure schedules over the simulated job: single, in pairs, and thousands at random."""

from __future__ import annotations

import itertools
import random

import pytest

from recover_megatron.config import POLICIES
from recover_megatron.testing.scripted import Death
from recover_megatron.testing.simulated_job import Schedule, check, simulate
from recover_megatron.world import ReplicaLayout


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rank", range(6))
def test_every_single_failure_point_of_three_replicas_of_two_ranks(rank: int, inside: bool):
    layout = ReplicaLayout(3, 2)
    for call, seed, policy in itertools.product(range(9), range(4), POLICIES):
        death = {rank: Death(call, inside)}
        assert check(Schedule(layout, death, seed, policy=policy, microbatches=4)) >= 2


POINTS = [Death(call, inside) for call in range(12) for inside in (False, True)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", list(itertools.combinations(range(6), 2)), ids=str)
def test_every_pair_of_failure_points_of_three_replicas_of_two_ranks(
    ranks: tuple[int, int], policy: str
):
    """An iteration has 5 calls a rank, a repair and redo 7 more: 12 points, before and inside.
    With 4 microbatches the third replica is a spare under `versatile`."""
    layout = ReplicaLayout(3, 2)
    for seed, (first, second) in enumerate(itertools.product(POINTS, POINTS)):
        deaths = dict(zip(ranks, (first, second), strict=True))
        schedule = Schedule(layout, deaths, seed, steps=1, policy=policy, microbatches=4)
        assert check(schedule) >= 1


@pytest.mark.parametrize("block", range(4))
def test_ten_thousand_random_schedules(block: int):
    """Any number of ranks die, up to all; in begin, iteration, repair and repair's repair."""
    for seed in range(block * 2500, block * 2500 + 2500):
        draw = random.Random(seed)
        layout = ReplicaLayout(draw.choice([2, 3, 4]), draw.choice([1, 2, 3]))
        number = draw.randrange(1, layout.ranks + 1)
        deaths = {
            rank: Death(draw.randrange(16), draw.random() < 0.5)
            for rank in draw.sample(range(layout.ranks), number)
        }
        together, policy = draw.random() < 0.3, draw.choice(POLICIES)
        microbatches = draw.randrange(layout.replicas, 8)
        check(Schedule(layout, deaths, seed, together, 2, policy, microbatches))


@pytest.mark.parametrize("block", range(2))
def test_at_most_one_side_of_a_partition_goes_on(block: int):
    """The same moment seen from both sides: each loses the other without proof. Some replicas die
    in it as well, and each side may have proof of that or not."""
    went_on = [0, 0, 0]
    for seed in range(block * 1000, block * 1000 + 1000):
        draw = random.Random(seed)
        layout = ReplicaLayout(draw.choice([2, 3, 4, 5]), draw.choice([1, 2]))
        replicas = draw.sample(range(layout.replicas), layout.replicas)
        dead = {r for r in replicas if draw.random() < 0.2}
        cut, at = draw.randrange(1, layout.replicas), draw.randrange(2, 7)
        sides_going_on = 0
        for side, others in ((replicas[:cut], replicas[cut:]), (replicas[cut:], replicas[:cut])):
            alive = set(side) - dead
            silent = set(others) | {r for r in dead if draw.random() < 0.5}
            deaths = {
                r * layout.ranks_per_replica: Death(at, draw.random() < 0.5, r in silent - alive)
                for r in sorted(dead | set(others))
            }
            job, results = simulate(Schedule(layout, deaths, seed, together=True))
            assert len(results) in (0, len(alive) * layout.ranks_per_replica), job.transcript
            sides_going_on += bool(results)
        assert sides_going_on <= 1, f"seed {seed}"
        went_on[sides_going_on] += 1
    assert min(went_on[:2]) > 100  # both outcomes were seen


def test_a_seed_replays_the_same_transcript():
    layout, deaths = ReplicaLayout(3, 2), {1: Death(2, True), 4: Death(6, False)}
    schedule = Schedule(layout, deaths, 5)
    first, second = simulate(schedule)[0], simulate(schedule)[0]
    assert first.transcript == second.transcript
    assert any("shrinks" in line for line in first.transcript)
