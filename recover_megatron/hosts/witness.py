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

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from recover_megatron.collectives.membership.quorum import running
from recover_megatron.console import say
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.hosts.tunnel import admits, own_addresses

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
    link: socket.socket
    left: int | None = None  # ranks running there; None until it has had some
    gone: bool = False  # its witness has ended: proven dead
    unread: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    silent: bool = False  # not heard of for SILENT_S; nothing is sent to it until it is


class Witness:
    """Runs in a thread of the relay, or of the launcher for mpirun's own host."""

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
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._addresses = {f"{name} {own}" for own in own_addresses()}
        folder.write_lines("addresses", self._addresses)
        self._introduces = False
        self._lock = threading.RLock()
        self._ready = selectors.DefaultSelector()
        self._server = socket.create_server((address, 0), backlog=1024)
        self.port: int = self._server.getsockname()[1]

    def start(self, launcher: tuple[str, int] | None) -> None:
        """`launcher` is the address of the launcher's witness; None for that one itself."""
        self._introduces = launcher is None
        threading.Thread(target=self._accept, daemon=True).start()
        if launcher is not None and not self._try_to_connect(launcher):
            threading.Thread(target=self._connect, args=(launcher,), daemon=True).start()
        self._thread.start()

    def stop(self) -> None:
        """The job is over: from here on the folder is left alone."""
        self._stopped.set()
        self._thread.join()

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

    def _accept(self) -> None:
        while True:
            link, _ = self._server.accept()
            threading.Thread(target=self._admit, args=(link,), daemon=True).start()

    def _admit(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if admits(link, self._password):
                self._introduce_ourselves(link)
                self._add(link)
                return
        link.close()

    def _connect(self, where: tuple[str, int], name: str = "") -> None:
        """Until it succeeds, the peer is known to be lost, or _RETRY_S have passed."""
        limit = time.monotonic() + _RETRY_S
        if self._try_to_connect(where):
            return
        while time.monotonic() < limit and not self._stopped.wait(_RETRY_EVERY_S):
            lost = self.folder.lines("dead") | self.folder.lines("fenced")
            if name in lost or self._try_to_connect(where):
                return
        if not self._stopped.is_set():
            self._log(f"gave up {where[0]}:{where[1]}")

    def _try_to_connect(self, where: tuple[str, int]) -> bool:
        try:
            link = socket.create_connection(where, timeout=30)
            link.settimeout(None)
            link.sendall(f"{self._password}\n".encode())
            self._introduce_ourselves(link)
        except OSError as error:
            self._log(f"no link to {where[0]}:{where[1]} ({error}); tried again")
            return False
        self._add(link)
        return True

    def _introduce_ourselves(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NEVER_MS)
        own = " ".join(sorted(own_addresses()))
        link.sendall(f"host {self.name} {self.address} {self.port} {own}\n".encode())

    def _add(self, link: socket.socket) -> None:
        with self._lock:
            peer = Peer("", "", 0, link)
            self._ready.register(link, selectors.EVENT_READ, peer)

    # --- the loop --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            events = self._ready.select(_POLL_S)
            with self._lock:
                for key, _ in events:
                    self._read(key.data)
                self._look_at_ranks()
                self._look_for_the_end()
                self._look_for_silence(time.monotonic())

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.link.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        except OSError as error:
            self._ready.unregister(peer.link)  # unreachable: no proof
            self._log(f"the link to {peer.name or 'a peer'} failed ({error})")
            if peer.name:
                where = (peer.address, peer.port)
                threading.Thread(target=self._connect, args=(where, peer.name), daemon=True).start()
            return
        if not data:
            self._ready.unregister(peer.link)
            peer.gone = True
            if peer.name and not self.folder.has("done"):
                self._prove_dead(peer.name)
            return
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            self._hear(peer, line.decode(errors="replace").split())

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
                where = (address, int(port))
                threading.Thread(target=self._connect, args=(where, name), daemon=True).start()
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
            with contextlib.suppress(KeyError, ValueError):
                self._ready.unregister(old.link)

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
        with self._lock:
            self._say_to_all("duty")
        return True

    def _say(self, peer: Peer, line: str) -> None:
        if not (peer.gone or peer.silent):
            with contextlib.suppress(OSError):
                peer.link.sendall(f"{line}\n".encode())

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
