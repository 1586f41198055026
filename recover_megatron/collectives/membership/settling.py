"""When to shrink: the rule that waits until the dead have died. Pure: time enters as a number.

A replica dies rank by rank: each needs some milliseconds to see its mate's death. Shrinking in the
middle of that costs another round of repair, and can crash Open MPI 5.0.11 (docs/ulfm.md, rule 6).
"""

from __future__ import annotations

from recover_megatron.world import ReplicaLayout


class Settling:
    """One wait, from `now` on.

    Args:
        layout: Which ranks form which replica.
        quiet_s: For how long no rank more must have died.
        limit_s: After so long it is over in any case. For a mate that cannot die at once: shrink
            then waits for it, or the next round finds it.
        dead: The ranks known to be dead now, those of earlier repairs among them.
        now: Seconds, by any clock.
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        quiet_s: float,
        limit_s: float,
        *,
        dead: frozenset[int],
        now: float,
    ):
        self._layout, self._quiet_s = layout, quiet_s
        self._limit = now + limit_s
        self._dead, self._since = dead, now

    def over(self, dead: frozenset[int], now: float) -> bool:
        """True once the set of the dead has been quiet for long enough and holds whole replicas
        only, or the limit has passed."""
        if dead != self._dead:
            self._dead, self._since = dead, now
        if now >= self._limit:
            return True
        return now - self._since >= self._quiet_s and self._layout.only_whole(dead)
