"""A TCP relay, one of whose ends never sees the other go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from recover_megatron.console import say
from recover_megatron.hosts.links import Reader, Writer, admits, connect, listen, name_of

_BLOCK = 1 << 16


class Tunnel:
    """Listens on an address and passes connections on to another.

    Args:
        bind: The address to listen on.
        target: (address, port) to pass connections on to.
        protect: "target": the connection to the target stays open, and is drained, when the
            accepted one breaks. "client": the other way round.
        fenced: While it says True, what the far end, the one not protected, sends is dropped.
        admit: If given, a client must begin with this password and a newline.
        present: If given, the tunnel itself begins so towards the target.
    """

    def __init__(
        self,
        bind: str,
        target: tuple[str, int],
        protect: str,
        fenced: Callable[[], bool],
        *,
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
        self.port = listen(bind, self._serve)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        try:
            if self._admit and not await admits(reader, self._admit):
                say(f"a client without the job's password was refused: {name_of(writer)}", "tunnel")
                writer.close()
                return
            target = await connect(self._target)
            if self._present:
                target[1].write(f"{self._present}\n".encode())
            for end in (writer, target[1]):
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            say(f"no way to {self._target[0]}:{self._target[1]} ({error})", "tunnel")
            writer.close()  # it would wait for ever
            return
        self.joined.set()
        client = reader, writer
        near, far = (target, client) if self._protect_target else (client, target)
        await asyncio.gather(self._from_near(near[0], far[1]), self._from_far(far[0], near[1], far))

    async def _from_near(self, near: Reader, far: Writer) -> None:
        """Until the near end closes."""
        with contextlib.suppress(OSError):
            while data := await near.read(_BLOCK):
                if not self.far_lost.is_set():
                    with contextlib.suppress(OSError):  # `_from_far` will tell
                        far.write(data)
                        await far.drain()
        self.ended.set()
        far.close()

    async def _from_far(self, reader: Reader, near: Writer, far: tuple[Reader, Writer]) -> None:
        """Until the far end closes, which the near one does not see."""
        while True:
            try:
                data = await reader.read(_BLOCK)
            except OSError:
                data = b""
            if not data:
                break
            if not self._fenced():
                try:
                    near.write(data)
                    await near.drain()
                except OSError as error:
                    say(f"the near end failed ({error})", "tunnel")
                    self.ended.set()
                    break
        if not self.ended.is_set():
            self.far_lost.set()
        far[1].close()
