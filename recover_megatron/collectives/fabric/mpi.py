"""The MPI fabric: a ring of MPI sends and receives, carried out by the engine.

Not Open MPI's own non-blocking all-reduce: it frees its pending sends when a member dies, and one
that fails after that is fatal to the rank, and its abort to the job (docs/log.md). Here what is
pending is kept until it has ended, for good if it must be.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from recover_megatron.collectives.fabric import plan
from recover_megatron.collectives.fabric.interface import Array, check_pair
from recover_megatron.collectives.membership.engine import Operation, Request
from recover_megatron.collectives.membership.ulfm import UlfmMembership
from recover_megatron.collectives.openmpi import MPI, completed, is_broken, lost
from recover_megatron.errors import ReplicaLost

# Up to so many bytes MPI reduces by itself: fewer steps, and no message that long is pending.
_SMALL_BYTES = 4096
_OPS = {
    "sum": (MPI.SUM, np.add),
    "min": (MPI.MIN, np.minimum),
    "max": (MPI.MAX, np.maximum),
}


class MpiFabric:
    """See interface.Fabric. One per rank. All it does runs in the membership's engine."""

    def __init__(self, membership: UlfmMembership):
        self._membership = membership
        self._engine = membership.engine
        self._group: MPI.Comm = MPI.COMM_NULL
        self._scratch: Array = np.empty(0, dtype=np.uint8)
        self._abandoned: list[object] = []
        self._aborted = False

    def open(self, members: tuple[int, ...]) -> None:
        self._engine.run(self._open(members))

    def _open(self, members: tuple[int, ...]) -> Operation[None]:
        yield
        # The communicator before is never freed: a late message of a dead peer may still name it.
        self._group = self._membership.split(members[0])
        self._aborted = False

    def start(self, send: Array, receive: Array, op: str) -> Request[None]:
        check_pair(send, receive)
        return self._engine.submit(self._all_reduce(send, receive, op))

    def wait(self, ticket: Request[None]) -> None:
        ticket.wait()

    def abort(self) -> None:
        self._aborted = True  # seen by the transfer that is under way
        self._engine.submit(self._revoke())

    def _revoke(self) -> Operation[None]:
        yield
        if self._group != MPI.COMM_NULL:
            self._group.Revoke()

    def _is_over(self) -> bool:
        return self._aborted or self._membership.broken

    def _all_reduce(self, send: Array, receive: Array, op: str) -> Operation[None]:
        comm, (mpi_op, combine) = self._group, _OPS[op]
        if self._aborted:
            raise ReplicaLost("all_reduce: aborted")
        try:
            if send.nbytes <= _SMALL_BYTES:
                request = comm.Iallreduce(send, receive, mpi_op)
                yield from completed(comm, request, self._is_over)
                return
            rank, size = comm.Get_rank(), comm.Get_size()
            for first, end in plan.pieces(send.size, size, send.itemsize):
                steps = plan.ring(rank, size, end - first)
                arrays = send[first:end], receive[first:end]
                yield from self._ring(comm, steps, arrays, combine)
            if size == 1:
                receive[:] = send
        except MPI.Exception as error:
            # An operation that cannot post to a dead peer says MPI_ERR_OTHER.
            raise lost(error, "all_reduce", lost_is_known=is_broken(comm)) from None

    def _ring(
        self, comm: MPI.Comm, steps: list[plan.Step], arrays: tuple[Array, Array], combine: Any
    ) -> Generator[None, None, None]:
        """Carries out the plan on (own, reduced)."""
        own, reduced = arrays
        rank, size = comm.Get_rank(), comm.Get_size()
        scratch = self._scratch_of(plan.longest_chunk(own.size, size), own.dtype)
        for step in steps:
            out = (own if step.local else reduced)[slice(*step.out)]
            into = reduced[slice(*step.into)]
            came = scratch[: into.size] if step.combine else into
            yield from self._exchange(comm, (rank + 1) % size, (rank - 1) % size, (out, came))
            if step.combine:
                combine(came, own[slice(*step.into)], out=into)

    def _scratch_of(self, count: int, dtype: Any) -> Array:
        size = count * dtype.itemsize
        if self._scratch.nbytes < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size].view(dtype)

    def _exchange(
        self, comm: MPI.Comm, to: int, source: int, arrays: tuple[Array, Array]
    ) -> Generator[None, None, None]:
        """Send the one to rank `to`, fill the other from `source`. What is pending when this raises
        is kept for good, with its memory: freeing a send that fails later ends the rank, and its
        abort the job (docs/log.md)."""
        outgoing, incoming = arrays
        pending = [comm.Irecv(incoming, source)]
        try:
            pending.append(comm.Isend(outgoing, to))
            yield from completed(comm, pending[0], self._is_over)
            yield from self._sent(comm, pending[1])
        except (MPI.Exception, ReplicaLost):
            self._abandoned.append((pending, outgoing, incoming))
            self._scratch = np.empty(0, dtype=np.uint8)
            raise

    def _sent(self, comm: MPI.Comm, request: MPI.Request) -> Generator[None, None, None]:
        """Until a send has ended. Not by MPI_Test, which frees a send whose peer has died; asking
        for its status does not, and does not tell either."""
        status = MPI.Status()
        while not request.Get_status(status):
            if self._is_over() or is_broken(comm):
                raise MPI.Exception(MPI.ERR_PROC_FAILED)
            yield
        if status.Get_error() != MPI.SUCCESS:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        request.Wait()  # complete: to free it
