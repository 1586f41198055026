"""What the leader tells the user of each lost replica, and who of it was seen to die first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Set

from recover_megatron.collectives.membership.quorum import Place
from recover_megatron.console import Console
from recover_megatron.events import Event, PeerFailed
from recover_megatron.session.session import OwnRank
from recover_megatron.world import World

logger = logging.getLogger(__name__)


class SeenDead:
    """The ranks that this one saw die, in order; some at once."""

    def __init__(self, emit: Callable[[Event], None]):
        self.groups: list[list[int]] = []
        self._emit = emit

    def note(self, ranks: list[int]) -> None:
        self.groups.append(ranks)
        self._emit(PeerFailed(ranks=tuple(ranks)))


class LossLine:
    """Says each membership change in one line, at the leader, whose output the console follows.
    Called with each new world."""

    def __init__(
        self, own: OwnRank, console: Console | None, seen: SeenDead, places: Sequence[Place]
    ):
        self._own, self._console, self._seen, self._places = own, console, seen, places
        self._before = World.initial(own.layout)
        self.follow(self._before)

    def follow(self, world: World) -> None:
        """The console shows the output of the world's leader."""
        if world.leader == self._own.replica_id and self._console is not None:
            self._console.lead()

    def __call__(self, world: World) -> None:
        lost = sorted(set(self._before.replicas) - set(world.replicas))
        self._before = world
        self.follow(world)
        if world.leader == self._own.replica_id and self._own.position == 0:
            layout = self._own.layout
            logger.warning(
                "recover: lost replica %s (%s died first); %d of %d replicas go on, world epoch %d",
                ", ".join(map(str, lost)) or "none",
                first_dead(layout.ranks_in(lost), self._seen.groups, self._places),
                len(world.replicas),
                layout.replicas,
                world.world_epoch,
            )


def first_dead(lost: Set[int], seen_dead: Iterable[Sequence[int]], places: Sequence[Place]) -> str:
    """Which of the ranks `lost` were the first to be seen dead, and on which hosts. Several if they
    were seen at once: which of them took the others along is then not known here."""
    first = next((found for ranks in seen_dead if (found := lost & set(ranks))), set())
    return ", ".join(f"rank {rank} on {places[rank].host}" for rank in sorted(first)) or "nobody"
