"""Policies, assignments, sample ids and streams: pure tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.config import POLICIES
from recover_megatron.errors import ConfigError, InvariantViolation
from recover_megatron.workload.assignment import Assignment, parse, validate
from recover_megatron.workload.policy import (
    ExactPolicy,
    VersatilePolicy,
    anew,
    make_policy,
    moved,
    promoted,
)
from recover_megatron.workload.samples import Streams, parse_streams, sample_ids
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


@pytest.mark.parametrize("policy", POLICIES)
@given(failure_schedules())
def test_assignments_print_and_parse_back(policy, schedule):
    replicas, microbatches, lost = schedule
    world = World.initial(ReplicaLayout(replicas, 1))
    assignment = make_policy(policy).plan(world, microbatches)
    assert parse(str(assignment)) == assignment
    if lost:
        world = world.shrunk_to(set(world.replicas) - set(lost))
        assignment = make_policy(policy).reassign(assignment, world)
    assert parse(str(assignment)) == assignment


@given(failure_schedules())
def test_versatile_roles_are_majors_one_minor_and_spares(schedule):
    replicas, microbatches, _ = schedule
    plan = VersatilePolicy().plan(World.initial(ReplicaLayout(replicas, 1)), microbatches)
    validate(plan, World.initial(ReplicaLayout(replicas, 1)), microbatches)
    quota = -(-microbatches // replicas)
    loads = [len(ids) + sum(plan.parts(replica)) for replica, ids in plan.shares]
    contributed = [len(ids) for _, ids in plan.shares]
    assert max(loads) == quota  # no policy can do with less
    assert sum(0 < n < quota for n in contributed) <= 1
    assert all(sum(parts) == quota and not plan.share(r) for r, parts in plan.withheld)


@st.composite
def losses_within_an_iteration(draw):
    """(replicas, microbatches, groups of replicas lost together, one group after the other)."""
    replicas, microbatches, lost = draw(failure_schedules())
    groups: list[list[int]] = []
    for replica in lost:
        if groups and draw(st.booleans()):
            groups[-1].append(replica)
        else:
            groups.append([replica])
    return replicas, microbatches, groups


@given(losses_within_an_iteration())
def test_versatile_commits_b_promotes_spares_first_and_computes_no_more_than_it_must(schedule):
    replicas, microbatches, groups = schedule
    policy = VersatilePolicy()
    world = World.initial(ReplicaLayout(replicas, 1))
    assignment = policy.plan(world, microbatches)
    quota = max(len(ids) for _, ids in assignment.shares)
    for group in groups:
        world = world.shrunk_to(set(world.replicas) - set(group))
        after = policy.reassign(assignment, world)
        validate(after, world, microbatches)
        owed = sum(len(assignment.share(replica)) for replica in group)
        computed = {r: len(anew(assignment, after, r)) for r in world.replicas}
        stood_in = 0
        for replica in world.replicas:
            parts = assignment.parts(replica)[: promoted(assignment, after, replica)]
            stood_in += sum(parts)
            held = assignment.share(replica)
            assert after.share(replica)[: len(held)] == held
            assert len(moved(assignment, after, replica)) == sum(parts) + computed[replica]
            # What a stream gives is committed in its order: nothing computed behind what waits.
            assert not (after.parts(replica) and computed[replica])
        assert stood_in + sum(computed.values()) == owed
        spares = sum(sum(assignment.parts(r)) >= quota for r in world.replicas)
        if spares * quota >= owed and owed % quota == 0:
            assert not any(computed.values())  # spares enough: no computation
        contributing = [r for r in world.replicas if not after.parts(r)]
        assert max(computed.values()) <= -(-sum(computed.values()) // len(contributing))
        assignment = after


@given(losses_within_an_iteration())
def test_a_lost_minor_is_replaced_by_a_spare_without_computing(schedule):
    replicas, microbatches, _ = schedule
    world = World.initial(ReplicaLayout(replicas, 1))
    plan = VersatilePolicy().plan(world, microbatches)
    sizes = {r: len(ids) for r, ids in plan.shares if ids}
    minor = min(sizes, key=lambda r: sizes[r])
    if not plan.withheld or sizes[minor] == max(sizes.values()):
        return
    world = world.shrunk_to(set(world.replicas) - {minor})
    after = VersatilePolicy().reassign(plan, world)
    spare = plan.withheld[0][0]
    assert after.share(spare) == plan.share(minor)
    assert not any(anew(plan, after, r) for r in world.replicas)


def test_versatile_reads_like_the_documentation_says():
    world = World.initial(ReplicaLayout(6, 1))
    plan = VersatilePolicy().plan(world, 7)
    assert str(plan) == ("r0: 0-1\nr1: 2-3\nr2: 4-5\nr3: 6\nr4: withheld 1+1\nr5: withheld 1+1")
    after = VersatilePolicy().reassign(plan, world.shrunk_to({1, 2, 3, 4, 5}))
    assert str(after) == "r1: 2-3\nr2: 4-5\nr3: 6\nr4: 0-1\nr5: withheld 1+1"
    after = VersatilePolicy().reassign(after, World(2, (1, 2, 4, 5)))  # the minor
    assert str(after) == "r1: 2-3\nr2: 4-5\nr4: 0-1\nr5: 6 withheld 1"
    after = VersatilePolicy().reassign(after, World(3, (1, 4, 5)))  # a major: half is there
    assert str(after) == "r1: 2-3, 5\nr4: 0-1\nr5: 6, 4"


@given(failure_schedules(), st.integers(0, 3))
def test_streams_commit_every_microbatch_of_a_stream_once_in_order(schedule, steps):
    replicas, microbatches, lost = schedule
    world, streams = World.initial(ReplicaLayout(replicas, 1)), Streams((0,) * replicas, 5)
    taken: list[int] = []
    for step in range(steps + len(lost)):
        assignment = VersatilePolicy().plan(world, microbatches)
        if step < len(lost):
            world = world.shrunk_to(set(world.replicas) - {lost[step]})
            assignment = VersatilePolicy().reassign(assignment, world)
        for replica, ids in assignment.shares:
            taken += [streams.microbatch(replica, k) for k in range(len(ids))]
        streams = streams.committed(assignment)
        assert parse_streams(str(streams)) == streams
    assert len(set(taken)) == len(taken) == microbatches * (steps + len(lost))
    resumed = streams.resumed_by(replicas + 1)
    assert resumed.microbatch(0, 0) >= max([5, *(t + 1 for t in taken)])
    assert streams.resumed_by(replicas) == streams


def test_without_failures_streams_take_the_samples_of_the_exact_policy():
    world, streams = World.initial(ReplicaLayout(3, 1)), Streams.after(12, 3)
    for step in range(3):
        assignment = VersatilePolicy().plan(world, 6)
        numbers = [
            streams.microbatch(r, k) for r, ids in assignment.shares for k in range(len(ids))
        ]
        assert sorted(numbers) == list(range(12 + 6 * step, 18 + 6 * step))
        streams = streams.committed(assignment)


@pytest.mark.parametrize("text", ["", "{}", '{"positions": 3, "first": 0}', '{"positions": []}'])
def test_a_broken_file_of_stream_positions_is_refused(text):
    with pytest.raises(ConfigError, match="positions of the sample streams"):
        parse_streams(text)


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
