"""One rank's recovery session: MPI up, replica known, watcher running; and the way out."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from recover_megatron.adapters.megatron.arguments import read_job
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
from recover_megatron.faults import parse_faults
from recover_megatron.hosts.rank import RankOnHost
from recover_megatron.hosts.tunnel import address_for_mates, interface_of
from recover_megatron.inject import Injector
from recover_megatron.recovery.driver import Driver
from recover_megatron.trace import BEGAN, JOB_FOLDER, Trace, trace_path, write_atomically
from recover_megatron.workload.policy import make_policy
from recover_megatron.world import ReplicaLayout, World

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
EXIT_UNRECOVERABLE = 3
EXIT_STOPPED = 4
EXIT_TOO_FEW = 5
STOP_SIGNAL = signal.SIGUSR1  # mpirun hands it on to all ranks
# How long a rank that ends by itself waits for all others to end, too, by whether training has
# begun. Before it, ranks that meet the same error meet it apart by as long as they import.
_PATIENCE_S = {True: 0.8, False: 15.0}
# How long the leader, with an exception, waits to see whether all others have died of theirs.
_LAST_S = 0.5


class _Patience:
    """Calls `lost` in a thread of its own, `seconds` after it began last."""

    def __init__(self, seconds: float, lost: Callable[[], None]):
        self._seconds, self._lost = seconds, lost
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        self.end()
        self._timer = threading.Timer(self._seconds, self._lost)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@dataclass
class Session:
    """What the hooks need. One per process, made by `start`."""

    config: RecoveryConfig
    layout: ReplicaLayout
    replica_id: int
    position: int
    communicator: GuardedCommunicator
    driver: Driver
    mates: Mates
    watcher: Watcher
    watchdog: Watchdog
    injector: Injector
    trace: Trace
    terminal: Terminal
    console: Console | None
    on_host: RankOnHost | None
    store: Any  # position 0 keeps the replica's TCPStore server alive
    args: Any = None  # Megatron's arguments, once it has validated them
    iteration: int = 0  # the last that began, as Megatron logs it
    holds_iteration: bool = False  # weights and optimizer are those of the last committed one
    ending: bool = False  # all ranks know that this job's training is over
    rescue: Callable[[], None] | None = None  # saves what this replica, broken, still holds

    @property
    def leading(self) -> bool:
        """True at every rank of the lowest live replica."""
        return self.driver.world.leader == self.replica_id

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

    def finish(self, code: int, how: str = "") -> NoReturn:
        """The orderly end of a rank whose whole world ends: all live ranks call it.

        Not MPI_Finalize (it hangs after failures): two agreements, then `os._exit(code)`. Between
        them the watch over mates ends, so that no rank takes a mate's exit for a death. Each
        replica writes the exit code into the run folder: mpirun's own is 0 even if every rank was
        killed.

        `how` says in words how a rank ends that did not agree on it with the others, as by
        sys.exit() in the middle of training. If all of them end it is an orderly end; if not, this
        rank dies within _PATIENCE_S.
        """
        self.watchdog.rest()
        if how:
            patience = self._leave(how)
        self.driver.guarded("end", lambda: None)
        if how:
            patience.end()
        self.trace.emit("finished", code=code, replicas=list(self.driver.world.replicas))
        self.mates.leave()
        self.watcher.stop()
        if self.console is not None:
            self.console.close()
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(Exception):
            # Not public, but what Python itself runs at an exit: helper processes end.
            multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
        if self.position == 0:
            write_exit_code(self.config.trace_dir, code)
        if self.on_host is not None:
            self.on_host.done(code)
        self.communicator.agree(True, "left")
        self.watchdog.leaves(code)
        os._exit(code)

    def _leave(self, how: str) -> _Patience:
        """Begins an end that the world has not agreed on; what ends it if the others do not end."""

        def lost() -> None:
            self.terminal.say(
                f"replica {self.replica_id}, position {self.position} left {how}, not all with it"
            )
            self.communicator.die(f"left {how}, not all with it")

        patience = _Patience(_PATIENCE_S[self.iteration > 0], lost)
        self.driver.on_repair(lambda world: patience.begin())
        patience.begin()
        self.communicator.leave(f"left {how}")
        return patience

    def is_last(self) -> bool:
        """True if all other replicas are dead: known now, or, if this one leads and in training,
        within a moment. So of replicas that all meet the same error one can still save."""
        others = self.layout.ranks_in(self.driver.world.replicas)
        others -= set(self.layout.ranks_of(self.replica_id))
        limit = time.monotonic() + (_LAST_S if self.leading and self.iteration else 0.0)
        while not others <= self.communicator.failed():
            if time.monotonic() > limit:
                return False
            time.sleep(0.01)
        return True


def start(argv: Sequence[str]) -> Session:
    """Start MPI, find this rank's replica and give it a torch.distributed world of its own.

    Every rank of the job calls it, before torch is imported, so that the watcher makes MPI progress
    from the beginning. Sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so that
    Megatron believes it runs alone. Raises ConfigError before MPI is started where it can.
    """
    job = read_job(argv)
    _check_mpirun()
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # too early to be asked to stop
    layout = job.layout(int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    replica_id, position = layout.replica_of(rank), layout.position_of(rank)
    config, folder = job.config, job.config.trace_dir
    terminal = Terminal()
    trace = Trace(folder, replica_id, position, terminal.warn)
    trace_file = str(trace_path(folder, replica_id, position)) if folder else None
    watchdog = Watchdog(
        config.hang_timeout_s, config.stall_timeout_s, config.hang_floor_s, trace_file
    )
    on_host = RankOnHost.if_any()
    host = on_host.host if on_host else socket.gethostname()
    die = Death(rank, watchdog, trace.emit)
    others = frozenset(layout.ranks_of(replica_id)) - {rank}
    seen_dead: list[list[int]] = []  # as this rank saw them: in order, some at once

    def note_dead(ranks: list[int]) -> None:
        seen_dead.append(ranks)
        trace.emit("peer_failed", ranks=ranks)

    mates = Mates(others, die, note_dead)
    membership, fabric = _start_mpi(die, mates, config, watchdog)
    places = gather_places(membership, host)
    evidence = Evidence(places, host, on_host.proven_dead if on_host else frozenset)
    looks: list[Callable[[], str | None]] = [ProvenMates(lambda: evidence(others))]
    watcher = Watcher([*looks, on_host.look] if on_host else looks, die, config.poll_s)
    console = Console(folder, replica_id, position, terminal) if folder else None
    store = _own_torch_world(membership, layout, replica_id, position)
    communicator = GuardedCommunicator(membership, fabric, layout, config, evidence)
    signal.signal(STOP_SIGNAL, lambda number, frame: communicator.ask_to_stop(SIGNALLED))
    world = communicator.begin(World.initial(layout))
    faults = parse_faults(config.inject, layout)
    mine = [f for f in faults if (f.replica, f.position) == (replica_id, position)]
    injector = Injector(mine, trace.emit)
    policy = make_policy(config.policy)
    driver = Driver(communicator, policy, world, replica_id, injector, trace.emit)
    session = Session(
        config,
        layout,
        replica_id,
        position,
        communicator,
        driver,
        mates,
        watcher,
        watchdog,
        injector,
        trace,
        terminal,
        console,
        on_host,
        store,
    )
    _follow_membership(session, seen_dead, places)
    if on_host is not None:
        _judge_hosts(on_host, driver, layout, places, evidence)
    if len(world.replicas) < layout.replicas:
        driver.announce(World.initial(layout), None, 0.0)
    _leave_in_job_folder(BEGAN, "")
    trace.emit("started", host=host, pid=os.getpid(), ranks=layout.ranks)
    return session


def _start_mpi(
    die: Death, mates: Mates, config: RecoveryConfig, watchdog: Watchdog
) -> tuple[Any, Any]:
    from recover_megatron.collectives.fabric.mpi import MpiFabric  # starts MPI
    from recover_megatron.collectives.membership.ulfm import UlfmMembership

    membership = UlfmMembership(die, mates.heard, config.poll_s, watchdog)
    return membership, MpiFabric(membership)


def write_exit_code(run_dir: str | None, code: int) -> None:
    """By every replica, since any may be killed before it does, into the run folder and into the
    job's temporary one, since either may be full."""
    if run_dir:
        with contextlib.suppress(OSError):
            write_atomically(Path(run_dir) / "exit_code", f"{code}\n")
    _leave_in_job_folder("done", f"{code}\n")


def _leave_in_job_folder(name: str, text: str) -> None:
    if folder := os.environ.get(JOB_FOLDER):
        with contextlib.suppress(OSError):
            write_atomically(Path(folder) / name, text)


def _check_mpirun() -> None:
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


def _judge_hosts(
    on_host: RankOnHost,
    driver: Driver,
    layout: ReplicaLayout,
    places: Sequence[Place],
    evidence: Evidence,
) -> None:
    """What this host's part in the job needs to know of the world: who may go on without whom, and
    which hosts have no live rank any more."""

    def has_quorum_without(hosts: frozenset[str]) -> bool:
        before, dead = layout.ranks_in(driver.world.replicas), evidence()
        left = {rank for rank in before - dead if places[rank].host not in hosts}
        return has_quorum(before, left, dead)

    def changed(world: World) -> None:
        live = {places[rank].host for rank in layout.ranks_in(world.replicas)}
        on_host.fence({place.host for place in places} - live)

    on_host.has_quorum_without = has_quorum_without
    driver.on_repair(changed)


def _follow_membership(
    session: Session, seen_dead: Sequence[Sequence[int]], places: Sequence[Place]
) -> None:
    """The console follows the leader, who says each membership change in one line."""
    before = World.initial(session.layout)

    def changed(world: World) -> None:
        nonlocal before
        lost = sorted(set(before.replicas) - set(world.replicas))
        before = world
        if not session.leading:
            return
        if session.console is not None:
            session.console.lead()
        if session.position == 0:
            logger.warning(
                "recover: lost replica %s (%s died first); %d of %d replicas go on, world epoch %d",
                ", ".join(map(str, lost)) or "none",
                first_dead(session.layout.ranks_in(lost), seen_dead, places),
                len(world.replicas),
                session.layout.replicas,
                world.world_epoch,
            )

    if session.leading and session.console is not None:
        session.console.lead()
    session.driver.on_repair(changed)


def first_dead(lost: Set[int], seen_dead: Iterable[Sequence[int]], places: Sequence[Place]) -> str:
    """Which of the ranks `lost` were the first to be seen dead, and on which hosts. Several if they
    were seen at once: which of them took the others along is then not known here."""
    first = next((found for ranks in seen_dead if (found := lost & set(ranks))), set())
    return ", ".join(f"rank {rank} on {places[rank].host}" for rank in sorted(first)) or "nobody"


def _own_torch_world(
    transport: Any, layout: ReplicaLayout, replica_id: int, position: int
) -> object | None:
    """Environment for `init_process_group("env://")` inside this replica. Returns the store's
    server, which position 0 must keep.

    The server listens on a port that the kernel chose and that is never free again in between, and
    on the loopback interface if the whole replica is on one host.
    """
    mates = layout.ranks_of(replica_id)
    own = socket.gethostname()
    hosts = [name.decode() for name in transport.share(own.encode(), mates)]
    one_host = len(set(hosts)) == 1
    # Its own address is what position 0 knows best; its name may mean another one elsewhere.
    mine = "127.0.0.1" if one_host else address_for_mates([h for h in hosts if h != own])
    address = transport.share(mine.encode(), mates)[0].decode()
    listener, port = None, b""
    if position == 0:
        listener = socket.create_server((address, 0), backlog=1024)
        port = str(listener.getsockname()[1]).encode()
    port = transport.share(port, mates)[0]
    os.environ.update(
        RANK=str(position),
        WORLD_SIZE=str(layout.ranks_per_replica),
        LOCAL_RANK=os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        LOCAL_WORLD_SIZE=os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        MASTER_ADDR=address,
        MASTER_PORT=port.decode(),
        TORCHELASTIC_USE_AGENT_STORE="True",  # all ranks are clients of the server made here
    )
    if interface := "lo" if one_host else interface_of(mine):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if listener is None:
        return None
    import torch.distributed

    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
