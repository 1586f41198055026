"""The engine: the one thread of a rank that calls MPI. Knows no MPI itself.

MPI needs to be called: without calls it makes no progress, and no failure is ever seen. But two
threads inside Open MPI at the same time get wrong answers from it (docs/log.md). So one thread
makes every call. Other threads hand it operations and wait for their results:

    training thread                      engine thread
      submit(operation)  ---------->       runs it, step by step
      wait()                               between two steps, and while there is nothing to do:
        ...                                  looks for failures, every `poll_s` seconds
      result             <----------       the operation has returned

An operation is a generator: it yields wherever it would wait for a peer, so that the engine can
look for failures meanwhile. A call of MPI that offers no such point (Shrink, Split) stands inside
`blocking`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Generic, Protocol, TypeVar

from recover_megatron.errors import InvariantViolation

T = TypeVar("T")
Operation = Generator[None, None, T]

_NAP_S = 0.0005
# How often a waiting thread makes sure that the engine is still there. If the engine is there but
# stuck in MPI, the watchdog ends the rank.
_CHECK_S = 1.0


class Signs(Protocol):
    """Where the engine gives its signs of life: membership/watchdog.py."""

    def engine_runs(self, times: int = 1) -> None: ...

    def engine_rests(self) -> None: ...


class NoSigns:
    """For a rank without a watchdog."""

    def engine_runs(self, times: int = 1) -> None: ...

    def engine_rests(self) -> None: ...


class Request(Generic[T]):
    """An operation that the engine was handed; wait for it once."""

    def __init__(self, engine: Engine, operation: Operation[T]):
        self._engine = engine
        self.operation = operation
        self._settled = threading.Lock()
        self._settled.acquire()
        self._result: T
        self._error: BaseException | None = None

    def wait(self) -> T:
        """The operation's result. Raises what it raised. Raises InvariantViolation if the engine
        itself has ended, which it never does by itself."""
        while not self._settled.acquire(timeout=_CHECK_S):
            if not self._engine.alive:
                raise InvariantViolation("the engine thread has ended") from self._engine.failure
        if self._error is not None:
            raise self._error
        return self._result

    def carry_out(self, between: Callable[[], None]) -> None:
        """By the engine: run to the end, with `between` after each step."""
        try:
            while True:
                next(self.operation)
                between()
        except StopIteration as end:
            self._result = end.value
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            self._error = error
        self._settled.release()


class Engine:
    """Made once per rank, when MPI has been started; it runs until the process ends.

    Args:
        look: Looks for failures; called in the engine's thread, every `poll_s` seconds, also
            between the steps of an operation. What it raises ends the engine, and every wait.
        poll_s: Seconds.
        crowded: Ranks outnumber the host's cores. Then the engine sleeps between two steps: MPI's
            blocking calls spin, and with more ranks than cores that starves whoever must run for a
            failure to be seen, for up to 19 s on Linux 6.18 (docs/log.md).
        signs: Told that the engine runs, at each look.
    """

    def __init__(
        self, look: Callable[[], None], poll_s: float, crowded: bool, signs: Signs | None = None
    ):
        self._look = look
        self._poll_s = poll_s
        self._crowded = crowded
        self._signs = signs or NoSigns()
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._due = 0.0  # the next look
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="recover-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, operation: Operation[T]) -> Request[T]:
        """From any thread. Operations are carried out one after the other, in this order."""
        request = Request(self, operation)
        self._requests.put(request)
        return request

    def run(self, operation: Operation[T]) -> T:
        """Submit and wait; not from the engine's own thread."""
        return self.submit(operation).wait()

    @contextlib.contextmanager
    def blocking(self, limited: bool = True) -> Iterator[None]:
        """By an operation, around a call that returns only when all peers have made it. They have
        twice the usual time, so that of ranks that wait for a stuck one, that one alone is ended;
        without a limit, for as long as they take."""
        if limited:
            self._signs.engine_runs(2)
        else:
            self._signs.engine_rests()
        yield
        self._signs.engine_runs()

    def _run(self) -> None:
        try:
            while True:
                self._look_if_due()
                with contextlib.suppress(queue.Empty):
                    left = max(0.0, self._due - time.monotonic())
                    self._requests.get(timeout=left).carry_out(self._between)
        except BaseException as error:  # noqa: BLE001  whoever waits for the engine raises it
            self.failure = error

    def _between(self) -> None:
        self._look_if_due()
        if self._crowded:
            time.sleep(_NAP_S)

    def _look_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._signs.engine_runs()
            self._look()
            self._due = now + self._poll_s
