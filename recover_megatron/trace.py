"""The trace of one rank: its events (events.py), one a line; the machine-readable record of a run.

A line is one write(2) to a file opened with O_APPEND, so what was traced before a SIGKILL is kept.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from recover_megatron.events import Event, parse_line, to_line

# The environment variable that names the job's temporary folder on the launcher's host.
JOB_FOLDER = "RECOVER_JOB_FOLDER"
BEGAN = "began"  # a file in it: the world has begun


class Trace:
    """Appends events to `directory/trace.rR.pP.jsonl`; with no directory it does nothing.

    Tracing must not end training: what cannot be written is kept, up to KEPT events, and written
    when it can be. `warn(subject, text)` is told once.
    """

    KEPT = 1000
    _WAIT_S = 1.0  # for another thread that is stuck in a write

    def __init__(
        self,
        directory: str | None,
        replica_id: int,
        position: int,
        warn: Callable[[str, str], None] = lambda subject, text: None,
    ):
        self._replica_id, self._position = replica_id, position
        self._path = trace_path(directory, replica_id, position) if directory is not None else None
        self._warn = warn
        self._fd: int | None = None
        self._pending: list[bytes] = []
        self._written = 0  # bytes of the first pending line that are in the file
        self._lock = threading.Lock()
        self._append([])

    def emit(self, event: Event) -> None:
        """Adds time and place. Safe from any thread; never raises for a file that cannot be
        written."""
        who = {"replica": self._replica_id, "position": self._position}
        self._append([to_line(replace(event, time=time.time(), **who)).encode()])

    def _append(self, lines: Sequence[bytes]) -> None:
        if self._path is None or not self._lock.acquire(timeout=self._WAIT_S):
            return
        try:
            self._pending += lines
            if len(self._pending) > self.KEPT:
                del self._pending[1]  # the first may be half in the file
            self._write(self._path)
        except OSError as error:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            self._warn("trace", f"{self._path} cannot be written ({error}): training goes on")
        finally:
            self._lock.release()

    def _write(self, path: Path) -> None:
        if self._fd is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        while self._pending:
            line = self._pending[0]
            self._written += os.write(self._fd, line[self._written :])
            if self._written == len(line):
                del self._pending[0]
                self._written = 0


def trace_path(directory: str | Path, replica_id: int, position: int) -> Path:
    return Path(directory) / f"trace.r{replica_id}.p{position}.jsonl"


def write_atomically(path: Path, text: str) -> None:
    """So that nobody ever reads half of it."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def text_of(path: Path) -> str:
    """Of a file that may not be there, or not be readable: empty then."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def read_traces(directory: str | Path) -> Iterator[Event]:
    """All events of a run, file by file; a last line cut short by a kill is skipped."""
    for path in sorted(Path(directory).glob("trace.r*.p*.jsonl")):
        with path.open("rb") as lines:
            yield from parse_events(lines)


def parse_events(lines: Iterable[str | bytes]) -> Iterator[Event]:
    """The events of a trace's lines; what is none is skipped."""
    return (event for event in map(parse_line, lines) if event is not None)
