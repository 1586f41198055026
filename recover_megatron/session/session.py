"""One rank's part in a job: what the adapter's hooks are handed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.collectives.membership.watchdog import Watchdog
from recover_megatron.collectives.membership.watcher import Mates, Watcher
from recover_megatron.config import RecoveryConfig
from recover_megatron.console import Console, Terminal
from recover_megatron.hosts.rank import RankOnHost
from recover_megatron.inject import Injector
from recover_megatron.recovery.driver import Driver
from recover_megatron.recovery.present import PresentWorld
from recover_megatron.trace import Trace
from recover_megatron.world import ReplicaLayout


@dataclass(frozen=True)
class OwnRank:
    """Which rank this process is."""

    layout: ReplicaLayout
    rank: int

    @property
    def replica_id(self) -> int:
        return self.layout.replica_of(self.rank)

    @property
    def position(self) -> int:
        return self.layout.position_of(self.rank)

    @property
    def mates(self) -> frozenset[int]:
        """The other ranks of this rank's replica."""
        return frozenset(self.layout.ranks_of(self.replica_id)) - {self.rank}


@dataclass(frozen=True)
class Watch:
    """What can end this rank, and must let it go in the end. `on_host` is None on one host."""

    watchdog: Watchdog
    mates: Mates
    watcher: Watcher
    on_host: RankOnHost | None


@dataclass(frozen=True)
class Outputs:
    """Where this rank says things. `console` is None without a run folder."""

    trace: Trace
    terminal: Terminal
    console: Console | None


class Progress:
    """How far this rank has come in training; the way out depends on it (leaving.py)."""

    def __init__(self) -> None:
        self.iteration = 0  # the last that began, as the host framework logs it
        self.over = False  # all ranks know that this job's training is over
        self.rescue: Callable[[], None] | None = None

    def begins(self, iteration: int) -> None:
        """An iteration begins, or is left out."""
        self.iteration = iteration

    def holds(self, rescue: Callable[[], None]) -> None:
        """Weights and optimizer are those of the last committed iteration. `rescue` saves them: it
        is called if an exception ends this rank and all other replicas are dead."""
        self.rescue = rescue

    def changes(self) -> None:
        """The optimizer is about to change the weights: there is nothing whole to save."""
        self.rescue = None

    def ends(self) -> None:
        """The last iteration has been committed, or all ranks have agreed to stop."""
        self.over = True


@dataclass(frozen=True, kw_only=True)
class Session:
    """One per process, made by `start.start`, ended by `leaving.finish`.

    Attributes:
        store: What position 0 keeps alive as long as the process: its replica's TCPStore server.
    """

    config: RecoveryConfig
    own: OwnRank
    communicator: GuardedCommunicator
    driver: Driver
    world: PresentWorld
    injector: Injector
    watch: Watch
    outputs: Outputs
    store: object | None
    progress: Progress = field(default_factory=Progress)

    @property
    def layout(self) -> ReplicaLayout:
        return self.own.layout

    @property
    def replica_id(self) -> int:
        return self.own.replica_id

    @property
    def position(self) -> int:
        return self.own.position

    @property
    def trace(self) -> Trace:
        return self.outputs.trace

    @property
    def terminal(self) -> Terminal:
        return self.outputs.terminal

    @property
    def console(self) -> Console | None:
        return self.outputs.console

    @property
    def watchdog(self) -> Watchdog:
        return self.watch.watchdog

    @property
    def leading(self) -> bool:
        """True at every rank of the lowest live replica."""
        return self.world.now.leader == self.replica_id

    @property
    def speaks(self) -> bool:
        """True at the one rank that tells the user what concerns the whole job."""
        return self.leading and self.position == 0

    @contextlib.contextmanager
    def waiting_for_peers(self) -> Iterator[None]:
        """Around a wait between two iterations, which is not this rank's own stall."""
        self.watchdog.rest()
        yield
        self.watchdog.between()
