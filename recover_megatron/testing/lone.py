"""A real session without MPI, whose peers, if the layout has any, agree with all it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from recover_megatron.collectives.fabric.interface import Array
from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.config import RecoveryConfig
from recover_megatron.console import Terminal
from recover_megatron.inject import Injector
from recover_megatron.recovery.driver import Driver
from recover_megatron.recovery.present import PresentWorld
from recover_megatron.session.session import Outputs, OwnRank, Session, Watch
from recover_megatron.trace import Trace
from recover_megatron.workload.policy import make_policy
from recover_megatron.world import ReplicaLayout, World

ALONE = ReplicaLayout(1, 1)


class LoneMembership:
    """membership.interface.Membership where nobody ever dies."""

    def __init__(self, own: OwnRank):
        self.rank = own.rank
        self._ranks = tuple(range(own.layout.ranks))

    def agree(self, flags: int) -> int:
        return flags

    def revoke(self) -> None: ...

    def failed(self) -> frozenset[int]:
        return frozenset()

    def shrink(self) -> tuple[int, ...]:
        return self._ranks

    def survey(self, marks: np.ndarray) -> np.ndarray:
        return marks

    def die(self, reason: str) -> NoReturn:
        raise AssertionError(reason)


class LoneFabric:
    """fabric.interface.Fabric to which nobody else contributes."""

    def open(self, members: tuple[int, ...]) -> None: ...

    def start(self, send: Array, receive: Array, op: str) -> None:
        receive[:] = send

    def wait(self, ticket: None) -> None: ...

    def abort(self) -> None: ...


class Unwatched:
    """Stands for the watchdog, the mates' watch and the watcher of a rank that has none."""

    def __getattr__(self, name: str) -> Any:
        return lambda *facts: None


def lone_session(
    run_dir: Path | None = None,
    *,
    layout: ReplicaLayout = ALONE,
    rank: int = 0,
    config: RecoveryConfig | None = None,
) -> Session:
    """Traces into `run_dir`, if given."""
    folder = None if run_dir is None else str(run_dir)
    config = config or RecoveryConfig(trace_dir=folder)
    own, world = OwnRank(layout, rank), PresentWorld(World.initial(layout))
    trace = Trace(folder, own.replica_id, own.position)
    communicator = GuardedCommunicator(LoneMembership(own), LoneFabric(), layout, config, frozenset)
    injector = Injector([], trace.emit)
    policy = make_policy(config.policy)
    nobody: Any = Unwatched()
    return Session(
        config=config,
        own=own,
        communicator=communicator,
        driver=Driver(communicator, policy, world, own.replica_id, injector),
        world=world,
        injector=injector,
        watch=Watch(nobody, nobody, nobody, None),
        outputs=Outputs(trace, Terminal(), None),
        store=None,
    )
