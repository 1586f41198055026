"""What the protocol needs of the network between replicas: start a transfer, wait for it, abort."""

from __future__ import annotations

from typing import Any, Protocol

Array = Any  # numpy.ndarray
Ticket = Any  # a transfer that was started; opaque


class Fabric(Protocol):
    """Moves buckets among the ranks that hold the same position, for one world at a time.

    It knows nothing of death. A transfer that breaks, or is aborted, raises ReplicaLost; who is
    dead is membership's word alone.
    """

    def open(self, members: tuple[int, ...]) -> None:
        """Connect the ranks `members` (initial ranks, ascending, this one among them) and drop what
        was open before: nothing of the old world is ever taken for the new. All of them call it,
        and all ranks of the world at the same time. Raises ReplicaLost if a rank dies meanwhile.
        """

    def start(self, send: Array, receive: Array, op: str) -> Ticket:
        """Begin to set `receive` to the element-wise `op` ("sum", "min", "max") of all members'
        `send`. All members start the same transfers in the same order.

        Both are one-dimensional, contiguous, of equal size and dtype, and do not overlap. `send` is
        never written, and neither may be touched until `wait` has returned or raised.
        """

    def wait(self, ticket: Ticket) -> None:
        """Until the transfer has ended. Raises ReplicaLost at some ranks if a member has died, and
        returns at others: `receive` is garbage until the world has agreed (docs/ulfm.md, rule 2).
        A rank that gets ReplicaLost must revoke the world, so that nobody waits on.
        """

    def abort(self) -> None:
        """End all pending transfers of this rank: each `wait` raises ReplicaLost. Any thread may
        call it; the fabric is of use again after `open`."""


def check_pair(send: Array, receive: Array) -> None:
    """A caller's mistake is an error here, not a hang or garbage on the network."""
    if send.shape != receive.shape or send.dtype != receive.dtype:
        raise ValueError(
            f"all_reduce needs equal shapes and dtypes, got {send.shape} {send.dtype} and "
            f"{receive.shape} {receive.dtype}"
        )
