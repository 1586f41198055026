"""The world at present, as this rank has agreed on it with all others."""

from __future__ import annotations

from collections.abc import Callable

from recover_megatron.world import World


class PresentWorld:
    """Holds the last agreed world. The driver alone changes it, by `become`; anyone may read it,
    from any thread, and be told of changes."""

    def __init__(self, world: World):
        self.now = world
        self._told: list[Callable[[World], None]] = []

    def on_change(self, callback: Callable[[World], None]) -> None:
        """`callback(new_world)` after every membership change, in order of registration, by the
        training thread."""
        self._told.append(callback)

    def become(self, world: World) -> None:
        """A repair has ended: every live rank has agreed on `world`."""
        self.now = world

    def tell(self) -> None:
        """Call all who want to know of the change."""
        for callback in self._told:
            callback(self.now)
