"""Builds one rank's session: MPI up, replica known, everything watched.

start(job)   watchdog forked -> MPI started -> places of all ranks known -> watcher
             -> torch world of the replica -> first position groups -> driver
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from recover_megatron.collectives.guard import SIGNALLED, GuardedCommunicator
from recover_megatron.collectives.membership.death import Death
from recover_megatron.collectives.membership.quorum import (
    Evidence,
    Place,
    gather_places,
    has_quorum,
)
from recover_megatron.collectives.membership.watchdog import Watchdog
from recover_megatron.collectives.membership.watcher import Mates, ProvenMates, Watcher
from recover_megatron.config import RecoveryConfig
from recover_megatron.console import Console, Terminal
from recover_megatron.errors import ConfigError
from recover_megatron.events import Started
from recover_megatron.faults import parse_faults
from recover_megatron.hosts.rank import HostWatch, RankOnHost
from recover_megatron.inject import Injector
from recover_megatron.recovery.driver import Driver
from recover_megatron.recovery.present import PresentWorld
from recover_megatron.session.exits import STOP_SIGNAL, leave_in_job_folder
from recover_megatron.session.job import Job
from recover_megatron.session.losses import LossLine, SeenDead
from recover_megatron.session.session import Outputs, OwnRank, Session, Watch
from recover_megatron.session.torch_world import own_torch_world
from recover_megatron.trace import BEGAN, Trace, trace_path
from recover_megatron.workload.policy import make_policy
from recover_megatron.world import ReplicaLayout, World


def start(
    job: Job, torch_world: Callable[[Any, OwnRank], object | None] = own_torch_world
) -> Session:
    """Start MPI, find this rank's replica and give it a torch.distributed world of its own.

    Every rank of the job calls it, once, before torch is imported, so that failures are seen from
    the beginning: importing takes seconds.

    Args:
        job: From the command line.
        torch_world: Prepares torch.distributed for the replica; jobs without torch pass another.

    Raises:
        ConfigError: This process was not started as it must be; before MPI is started.
        NoQuorum: A rank of a partition that may not go on, as in every repair.
    """
    check_mpirun()
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # too early to be asked to stop
    config, folder, own = job.config, job.config.trace_dir, own_rank(job)
    layout, terminal = own.layout, Terminal()
    trace = Trace(folder, own.replica_id, own.position, terminal.warn)
    watchdog = fork_watchdog(config, own)
    on_host = RankOnHost.if_any()
    host = on_host.host if on_host else socket.gethostname()
    die, seen_dead = Death(own.rank, watchdog, trace.emit), SeenDead(trace.emit)
    mates = Mates(own.mates, die, seen_dead.note)
    membership, fabric = start_mpi(die, mates, config, watchdog)
    places = gather_places(membership, host)
    evidence = Evidence(places, host, on_host.proven_dead if on_host else frozenset)
    world = PresentWorld(World.initial(layout))
    looks: list[Callable[[], str | None]] = [ProvenMates(lambda: evidence(own.mates))]
    if on_host is not None:
        without = QuorumWithout(layout, world, places, evidence)
        looks.append(HostWatch(on_host, without))
        world.on_change(lambda new: on_host.fence(lost_hosts(layout, places, new)))
    watcher = Watcher(looks, die, config.poll_s)
    console = Console(folder, own.replica_id, own.position, terminal) if folder else None
    world.on_change(LossLine(own, console, seen_dead, places))
    store = torch_world(membership, own)
    communicator = GuardedCommunicator(membership, fabric, layout, config, evidence)
    signal.signal(STOP_SIGNAL, lambda number, frame: communicator.ask_to_stop(SIGNALLED))
    injector = Injector(own_faults(config, own), trace.emit)
    policy = make_policy(config.policy)
    driver = Driver(communicator, policy, world, own.replica_id, injector)
    driver.begin()
    leave_in_job_folder(BEGAN, "")
    trace.emit(Started(host=host, pid=os.getpid(), ranks=layout.ranks))
    return Session(
        config=config,
        own=own,
        communicator=communicator,
        driver=driver,
        world=world,
        injector=injector,
        watch=Watch(watchdog, mates, watcher, on_host),
        outputs=Outputs(trace, terminal, console),
        store=store,
    )


def check_mpirun() -> None:
    """Raises ConfigError if this process is no rank of an MPI job with ULFM."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "--recover needs one MPI rank per device, but this process was not started by Open "
            "MPI's mpirun; start it with `recover-megatron launch -- SCRIPT FLAGS`"
        )
    if os.environ.get("OMPI_MCA_mpi_ft_enable") != "1":  # noqa: SIM112  Open MPI's spelling
        raise ConfigError(
            "fault tolerance (ULFM) is not switched on in this MPI job; start it with "
            "`mpirun --with-ft ulfm ...`, or let `recover-megatron launch` build the line"
        )


def own_rank(job: Job) -> OwnRank:
    """As mpirun says it, before MPI is started. Raises ConfigError for ranks that do not fit."""
    layout = job.layout(int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    return OwnRank(layout, int(os.environ["OMPI_COMM_WORLD_RANK"]))


def fork_watchdog(config: RecoveryConfig, own: OwnRank) -> Watchdog:
    """This process goes on as the child of the watchdog."""
    trace_file = None
    if config.trace_dir:
        trace_file = str(trace_path(config.trace_dir, own.replica_id, own.position))
    return Watchdog(config.hang_timeout_s, config.stall_timeout_s, config.hang_floor_s, trace_file)


def start_mpi(
    die: Death, mates: Mates, config: RecoveryConfig, watchdog: Watchdog
) -> tuple[Any, Any]:
    """Membership and fabric: importing them starts MPI."""
    from recover_megatron.collectives.fabric.mpi import MpiFabric
    from recover_megatron.collectives.membership.ulfm import UlfmMembership

    membership = UlfmMembership(die, mates.heard, config.poll_s, watchdog)
    return membership, MpiFabric(membership)


def own_faults(config: RecoveryConfig, own: OwnRank) -> list[Any]:
    """Of the faults to inject, those that strike this rank."""
    faults = parse_faults(config.inject, own.layout)
    return [f for f in faults if (f.replica, f.position) == (own.replica_id, own.position)]


class QuorumWithout:
    """True if the ranks of all hosts but the given ones may go on."""

    def __init__(
        self,
        layout: ReplicaLayout,
        world: PresentWorld,
        places: Sequence[Place],
        evidence: Evidence,
    ):
        self._layout, self._world = layout, world
        self._places, self._evidence = places, evidence

    def __call__(self, hosts: frozenset[str]) -> bool:
        before, dead = self._layout.ranks_in(self._world.now.replicas), self._evidence()
        left = {rank for rank in before - dead if self._places[rank].host not in hosts}
        return has_quorum(before, left, dead)


def lost_hosts(layout: ReplicaLayout, places: Sequence[Place], world: World) -> set[str]:
    """The hosts on which no rank of the world runs any more."""
    live = {places[rank].host for rank in layout.ranks_in(world.replicas)}
    return {place.host for place in places} - live
