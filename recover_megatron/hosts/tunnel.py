"""A TCP relay, one of whose ends never sees the other go."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

import psutil

from recover_megatron.console import say

_BLOCK = 1 << 16


class Tunnel:
    """Listens on `bind` and passes connections on to `target`, both (address, port).

    With `protect="target"` it is the connection to `target` that stays open, and is drained, when
    the accepted one breaks; with `protect="client"` the other way round. What the far end sends is
    dropped while `fenced()`.

    A client must begin with `password` and a newline if one is given to `admit`; the tunnel itself
    begins so towards `target` with `present`.
    """

    def __init__(
        self,
        bind: str,
        target: tuple[str, int],
        protect: str,
        fenced: Callable[[], bool],
        admit: str = "",
        present: str = "",
    ):
        self._target = target
        self._protect_target = protect == "target"
        self._fenced = fenced
        self._admit = admit
        self._present = present
        self.joined = threading.Event()  # a connection came through
        self.far_lost = threading.Event()  # one broke at its far end, and that is hidden
        self.ended = threading.Event()  # the protected end itself has closed
        self._server = socket.create_server((bind, 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            if self._admit and not admits(client, self._admit):
                say("a client without the job's password was refused", "tunnel")
                client.close()
                return
            target = socket.create_connection(self._target)
            if self._present:
                target.sendall(f"{self._present}\n".encode())
            for end in (client, target):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            say(f"no way to {self._target[0]}:{self._target[1]} ({error})", "tunnel")
            client.close()  # it would wait for ever
            return
        self.joined.set()
        near, far = (target, client) if self._protect_target else (client, target)
        try:
            self._pump(near, far)
        except OSError as error:  # of the near end: of the far one it is hidden
            say(f"the near end failed ({error})", "tunnel")
            self.ended.set()
            far.close()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ)
            ready.register(far, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    came = key.fileobj
                    try:
                        data = came.recv(_BLOCK)  # type: ignore[union-attr]
                    except OSError:
                        data = b""
                    if came is near and not data:
                        self.ended.set()
                        far.close()
                        return
                    if came is far and not data:
                        self.far_lost.set()
                        ready.unregister(far)
                        far.close()
                    elif came is far and not self._fenced():
                        near.sendall(data)
                    elif came is near and not self.far_lost.is_set():
                        with contextlib.suppress(OSError):  # recv will tell
                            far.sendall(data)


def admits(client: socket.socket, password: str) -> bool:
    """Reads one line, of at most the password's length, and compares it."""
    client.settimeout(30)
    line = b""
    while len(line) <= len(password) and not line.endswith(b"\n"):
        byte = client.recv(1)
        if not byte:
            return False
        line += byte
    client.settimeout(None)
    return hmac.compare_digest(line, f"{password}\n".encode())


def address_towards(host: str) -> str:
    """This host's own address on the way to `host` (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def address_for_mates(others: Sequence[str]) -> str:
    """This host's address as the hosts named `others` can reach it. Debian gives a host's own name
    127.0.1.1, which leads nowhere from elsewhere."""
    for other in others:
        with contextlib.suppress(OSError):
            found = address_towards(other)
            if not found.startswith("127."):
                return found
    own = sorted(own_addresses())
    return own[0] if own else socket.gethostbyname(socket.gethostname())


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return name
    return None


def own_addresses() -> frozenset[str]:
    """All IPv4 addresses of this host but the loopback ones."""
    found = (a for addresses in psutil.net_if_addrs().values() for a in addresses)
    own = {a.address for a in found if a.family == socket.AF_INET}
    return frozenset(address for address in own if not address.startswith("127."))
