"""The driver: carries one rank through its iterations, as machine.py decides.

It performs each action that the machine asks for (compute, reduce, agree, repair), tells it what
happened, and so on until the iteration is committed. It decides nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from recover_megatron.errors import InvariantViolation, ReplicaLost
from recover_megatron.events import (
    Committed,
    Computed,
    Evaluated,
    Event,
    Repaired,
    SyncFailed,
)
from recover_megatron.recovery import machine
from recover_megatron.recovery.bucket import Array, Bucket, Snapshot
from recover_megatron.recovery.present import PresentWorld
from recover_megatron.workload.assignment import Assignment
from recover_megatron.workload.policy import ExactPolicy, moved
from recover_megatron.world import World

WITHHELD = -1


class Communicator(Protocol):
    """What the driver needs of the collectives layer (collectives/guard.py)."""

    def begin(self, world: World) -> World: ...

    def all_reduce(self, send: Array, receive: Array, op: str = "sum") -> None: ...

    def agree(self, vote: bool, about: str = "iteration") -> bool: ...

    def repair(self, world: World) -> World: ...


class Work(Protocol):
    """One iteration of the host framework, as the driver sees it."""

    def compute(self, microbatches: Sequence[int]) -> None:
        """Add these microbatches' gradient (each scaled by 1/B) to the local buckets. The first
        call of an iteration starts from zero; no call meets any rank outside the replica.
        Microbatches to withhold have no id yet: each is WITHHELD."""

    def buckets(self) -> Sequence[Bucket]:
        """The same number and sizes at every live rank of the position group."""

    def commit(self) -> None:
        """Take over the reduced buckets. Called once, after the agreement."""


class Probe(Protocol):
    """Told of what the driver does: events to trace, and points at which a fault can be injected
    (inject.py)."""

    def enter(self, phase: str, index: int = 0) -> None: ...

    def leave(self, phase: str, index: int = 0) -> None: ...

    def emit(self, event: Event) -> None: ...


class Driver:
    """Carries one rank through its iterations. Not thread-safe: the training thread alone uses it.

    Args:
        communicator: The collectives layer.
        policy: Who computes what.
        present: The world, which the driver alone changes.
        replica_id: This rank's replica.
        probe: Told of what happens.
    """

    def __init__(
        self,
        communicator: Communicator,
        policy: machine.Policy,
        present: PresentWorld,
        replica_id: int,
        probe: Probe,
    ):
        self.present = present
        self._communicator = communicator
        self.policy = policy
        self._replica_id = replica_id
        self._probe = probe
        self.reassigned: tuple[int, ...] = ()  # microbatches of this step that changed hands
        self._withheld: list[Snapshot] = []  # this iteration's, in the assignment's order
        self.repair_s = 0.0  # seconds spent in repairs so far

    @property
    def world(self) -> World:
        """The last agreed one."""
        return self.present.now

    def begin(self) -> None:
        """Connect this rank with its peers. Every rank calls it, once, before anything else. A
        replica that dies meanwhile is lost as in any repair."""
        before = self.world
        self.present.become(self._communicator.begin(before))
        if self.world != before:
            self._announce(before, None, 0.0)

    def run_step(self, step: int, microbatches: int, work: Work) -> Assignment:
        """Compute, reduce and commit exactly `microbatches` microbatches. Every live rank calls it.

        When peers die meanwhile it repairs, takes over this replica's part of what they owed and
        reduces again, as often as needed. When this rank's own replica loses a member, the process
        ends by SIGKILL (membership/watcher.py).

        Args:
            step: The iteration's number, for the trace.
            microbatches: B, of the whole job.
            work: The host framework's side.

        Returns:
            Who computed what was committed, once the whole world has agreed to it.

        Raises:
            InvariantViolation: A bug; never a lost peer.
            NoQuorum: This side of a partition must not go on.
        """
        planned, state = self._run(step, microbatches, work, self.policy)
        self.reassigned = tuple(
            sorted(i for r in state.world.replicas for i in moved(planned, state.assignment, r))
        )
        work.commit()
        self._probe.emit(Committed(iteration=step, **_facts(state)))
        return state.assignment

    def run_evaluation(self, microbatches: int, work: Work) -> None:
        """The same protocol for a forward-only batch between two iterations: spread evenly over
        the live replicas, taken over if one dies. Every live rank calls it."""
        _, state = self._run(None, microbatches, work, ExactPolicy())
        work.commit()
        self._probe.emit(Evaluated(**_facts(state)))

    def _run(
        self, step: int | None, microbatches: int, work: Work, policy: machine.Policy
    ) -> tuple[Assignment, machine.State]:
        """What was planned, and the state that the whole world has agreed to commit."""
        self._withheld.clear()
        state, actions = machine.begin(policy, self.world, self._replica_id, microbatches)
        planned = state.assignment
        while state.phase is not machine.Phase.COMMITTED:
            (action,) = actions
            event = self._perform(step, state, action, work)
            state, actions = machine.handle(policy, state, event)
        return planned, state

    def _perform(
        self, step: int | None, state: machine.State, action: machine.Action, work: Work
    ) -> machine.Event:
        match action:
            case machine.Compute():
                self._compute(action, work)
                if step is not None:
                    self._probe.emit(
                        Computed(
                            iteration=step,
                            world_epoch=state.world.world_epoch,
                            microbatches=action.microbatches,
                            promoted=action.promote,
                            withheld=action.withhold,
                        )
                    )
                return machine.Computed(len(work.buckets()))
            case machine.Reduce(index):
                return self._reduce(step, index, work.buckets()[index])
            case machine.Agree(vote):
                self._probe.enter("commit")
                about = "evaluation" if step is None else "iteration"
                return machine.Agreed(self._communicator.agree(vote, about))
            case machine.Repair():
                return machine.Repaired(self._repair(step))
        raise InvariantViolation(f"no way to perform {action} in {state.phase}")

    def _compute(self, action: machine.Compute, work: Work) -> None:
        for _ in range(action.promote):
            self._withheld.pop(0).add_back(work.buckets())
        for part in action.withhold:  # the local buckets are zero before and after
            work.compute((WITHHELD,) * part)
            self._withheld.append(Snapshot.taken_out(work.buckets()))
        work.compute(action.microbatches)

    def _reduce(self, step: int | None, index: int, bucket: Bucket) -> machine.Event:
        self._probe.enter("sync", index)
        bucket.ready()
        try:
            self._communicator.all_reduce(bucket.local, bucket.reduced)
        except ReplicaLost as lost:
            self._probe.emit(SyncFailed(iteration=step, bucket=index, reason=str(lost)))
            return machine.ReduceFailed(index)
        bucket.arrived()
        self._probe.leave("sync", index)
        return machine.Reduced(index)

    def guarded(self, what: str, operation: Callable[[], Any]) -> Any:
        """Run an operation between replicas, outside an iteration, until the whole world agrees.

        Every live rank calls it.

        Args:
            what: One of guard.SUBJECTS, the same at every rank.
            operation: May raise ReplicaLost; it is then run again in the repaired world, so it must
                be repeatable. It must not look at what it has received.

        Returns:
            What `operation` returned, which counts now.
        """
        while True:
            result, vote = None, True
            try:
                result = operation()
            except ReplicaLost as lost:
                self._probe.emit(SyncFailed(bucket=what, reason=str(lost)))
                vote = False
            if self._communicator.agree(vote, what):
                return result
            self._repair(None)

    def _repair(self, step: int | None) -> World:
        self._probe.enter("repair")
        started = time.time()
        before = self.world
        self.present.become(self._communicator.repair(before))
        repair_s = time.time() - started
        self.repair_s += repair_s
        self._announce(before, step, repair_s)
        return self.world

    def _announce(self, before: World, step: int | None, repair_s: float) -> None:
        """Tell all who want to know that the world `before` has become the present one."""
        lost = sorted(set(before.replicas) - set(self.world.replicas))
        self._probe.emit(
            Repaired(
                iteration=step,
                world_epoch=self.world.world_epoch,
                replicas=self.world.replicas,
                replicas_lost=tuple(lost),
                repair_s=repair_s,
            )
        )
        self.present.tell()


def _facts(state: machine.State) -> dict[str, Any]:
    return {
        "world_epoch": state.world.world_epoch,
        "assignment": str(state.assignment),
        "microbatches": state.assignment.committed,
        "bucket_epochs": tuple(sorted(set(state.reduced_under), key=str)),
    }
