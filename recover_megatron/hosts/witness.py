"""The witness of one host: knows which ranks and hosts have surely died, and when the job is done.

Every two witnesses have a TCP connection. Its end (FIN or RST) is proof that the peer's process has
gone, and with it all ranks of that host, since a rank leaves when its witness is no more
(rank.py). Silence is no proof of anything. So that silence never turns into an end, connections
never time out, and nobody closes one while it lives.

Lines between witnesses, after the job's password:

    host NAME ADDRESS PORT [ADDRESS...]   the sender, where it listens, and its other addresses
    peer NAME ADDRESS PORT   from the launcher's witness to a newcomer: connect there, too
    alive                    nothing new
    dead PID                 a rank of the sender's host has ended
    left N                   so many of its ranks are running
    done CODE                the job has ended with this code
    duty                     the sender does what the launcher's host, being lost, cannot
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

from recover_megatron.collectives.membership.quorum import running
from recover_megatron.console import say
from recover_megatron.hosts.addresses import own_addresses
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.hosts.links import Reader, Writer, admits, connect, listen, name_of, spawn

_POLL_S = 0.05
_BEAT_S = 1.0
# A shorter outage is ridden out by TCP. Less than MPI's own heartbeat (launch/mpirun.py), which
# finds the ranks of a host one by one.
SILENT_S = 15.0
_RETRY_EVERY_S, _RETRY_S = 1.0, 600.0  # of a link that failed
_DUTY_S = 3.0  # within which a host says that it acts in the launcher's place
_NEVER_MS = 7 * 24 * 3600 * 1000


@dataclass
class Peer:
    """Another host, as this witness sees it."""

    name: str
    address: str
    port: int
    link: Writer
    left: int | None = None  # ranks running there; None until it has had some
    gone: bool = False  # its witness has ended: proven dead
    heard: float = field(default_factory=time.monotonic)
    silent: bool = False  # not heard of for SILENT_S; nothing is sent to it until it is


class Witness:
    """Runs on the event loop of the relay, or of the launcher for mpirun's own host (links.py).

    Args:
        name: This host's.
        address: Where other witnesses reach this one.
        folder: Shared with the ranks of this host.
        password: The job's; who does not begin with it is not heard.
    """

    def __init__(self, name: str, address: str, folder: HostFolder, password: str):
        self.name = name
        self.address = address
        self.folder = folder
        self.left: int | None = None
        self.peers: dict[str, Peer] = {}
        self._password = password
        self._ranks: dict[int, str] = {}  # ever seen here, and when each started
        self._running: set[int] = set()
        self._dead: set[str] = set()
        self._told_done = False
        self._beat = 0.0
        self._stopped = threading.Event()
        self.duty_done = threading.Event()  # by some host
        self._ended = threading.Event()
        self._addresses = {f"{name} {own}" for own in own_addresses()}
        folder.write_lines("addresses", self._addresses)
        self._introduces = False
        self._lock = threading.RLock()  # `over` and `take_duty` are asked by other threads
        self.port = listen(address, self._admit)

    def start(self, launcher: tuple[str, int] | None) -> None:
        """`launcher` is the address of the launcher's witness; None for that one itself."""
        self._introduces = launcher is None
        if launcher is not None:
            spawn(self._connect(launcher))
        spawn(self._look_around())

    def stop(self) -> None:
        """The job is over: from here on the folder is left alone. Links stay open: their end would
        be proof of this host's death."""
        self._stopped.set()
        self._ended.wait()

    @property
    def over(self) -> bool:
        """True if there is nothing left to witness: no rank runs here, nor on any host that counts.
        False before the first rank has started."""
        without = self.folder.lines("fenced")
        alone = self.folder.has("no_quorum")
        with self._lock:
            peers = [p for p in self.peers.values() if not (p.gone or p.name in without or alone)]
            seen = [left for left in (self.left, *(p.left for p in peers)) if left is not None]
            return bool(seen) and not any(seen)

    # --- links -----------------------------------------------------------------------------------

    async def _admit(self, reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(OSError):
            if await admits(reader, self._password):
                self._introduce_ourselves(writer)
                await self._listen_to(Peer("", "", 0, writer), reader)
                return
            self._log(f"a link without the job's password was refused: {name_of(writer)}")
        writer.close()

    async def _connect(self, where: tuple[str, int], name: str = "") -> None:
        """Until it succeeds, the peer is known to be lost, or _RETRY_S have passed."""
        limit = time.monotonic() + _RETRY_S
        while not self._stopped.is_set():
            try:
                reader, writer = await connect(where)
                writer.write(f"{self._password}\n".encode())
                self._introduce_ourselves(writer)
            except OSError as error:
                self._log(f"no link to {where[0]}:{where[1]} ({error}); tried again")
            else:
                await self._listen_to(Peer("", "", 0, writer), reader)
                return
            await asyncio.sleep(_RETRY_EVERY_S)
            if name in self.folder.lines("dead") | self.folder.lines("fenced"):
                return
            if time.monotonic() > limit:
                self._log(f"gave up {where[0]}:{where[1]}")
                return

    def _introduce_ourselves(self, link: Writer) -> None:
        connection = link.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NEVER_MS)
        own = " ".join(sorted(own_addresses()))
        link.write(f"host {self.name} {self.address} {self.port} {own}\n".encode())

    async def _listen_to(self, peer: Peer, reader: Reader) -> None:
        """Until the link ends: in proof of the peer's end, or by a failure that proves nothing."""
        try:
            while (line := await reader.readline()).endswith(b"\n"):  # or it was cut short
                if self._stopped.is_set():
                    return
                with self._lock:
                    peer.heard = time.monotonic()
                    self._hear(peer, line.decode(errors="replace").split())
        except (ConnectionResetError, BrokenPipeError):
            pass  # the peer's kernel says so
        except OSError as error:
            self._log(f"the link to {peer.name or 'a peer'} failed ({error})")
            if peer.name:
                spawn(self._connect((peer.address, peer.port), peer.name))
            return
        with self._lock:
            peer.gone = True
            if peer.name and not self._stopped.is_set() and not self.folder.has("done"):
                self._log(f"the witness on {peer.name} has ended")
                self._prove_dead(peer.name)

    async def _look_around(self) -> None:
        """At this host's ranks, and for hosts that are silent, until the job is over."""
        try:
            while not self._stopped.is_set():
                with self._lock:
                    self._look_at_ranks()
                    self._look_for_the_end()
                    self._look_for_silence(time.monotonic())
                await asyncio.sleep(_POLL_S)
        finally:
            self._ended.set()

    # --- what is heard ---------------------------------------------------------------------------

    def _hear(self, peer: Peer, words: list[str]) -> None:
        match words:
            case ["host", name, address, port, *addresses]:
                if self._introduces:
                    for other in self.peers.values():
                        if not other.gone:
                            self._say(peer, f"peer {other.name} {other.address} {other.port}")
                peer.name, peer.address, peer.port = name, address, int(port)
                self._addresses |= {f"{name} {each}" for each in addresses}
                self.folder.write_lines("addresses", self._addresses)
                self._supersede(self.peers.get(name))
                self.peers[name] = peer
                if self.left is not None:
                    self._say(peer, f"left {self.left}")
            case ["peer", name, address, port]:
                spawn(self._connect((address, int(port)), name))
            case ["dead", pid]:
                self._prove_dead(f"{peer.name} {pid}")
            case ["left", number]:
                peer.left = int(number)
            case ["duty"]:
                self.duty_done.set()
            case ["done", code]:
                if not self.folder.has("done"):
                    self.folder.write("done", f"{code}\n")

    def _log(self, text: str) -> None:
        say(text, f"witness on {self.name}")

    def _supersede(self, old: Peer | None) -> None:
        """A peer that was taken for lost has a new link: the end of the old one proves nothing."""
        if old is not None:
            old.name = ""

    def take_duty(self, lost: str) -> bool:
        """True at one of the hosts that are left, which is to act in the place of the host `lost`.
        Every relay asks once the job is over, and the first in order of their names does it; the
        next one waits a while for it, and so on."""
        with self._lock:
            gone = {lost, *self.folder.lines("fenced"), *self.folder.lines("silent")}
            gone |= {p.name for p in self.peers.values() if p.gone and p.name in self._dead}
            order = sorted({self.name, *self.peers} - gone)
        for _ in range(order.index(self.name) if self.name in order else len(order)):
            if self.duty_done.wait(_DUTY_S):
                return False
        if self.duty_done.is_set():
            return False
        self.duty_done.set()
        spawn(self._tell_of_duty())
        return True

    async def _tell_of_duty(self) -> None:
        with self._lock:
            self._say_to_all("duty")

    def _say(self, peer: Peer, line: str) -> None:
        if not (peer.gone or peer.silent):
            peer.link.write(f"{line}\n".encode())

    def _say_to_all(self, line: str) -> None:
        for peer in self.peers.values():
            self._say(peer, line)

    # --- what is seen on this host ---------------------------------------------------------------

    def _look_at_ranks(self) -> None:
        ranks = self.folder.ranks()
        new = set(ranks) - set(self._ranks)
        self._ranks |= ranks
        ended = {pid for pid in self._running | new if not running(pid, self._ranks[pid])}
        self._running = (self._running | new) - ended
        for pid in sorted(ended):
            self._prove_dead(f"{self.name} {pid}")
            self._say_to_all(f"dead {pid}")
        if new or ended:
            self.left = len(self._running)
            self._say_to_all(f"left {self.left}")

    def _look_for_the_end(self) -> None:
        if not self._told_done and self.folder.has("done"):
            self._told_done = True
            (code,) = self.folder.lines("done")
            self._say_to_all(f"done {code}")

    def _look_for_silence(self, now: float) -> None:
        if now - self._beat > _BEAT_S:
            if now - self._beat > SILENT_S / 2 and self._beat:
                # This host itself stood still: what came meanwhile has yet to be read.
                for peer in self.peers.values():
                    peer.heard = now
            self._beat = now
            self._say_to_all("alive")
        before = [p.name for p in self.peers.values() if p.silent]
        for peer in self.peers.values():
            peer.silent = now - peer.heard > SILENT_S
        after = [p.name for p in self.peers.values() if p.silent]
        if after != before:
            self.folder.write_lines("silent", after)

    def _prove_dead(self, line: str) -> None:
        self._dead.add(line)
        self.folder.write_lines("dead", self._dead)
