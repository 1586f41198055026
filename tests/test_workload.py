"""The exact policy, assignments and sample ids: pure tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.errors import InvariantViolation
from recover_megatron.workload.assignment import Assignment, parse, validate
from recover_megatron.workload.policy import ExactPolicy, moved
from recover_megatron.workload.samples import sample_ids
from recover_megatron.world import ReplicaLayout, World

POLICY = ExactPolicy()


@st.composite
def failure_schedules(draw):
    """(replicas, microbatches, replicas lost in order); one replica stays."""
    replicas = draw(st.integers(1, 12))
    microbatches = draw(st.integers(replicas, 40))
    order = draw(st.permutations(range(replicas)))
    return replicas, microbatches, order[: draw(st.integers(0, replicas - 1))]


@given(failure_schedules())
def test_every_schedule_assigns_every_microbatch_once_and_moves_only_the_lost_ones(schedule):
    replicas, microbatches, lost = schedule
    world = World.initial(ReplicaLayout(replicas, 1))
    assignment = POLICY.plan(world, microbatches)
    validate(assignment, world, microbatches)
    for replica in lost:
        world = world.shrunk_to(set(world.replicas) - {replica})
        after = POLICY.reassign(assignment, world)
        validate(after, world, microbatches)
        assert after.committed == microbatches
        for survivor in world.replicas:
            kept = after.share(survivor)[: len(assignment.share(survivor))]
            assert kept == assignment.share(survivor)
            assert set(moved(assignment, after, survivor)) <= set(assignment.share(replica))
        assignment = after
    sizes = [len(ids) for _, ids in assignment.shares]
    assert max(sizes) - min(sizes) <= 1  # so that no replica works longer than ceil(B / n)


@given(failure_schedules())
def test_assignments_print_and_parse_back(schedule):
    replicas, microbatches, lost = schedule
    world = World.initial(ReplicaLayout(replicas, 1))
    assignment = POLICY.plan(world, microbatches)
    if lost:
        assignment = POLICY.reassign(assignment, world.shrunk_to(set(world.replicas) - set(lost)))
    assert parse(str(assignment)) == assignment


def test_an_assignment_reads_like_the_documentation_says():
    after = POLICY.reassign(
        Assignment.of({0: range(4), 1: range(4, 7), 2: range(7, 10)}), World(1, (0, 2))
    )
    assert str(after) == "r0: 0-3, 5\nr2: 7-9, 4, 6"


@pytest.mark.parametrize(
    ("shares", "world"),
    [
        ({0: [0, 1], 1: [1, 2]}, (0, 1)),  # twice
        ({0: [0, 1]}, (0,)),  # one missing
        ({0: [0], 1: [1, 2]}, (0,)),  # a dead replica holds two
    ],
)
def test_the_validator_refuses_and_prints_the_grid(shares, world):
    with pytest.raises(InvariantViolation, match="r0: 0"):
        validate(Assignment.of(shares), World(3, world), 3)


def test_samples_of_an_iteration_are_a_partition_for_any_replica_shape():
    for dp_size in (1, 2):
        ids = [
            i
            for microbatch in range(6)
            for dp_rank in range(dp_size)
            for i in sample_ids(100, microbatch, 2, dp_rank, dp_size)
        ]
        assert ids == list(range(100, 100 + 12 * dp_size))


@pytest.mark.megatron_lm
def test_samples_equal_megatrons_own_sampler(megatron_lm):
    sampler = megatron_lm("megatron.training.datasets.data_samplers").MegatronPretrainingSampler
    for dp_rank in range(2):
        stock = iter(sampler(1000, 24, 3, dp_rank, 2))
        for microbatch in range(5):
            assert next(stock) == list(sample_ids(24, microbatch, 3, dp_rank, 2))
