"""The decision table of recovery: one iteration from its plan to its commit. Pure.

This is the file where a failure is decided. Nothing here knows MPI, torch, time or chance: every
rank that is given the same agreed events reaches the same state and asks for the same actions.

    state    event          next state   actions
    -------  -------------  -----------  ------------------------------------------------------
    COMPUTE  Computed       REDUCE       Reduce(first stale bucket)
    REDUCE   Reduced        REDUCE       Reduce(next stale bucket)        while one is stale
    REDUCE   Reduced        AGREE        Agree(vote=True)                 when none is
    REDUCE   ReduceFailed   AGREE        Agree(vote=False)
    AGREE    Agreed(True)   COMMITTED    Commit                           the commit point
    AGREE    Agreed(False)  REPAIR       Repair
    REPAIR   Repaired       COMPUTE      Compute(what the lost replicas owed, this replica's part)
                                         and restore what it withheld and is promoted for

Any other pair is illegal: it raises InvariantViolation and leaves the state unchanged.

Two things a local view must never decide: whether a bucket that this rank saw succeed counts
(only the agreement says so), and who is dead (only Repaired says so).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from recover_megatron.errors import InvariantViolation
from recover_megatron.workload.assignment import Assignment, validate
from recover_megatron.workload.policy import anew, promoted
from recover_megatron.world import World


class Phase(Enum):
    COMPUTE = "compute"
    REDUCE = "reduce"
    AGREE = "agree"
    REPAIR = "repair"
    COMMITTED = "committed"


# --- events: what happened ---------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """The gradient of every microbatch assigned to this replica is in the local buckets, and that
    of none that it withholds."""

    buckets: int


@dataclass(frozen=True)
class Reduced:
    """The all-reduce of `bucket` returned without an error at this rank (no more than that)."""

    bucket: int


@dataclass(frozen=True)
class ReduceFailed:
    """The all-reduce of `bucket` reported a lost peer at this rank."""

    bucket: int


@dataclass(frozen=True)
class Agreed:
    """The agreement over the whole world ended; `commit` is the same at every live rank."""

    commit: bool


@dataclass(frozen=True)
class Repaired:
    """The communicators were rebuilt and agreed on over `world`."""

    world: World


Event = Computed | Reduced | ReduceFailed | Agreed | Repaired


# --- actions: work for the driver, in order ------------------------------------------------------


@dataclass(frozen=True)
class Compute:
    """Restore `promote` withheld gradients; compute parts of `withhold` microbatches each and
    withhold their gradients; add the gradients of these microbatch ids to the local buckets."""

    microbatches: tuple[int, ...]
    promote: int = 0
    withhold: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reduce:
    """All-reduce one bucket over the position group, leaving the local bucket as it is."""

    bucket: int


@dataclass(frozen=True)
class Agree:
    """Vote in the consensus barrier over the whole world."""

    vote: bool


@dataclass(frozen=True)
class Repair:
    """Revoke, settle, shrink, split, agree."""


@dataclass(frozen=True)
class Commit:
    """Copy the reduced buckets into the gradient buffers; the optimizer may step."""


Action = Compute | Reduce | Agree | Repair | Commit


class Policy(Protocol):
    def plan(self, world: World, microbatches: int) -> Assignment: ...

    def reassign(self, assignment: Assignment, world: World) -> Assignment: ...


@dataclass(frozen=True)
class State:
    """One iteration at one rank.

    `reduced_under[k]` is the world epoch under which bucket k was last reduced without an error
    here, or None; a bucket is stale unless that is the current epoch (I3).
    """

    phase: Phase
    world: World
    replica_id: int
    microbatches: int
    assignment: Assignment
    reduced_under: tuple[int | None, ...] = ()

    @property
    def stale(self) -> tuple[int, ...]:
        epoch = self.world.world_epoch
        return tuple(k for k, under in enumerate(self.reduced_under) if under != epoch)


def begin(
    policy: Policy, world: World, replica_id: int, microbatches: int
) -> tuple[State, tuple[Action, ...]]:
    """The state with which an iteration of `microbatches` (B) starts, and its first action."""
    assignment = policy.plan(world, microbatches)
    validate(assignment, world, microbatches)
    state = State(Phase.COMPUTE, world, replica_id, microbatches, assignment)
    share, parts = assignment.share(replica_id), assignment.parts(replica_id)
    return state, (Compute(share, withhold=parts),)


def handle(policy: Policy, state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The table above. Raises InvariantViolation for a pair that is not in it."""
    match state.phase, event:
        case Phase.COMPUTE, Computed(buckets):
            tags = state.reduced_under or (None,) * buckets
            if len(tags) != buckets:
                raise _illegal(state, event, f"the iteration began with {len(tags)} buckets")
            return _reduce_next(replace(state, phase=Phase.REDUCE, reduced_under=tags))
        case Phase.REDUCE, Reduced(bucket):
            if bucket not in state.stale:
                raise _illegal(state, event, "that bucket is not stale")
            tags = tuple(
                state.world.world_epoch if k == bucket else under
                for k, under in enumerate(state.reduced_under)
            )
            return _reduce_next(replace(state, reduced_under=tags))
        case Phase.REDUCE, ReduceFailed(_):
            return replace(state, phase=Phase.AGREE), (Agree(vote=False),)
        case Phase.AGREE, Agreed(commit=True):
            if state.stale:
                raise _illegal(state, event, f"buckets {state.stale} are stale (I3)")
            return replace(state, phase=Phase.COMMITTED), (Commit(),)
        case Phase.AGREE, Agreed(commit=False):
            return replace(state, phase=Phase.REPAIR), (Repair(),)
        case Phase.REPAIR, Repaired(world):
            if world.world_epoch <= state.world.world_epoch:
                raise _illegal(state, event, "the world epoch must grow")
            assignment = policy.reassign(state.assignment, world)
            validate(assignment, world, state.microbatches)
            change = (state.assignment, assignment, state.replica_id)
            action = Compute(tuple(anew(*change)), promote=promoted(*change))
            state = replace(state, phase=Phase.COMPUTE, world=world, assignment=assignment)
            return state, (action,)
    raise _illegal(state, event, "the table has no such row")


def _reduce_next(state: State) -> tuple[State, tuple[Action, ...]]:
    if state.stale:
        return state, (Reduce(state.stale[0]),)
    return replace(state, phase=Phase.AGREE), (Agree(vote=True),)


def _illegal(state: State, event: Event, why: str) -> InvariantViolation:
    return InvariantViolation(
        f"{event} in phase {state.phase.value} of replica {state.replica_id}, world epoch "
        f"{state.world.world_epoch}: {why}"
    )
