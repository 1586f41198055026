"""The few fault-tolerant primitives that everything else is made of.

`ulfm.py` implements them on Open MPI's ULFM, `scripted.py` for tests. Ranks are always numbers in
the initial world (world.ReplicaLayout).
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

Array = Any  # numpy.ndarray


# No message between two ranks of an all-reduce is larger, so that Open MPI sends it at once and
# never by rendezvous, which can hang a survivor over TCP (docs/log.md). launch/mpirun.py tells it.
EAGER_BYTES = 4 << 20


class Transport(Protocol):
    """One rank's access to the job. The training thread makes all calls but `failed` and `die`."""

    def all_reduce(self, send: Array, receive: Array, op: str) -> None:
        """Element-wise `op` ("sum", "min", "max") of `send` over the position group.

        `send` and `receive` do not overlap; `send` is never written. When a member has died the
        call raises ReplicaLost at some ranks and may return at others: `receive` is garbage until
        the world has agreed (ulfm.md, rule 2). A rank that gets ReplicaLost must revoke().
        """

    def survey(self, send: Array, receive: Array) -> None:
        """Element-wise maximum of `send` over the world. As `all_reduce` otherwise."""

    def agree(self, flags: int) -> int:
        """Bitwise and of all live ranks' `flags` (at most 24 bits), the same at every live rank of
        the world; 0 if one had died. Never hangs on a dead rank (MPI-ULFM: MPIX_Comm_agree)."""

    def revoke(self) -> None:
        """End all pending and later collectives, everywhere, on the world and position groups."""

    def failed(self) -> frozenset[int]:
        """The ranks this rank knows to be dead. Makes MPI progress, unless the training thread is
        in MPI and does so itself; safe from any thread."""

    def shrink(self) -> tuple[int, ...]:
        """Replace the world by one of its live ranks; returns them. Every live rank calls it."""

    def split(self, position: int) -> None:
        """Build the position group of the current world. Raises ReplicaLost like all_reduce."""

    def die(self, reason: str) -> NoReturn:
        """Leave so that peers notice: say why, then SIGKILL to this process (ulfm.md, rule 1)."""


def check_pair(send: Array, receive: Array) -> None:
    """A caller's mistake is an error here, not a hang or garbage in MPI."""
    if send.shape != receive.shape or send.dtype != receive.dtype:
        raise ValueError(
            f"all_reduce needs equal shapes and dtypes, got {send.shape} {send.dtype} and "
            f"{receive.shape} {receive.dtype}"
        )
