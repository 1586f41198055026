"""What the protocol needs to know of who is alive: a handful of calls.

`ulfm.py` implements them on Open MPI's ULFM, `testing/scripted.py` for tests. Ranks are always
numbers in the initial world (world.ReplicaLayout).
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import numpy as np


class Membership(Protocol):
    """One rank's access to the job's membership. The training thread makes all calls but `die`."""

    rank: int

    def agree(self, flags: int) -> int:
        """The consensus barrier (MPI-ULFM: MPIX_Comm_agree). Every live rank of the world calls it.

        Args:
            flags: At most 24 bits.

        Returns:
            The bitwise and of all live ranks' `flags`, the same at every one of them; 0 if a rank
            had died. It never waits for a dead rank.
        """

    def revoke(self) -> None:
        """End all pending and later collectives of this world, at every rank. Any rank may call it;
        agreements and `shrink` still work (MPI-ULFM: MPIX_Comm_revoke)."""

    def failed(self) -> frozenset[int]:
        """The ranks that this rank knows to be dead, looked for at this moment."""

    def shrink(self) -> tuple[int, ...]:
        """Replace the world by one of its live ranks, and return them, ascending. Every live rank
        calls it. A rank that dies meanwhile may still be among them (MPI-ULFM: MPIX_Comm_shrink).
        """

    def survey(self, marks: np.ndarray) -> np.ndarray:
        """Element-wise or, over the world, of `marks`: bool, one for each rank of the job. Every
        live rank calls it. Raises ReplicaLost if a rank dies meanwhile, at some ranks; the result
        counts only after an agreement."""

    def die(self, reason: str) -> NoReturn:
        """Leave so that peers notice: say why, then SIGKILL to this process, the one end that Open
        MPI reports at once (docs/ulfm.md, rule 1). Any thread may call it."""
