"""A TensorBoard or W&B writer for the whole job, whichever replica comes to lead."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_Call = tuple[tuple[str, ...], tuple[Any, ...], dict[str, Any]]


class LeadersWriter:
    """Stands in for a TensorBoard or W&B writer in every replica. The leader's calls go to the real
    one, which `make` opens; the others' are kept for two logged iterations, and made by the replica
    that comes to lead. So no value is lost; some may be written twice.

    The real one may fail at any moment (a full disk, a folder that cannot be made, a missing
    package): `failed` is told, training goes on, and at later logs, ever fewer, it is opened anew,
    and what it should have written is written, up to KEPT logs back.

    Any method may be called on it, also on its attributes (`writer.config.update(...)`).
    """

    KEPT = 1000

    def __init__(self, make: Callable[[], Any], failed: Callable[[Exception], None]):
        self._make = make
        self._failed = failed
        self._writer: Any = None  # the real one, while it works
        self._leading = False
        self._failures = 0  # since it worked last
        self._wait = 0  # logs, until it is tried again
        self._kept: deque[list[_Call]] = deque([[]], maxlen=self.KEPT)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, (name,))

    def begin_log(self) -> None:
        """The log of an iteration begins."""
        self._kept.append([])
        if not self._leading:
            while len(self._kept) > 2:
                self._kept.popleft()

    def end_log(self) -> None:
        """What the leader wrote must outlive it."""
        self._wait -= 1
        if not self._leading or self._wait > 0:
            return
        with self._unharmed():
            if self._writer is None:
                self._writer = self._make()
                for call in [call for calls in self._kept for call in calls]:
                    self._do(*call)
            if hasattr(self._writer, "flush"):
                self._writer.flush()
            while len(self._kept) > 1:  # written
                self._kept.popleft()
            self._failures = 0

    def lead(self) -> None:
        """From now on this rank's calls are the job's. Does nothing the second time."""
        if not self._leading:
            self._leading = True
            self.end_log()

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever a writer raises, it only tells
            self._writer = None
            self._failures += 1
            self._wait = min(2**self._failures, 64)
            self._failed(error)

    def call(self, path: Sequence[str], args: Sequence[Any], more: dict[str, Any]) -> Any:
        """What stands for the real writer's method at `path`."""
        self._kept[-1].append((tuple(path), tuple(args), more))
        if self._leading and self._writer is not None:
            with self._unharmed():
                return self._do(path, args, more)
        return None

    def _do(self, path: Sequence[str], args: Sequence[Any], more: dict[str, Any]) -> Any:
        target = self._writer
        for name in path:
            target = getattr(target, name) if target is not None else None
        return None if target is None else target(*args, **more)


class _Method:
    def __init__(self, writer: LeadersWriter, path: tuple[str, ...]):
        self._writer, self._path = writer, path

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._writer, (*self._path, name))

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._writer.call(self._path, args, more)
