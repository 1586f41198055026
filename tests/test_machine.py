"""The decision table: each row, each illegal pair, and that an illegal event changes nothing."""

from __future__ import annotations

import itertools

import pytest

from recover_megatron.errors import InvariantViolation
from recover_megatron.recovery.machine import (
    Agree,
    Agreed,
    Commit,
    Compute,
    Computed,
    Phase,
    Reduce,
    Reduced,
    ReduceFailed,
    Repair,
    Repaired,
    begin,
    handle,
)
from recover_megatron.workload.policy import ExactPolicy
from recover_megatron.world import World

POLICY = ExactPolicy()
WORLD = World(0, (0, 1, 2))


def walk(*events):
    """The state and actions after these events, from the start of an iteration of replica 0."""
    state, actions = begin(POLICY, WORLD, 0, 6)
    for event in events:
        state, actions = handle(POLICY, state, event)
    return state, actions


def test_an_iteration_begins_with_this_replicas_share():
    state, actions = walk()
    assert (state.phase, actions) == (Phase.COMPUTE, (Compute((0, 1)),))


def test_without_failures_every_bucket_is_reduced_once_and_committed():
    assert walk(Computed(2))[1] == (Reduce(0),)
    assert walk(Computed(2), Reduced(0))[1] == (Reduce(1),)
    assert walk(Computed(2), Reduced(0), Reduced(1))[1] == (Agree(vote=True),)
    state, actions = walk(Computed(2), Reduced(0), Reduced(1), Agreed(True))
    assert (state.phase, actions) == (Phase.COMMITTED, (Commit(),))


def test_a_failed_reduction_votes_no_and_goes_to_repair():
    assert walk(Computed(2), Reduced(0), ReduceFailed(1))[1] == (Agree(vote=False),)
    assert walk(Computed(2), ReduceFailed(0), Agreed(False))[1] == (Repair(),)


def test_a_no_sends_even_a_rank_that_saw_only_success_to_repair():
    state, actions = walk(Computed(1), Reduced(0), Agreed(False))
    assert (state.phase, actions) == (Phase.REPAIR, (Repair(),))


def test_after_repair_only_the_lost_microbatches_are_computed_and_every_bucket_is_stale():
    events = (Computed(2), Reduced(0), Reduced(1), Agreed(False), Repaired(World(1, (0, 2))))
    state, actions = walk(*events)
    assert actions == (Compute((2,)),)
    assert state.stale == (0, 1)
    assert walk(*events, Computed(2))[1] == (Reduce(0),)


def test_a_bucket_of_an_old_epoch_never_commits():
    state, _ = walk(
        Computed(2), Reduced(0), ReduceFailed(1), Agreed(False), Repaired(World(1, (0, 2)))
    )
    state, _ = handle(POLICY, state, Computed(2))
    state, _ = handle(POLICY, state, Reduced(0))
    state, actions = handle(POLICY, state, Reduced(1))
    assert state.reduced_under == (1, 1)
    assert actions == (Agree(vote=True),)


def test_two_losses_in_one_iteration_leave_all_work_to_the_last_replica():
    events = [Computed(1), ReduceFailed(0), Agreed(False), Repaired(World(1, (0, 1)))]
    events += [Computed(1), Reduced(0), Agreed(False), Repaired(World(2, (0,)))]
    state, actions = walk(*events)
    assert state.assignment.share(0) == (0, 1, 4, 2, 3, 5)
    assert actions == (Compute((2, 3, 5)),)


EVENTS = [
    Computed(2),
    Reduced(0),
    ReduceFailed(0),
    Agreed(True),
    Agreed(False),
    Repaired(World(1, (0,))),
]
REACHING = {
    Phase.COMPUTE: (),
    Phase.REDUCE: (Computed(2),),
    Phase.AGREE: (Computed(2), Reduced(0), Reduced(1)),
    Phase.REPAIR: (Computed(2), ReduceFailed(0), Agreed(False)),
    Phase.COMMITTED: (Computed(2), Reduced(0), Reduced(1), Agreed(True)),
}
LEGAL = {
    (Phase.COMPUTE, "Computed"),
    (Phase.REDUCE, "Reduced"),
    (Phase.REDUCE, "ReduceFailed"),
    (Phase.AGREE, "Agreed"),
    (Phase.REPAIR, "Repaired"),
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, EVENTS)), ids=str)
def test_the_table_is_complete_and_an_illegal_event_leaves_the_state_alone(phase, event):
    state, _ = walk(*REACHING[phase])
    assert state.phase is phase
    before = repr(state)
    if (phase, type(event).__name__) in LEGAL:
        handle(POLICY, state, event)
    else:
        with pytest.raises(InvariantViolation):
            handle(POLICY, state, event)
    assert repr(state) == before


@pytest.mark.parametrize(
    ("reaching", "event"),
    [
        ((Computed(2), ReduceFailed(0)), Agreed(True)),  # a yes over stale buckets: I3
        ((Computed(2), Reduced(0)), Reduced(0)),  # the same bucket twice
        ((Computed(2), ReduceFailed(0), Agreed(False)), Repaired(WORLD)),  # no new epoch
    ],
)
def test_events_that_contradict_the_state_are_refused(reaching, event):
    state, _ = walk(*reaching)
    with pytest.raises(InvariantViolation):
        handle(POLICY, state, event)
