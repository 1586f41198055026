"""TCP links between the processes of a job on several hosts: one event loop, and a password.

All links of a process live on one asyncio event loop, which runs in a thread of its own, so that
the rest of the program can wait for other things.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

_PASSWORD_S = 30.0
CONNECT_S = 30.0
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Handler = Callable[[Reader, Writer], Awaitable[None]]


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """The process's event loop; its thread runs until the process ends."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name="recover-links", daemon=True).start()
    return made


def spawn(task: Coroutine[Any, Any, None]) -> None:
    """Run a task on the loop, from any thread. A bug in it is printed, and ends it alone."""

    async def told() -> None:
        try:
            await task
        except Exception:  # noqa: BLE001  nobody else would see it
            traceback.print_exc()

    asyncio.run_coroutine_threadsafe(told(), loop())


def listen(address: str, handler: Handler) -> int:
    """Serve connections to `address`; the port, which the kernel chooses."""
    server = socket.create_server((address, 0), backlog=1024)
    asyncio.run_coroutine_threadsafe(asyncio.start_server(handler, sock=server), loop()).result()
    return int(server.getsockname()[1])


async def connect(where: tuple[str, int]) -> tuple[Reader, Writer]:
    """Raises OSError, also if nothing answers within CONNECT_S seconds."""
    try:
        return await asyncio.wait_for(asyncio.open_connection(*where), CONNECT_S)
    except TimeoutError:
        raise TimeoutError(f"no answer within {CONNECT_S:.0f} s") from None


async def admits(reader: Reader, password: str) -> bool:
    """True if the client begins with the password and a newline. Reads at most their length, within
    _PASSWORD_S seconds. Raises OSError for a link that breaks."""
    expected = f"{password}\n".encode()
    try:
        found = await asyncio.wait_for(reader.readexactly(len(expected)), _PASSWORD_S)
    except (TimeoutError, asyncio.IncompleteReadError):
        return False
    return hmac.compare_digest(found, expected)


def name_of(writer: Writer) -> str:
    """The far end of a link, for a log line."""
    peer = writer.get_extra_info("peername") or ("?", 0)
    return f"{peer[0]}:{peer[1]}"
