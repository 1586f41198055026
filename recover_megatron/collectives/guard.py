"""The protocol's calls between replicas: reduce, agree, repair. What the recovery layer is handed.

They hold membership (who is alive) and fabric (what moves buckets) together:

* A reduction that loses a member may succeed at one rank and fail at another. So its result counts
  only after an agreement of all live ranks, in which each votes whether it succeeded here.
* Where the answer is no, all live ranks repair: they end what is pending, wait until the dead have
  died, shrink the world to the whole replicas that are left, connect again, and agree that all of
  this worked. If not, because another rank has died meanwhile, they do it again.
* After a partition (two parts of the job that cannot reach each other) at most one side goes on.

docs/design.md shows a repair on a time line; docs/ulfm.md has the rules of fault-tolerant MPI that
this file follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set
from typing import NoReturn

import numpy as np

from recover_megatron.collectives.fabric.interface import Array, Fabric
from recover_megatron.collectives.membership.interface import Membership
from recover_megatron.collectives.membership.quorum import has_quorum
from recover_megatron.collectives.membership.settling import Settling
from recover_megatron.config import RecoveryConfig
from recover_megatron.errors import InvariantViolation, NoQuorum, ReplicaLost, Unrecoverable
from recover_megatron.world import ReplicaLayout, World

# Bits of an agreement: each is a yes that any rank can turn into a no. Two are reasons to stop, see
# `ask_to_stop`; _STAYS is what a rank says that does not `leave`; _ALL is what every rank says, so
# that an answer of 0 means that one has died.
_COMMIT, SIGNALLED, OUT_OF_TIME, _STAYS, _ALL = 1, 2, 4, 8, 16
_REASONS = SIGNALLED | OUT_OF_TIME
# What an agreement can be about. It travels as a number and its complement: where two ranks mean
# different things, all find out, instead of taking a vote on one thing for one on the other.
SUBJECTS = (
    *("begin", "repair", "iteration", "evaluation", "build data loaders", "exchange", "save"),
    *("end", "left"),
)
_SUBJECT_BITS = 5
_LOOK_S = 0.005  # between two looks at the dead while they settle
_NUMBER_AT, _COMPLEMENT_AT = 5, 5 + _SUBJECT_BITS
_SUBJECT_MASK = (1 << _SUBJECT_BITS) - 1


class GuardedCommunicator:
    """The protocol's three calls. Every live rank makes the same calls in the same order.

    Args:
        membership: Who is alive.
        fabric: What moves buckets among the ranks of this rank's position.
        layout: Which ranks form which replica.
        config: For how long to wait for what.
        proven_dead: The ranks that this rank knows to have ended (quorum.Evidence).
    """

    def __init__(
        self,
        membership: Membership,
        fabric: Fabric,
        layout: ReplicaLayout,
        config: RecoveryConfig,
        proven_dead: Callable[[], Set[int]],
    ):
        self._membership = membership
        self._fabric = fabric
        self._layout = layout
        self._rank = membership.rank
        self._config = config
        self._proven_dead = proven_dead
        self._asked_to_stop = 0
        self._leaves_by = ""
        self.stopping = 0  # for these reasons, as all ranks know; the same at all of them

    def begin(self, world: World) -> World:
        """Connect the first position groups. Every rank calls it, once.

        Args:
            world: All replicas of the job.

        Returns:
            The world to start with, the same at all: a smaller one if a rank died meanwhile.

        Raises:
            NoQuorum, Unrecoverable: As `repair`.
        """
        if self.agree(self._open(self._layout.ranks_in(world.replicas)), "begin"):
            return world
        return self.repair(world)

    def all_reduce(self, send: Array, receive: Array, op: str = "sum") -> None:
        """Sum `send` over the ranks of this rank's position, one in each live replica.

        Every live rank makes the same reductions in the same order. The result counts only after
        `agree` has returned True.

        Args:
            send: One-dimensional, contiguous, numpy, in host memory; only read.
            receive: Of the same size and dtype, elsewhere: where the result arrives.
            op: "sum", "min" or "max", element by element.

        Raises:
            ReplicaLost: A rank of the world has died; not at every rank. All else that is pending
                has been ended, here and elsewhere, so that no peer waits on for this rank.
        """
        try:
            self._fabric.wait(self._fabric.start(send, receive, op))
        except ReplicaLost:
            self._revoke()
            raise

    def ask_to_stop(self, reason: int) -> None:
        """Asks the whole job to stop, for the reason SIGNALLED or OUT_OF_TIME; the next agreement
        tells all. Safe in a signal handler."""
        self._asked_to_stop |= reason

    def agree(self, vote: bool, about: str = "iteration") -> bool:
        """The consensus barrier: all live ranks of the whole world come to the same answer.

        A request to stop travels along: a yes brings `stopping` up to date at every rank.

        Args:
            vote: What this rank says. One no makes the answer no.
            about: One of SUBJECTS, the same at every rank. Where another live rank is in an
                agreement about something else the answer is no everywhere, and if that rank
                `leave`s, it dies of it, as a lost replica.

        Returns:
            True if every live rank has voted yes and none has died.

        Raises:
            InvariantViolation: Ranks are in different agreements and none leaves: they have come
                apart, which is our bug. Raised at all of them, and names both.
        """
        flags = (_COMMIT if vote else 0) | (_REASONS & ~self._asked_to_stop) | _ALL
        flags |= 0 if self._leaves_by else _STAYS
        answer = self._membership.agree(flags | _subject_bits(about))
        if not answer:
            return False
        if other := _other_subject(answer, about):
            if self._leaves_by:
                self._membership.die(f"{self._leaves_by}, while others are in {other!r}")
            if answer & _STAYS:
                raise InvariantViolation(
                    f"rank {self._rank} is in an agreement about {about!r}, another about {other!r}"
                )
            return False
        if answer & _COMMIT:
            self.stopping = _REASONS & ~answer
        return bool(answer & _COMMIT)

    def leave(self, how: str) -> None:
        """This rank ends, in a way (`how`, in words) that the world has not agreed on. The next
        agreement must be about "end": if all live ranks are in it, that is an orderly end. If not,
        this rank dies. Whoever waits in a collective for this rank is woken up."""
        self._leaves_by = how
        self._revoke()

    def die(self, reason: str) -> NoReturn:
        """See Membership.die. Any thread may call it."""
        self._membership.die(reason)

    def failed(self) -> frozenset[int]:
        """See Membership.failed."""
        return self._membership.failed()

    def repair(self, world: World) -> World:
        """Rebuild world and position groups over the whole replicas that are left.

        Every live rank calls it, after an agreement has said no. A rank whose own replica lost a
        member leaves by SIGKILL. Another failure meanwhile means another round; each round loses at
        least one rank or ends, so rounds are bounded.

        Args:
            world: The last one that was agreed on.

        Returns:
            The next world, the same at every survivor.

        Raises:
            NoQuorum: At every rank of a side of a partition that may not go on (I5).
            Unrecoverable: More rounds than there are ranks: our bug, or Open MPI's.
        """
        before = self._layout.ranks_in(world.replicas)
        for _ in range(self._layout.ranks + 1):
            self._revoke()
            self._settle()
            ranks = self._membership.shrink()
            whole = self._layout.whole_replicas(ranks)
            if self._layout.replica_of(self._rank) not in whole:
                self._membership.die("its replica lost a member")
            ready = self._layout.only_whole(ranks) and self._open(ranks)
            if self._has_quorum(before, ranks, ready):
                return world.shrunk_to(whole)
        raise Unrecoverable(f"no agreed world after {self._layout.ranks + 1} rounds of repair")

    def _has_quorum(self, before: Set[int], ranks: tuple[int, ...], ready: bool) -> bool:
        """True if all of `ranks` are ready and may go on; False if another round is needed. Raises
        NoQuorum, at every rank, if proof of the others' deaths does not come."""
        for _ in range(self._config.proof_polls):
            dead = self._survey() if ready else None
            if not self.agree(dead is not None, "repair"):
                return False
            assert dead is not None
            if has_quorum(before, ranks, dead):
                return True
            time.sleep(self._config.proof_poll_s)
        lost = sorted(before - set(ranks))
        raise NoQuorum(
            f"the {len(ranks)} ranks here are no majority of {len(before)}, and of the others, "
            f"{lost}, too few are proven dead: they may be alive and go on, so this side must not"
        )

    def _survey(self) -> frozenset[int] | None:
        """The ranks that any live rank has proof against. None if a peer was lost meanwhile."""
        marks = np.zeros(self._layout.ranks, dtype=bool)
        marks[list(self._proven_dead())] = True
        try:
            found = self._membership.survey(marks)
        except ReplicaLost:
            self._revoke()
            return None
        return frozenset(np.flatnonzero(found).tolist())

    def _open(self, ranks: Iterable[int]) -> bool:
        """Connect this rank's position group in a world of `ranks`; False if a peer was lost."""
        mine = self._layout.position_of(self._rank)
        members = sorted(rank for rank in ranks if self._layout.position_of(rank) == mine)
        try:
            self._fabric.open(tuple(members))
        except ReplicaLost:
            self._revoke()  # peers may be waiting for this rank
            return False
        return True

    def _revoke(self) -> None:
        """End all that is pending between replicas, here and at every other rank."""
        self._fabric.abort()
        self._membership.revoke()

    def _settle(self) -> None:
        """Wait until the dead have died (membership/settling.py)."""
        config, dead = self._config, self._membership.failed()
        settling = Settling(
            self._layout,
            config.settle_s,
            config.settle_limit_s,
            dead=dead,
            now=time.monotonic(),
        )
        while not settling.over(dead, time.monotonic()):
            time.sleep(_LOOK_S)
            dead = self._membership.failed()


def _subject_bits(about: str) -> int:
    if about not in SUBJECTS:
        raise InvariantViolation(f"there is no agreement about {about!r}")
    number = SUBJECTS.index(about)
    return number << _NUMBER_AT | (~number & _SUBJECT_MASK) << _COMPLEMENT_AT


def _other_subject(answer: int, about: str) -> str:
    """What another rank meant, if not the same; "something else" if there are several."""
    ours = SUBJECTS.index(about)
    common = answer >> _NUMBER_AT & _SUBJECT_MASK | answer >> _COMPLEMENT_AT & _SUBJECT_MASK
    differs = ~common & _SUBJECT_MASK
    if not differs:
        return ""
    theirs = ours ^ differs
    return SUBJECTS[theirs] if theirs < len(SUBJECTS) else "something else"
