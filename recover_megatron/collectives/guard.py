"""Guarded collectives: all-reduce, consensus barrier, repair. What the recovery layer is handed."""

from __future__ import annotations

import time

from recover_megatron.collectives.transport import Array, Transport
from recover_megatron.errors import ReplicaLost, Unrecoverable
from recover_megatron.world import ReplicaLayout, World


class GuardedCommunicator:
    """The protocol's three calls over any Transport. Every live rank makes the same calls."""

    def __init__(
        self,
        transport: Transport,
        layout: ReplicaLayout,
        rank: int,
        settle_s: float,
        settle_limit_s: float,
    ):
        self._transport = transport
        self._layout = layout
        self._rank = rank
        self._settle_s = settle_s
        self._settle_limit_s = settle_limit_s

    def begin(self, world: World) -> World:
        """Build the first position groups; every rank calls it once. Returns the world to start
        with: a smaller one if a rank died meanwhile."""
        if self._transport.agree(self._split()):
            return world
        return self.repair(world)

    def all_reduce(self, send: Array, receive: Array, op: str = "sum") -> None:
        """Over the position group. Raises ReplicaLost, after revoking so that no peer waits on in
        a collective that cannot end. The result counts only after `agree` returned True."""
        try:
            self._transport.all_reduce(send, receive, op)
        except ReplicaLost:
            self._transport.revoke()
            raise

    def agree(self, vote: bool) -> bool:
        """The consensus barrier over the whole world: the same answer at every live rank."""
        return self._transport.agree(vote)

    def repair(self, world: World) -> World:
        """Rebuild world and position groups over the whole replicas that are left.

        Returns the next World, the same at every survivor. A rank whose own replica lost a member
        leaves by SIGKILL. Another failure meanwhile means another round; each round loses at least
        one rank or ends, so rounds are bounded. Raises Unrecoverable past that bound.
        """
        transport = self._transport
        for _ in range(self._layout.ranks + 1):
            transport.revoke()
            self._settle()
            ranks = transport.shrink()
            whole = self._layout.whole_replicas(ranks)
            if self._layout.replica_of(self._rank) not in whole:
                transport.die("its replica lost a member")
            if transport.agree(self._layout.only_whole(ranks) and self._split()):
                return world.shrunk_to(whole)
        raise Unrecoverable(f"no agreed world after {self._layout.ranks + 1} rounds of repair")

    def _split(self) -> bool:
        try:
            self._transport.split(self._layout.position_of(self._rank))
        except ReplicaLost:
            self._transport.revoke()  # peers may be waiting inside the same split
            return False
        return True

    def _settle(self) -> None:
        """Wait until the set of the dead is quiet and holds whole replicas only.

        A replica dies rank by rank: its watchers need some milliseconds. Shrinking in the middle of
        that costs another round, and can crash Open MPI 5.0.11 (ulfm.md, rule 6). The limit is for
        a mate that cannot die at once; shrink then waits for it, or the next round finds it.
        """
        limit = time.monotonic() + self._settle_limit_s
        # The dead of earlier repairs are in the set too, as whole replicas.
        dead, since = self._transport.failed(), time.monotonic()
        while (now := time.monotonic()) < limit:
            if now - since >= self._settle_s and self._layout.only_whole(dead):
                return
            time.sleep(0.005)
            seen = self._transport.failed()
            if seen != dead:
                dead, since = seen, time.monotonic()
