"""Structured events of one rank, one JSON object a line; the machine-readable record of a run.

Every line has `time` (Unix seconds), `event`, `replica`, `position`; the rest is the event's own.
A line is one write(2) to a file opened with O_APPEND, so what was traced before a SIGKILL is kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class Trace:
    """Appends events to `directory/trace.rR.pP.jsonl`; with no directory it does nothing."""

    def __init__(self, directory: str | None, replica_id: int, position: int):
        self._who = {"replica": replica_id, "position": position}
        self._fd: int | None = None
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            path = trace_path(directory, replica_id, position)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def emit(self, event: str, **facts: Any) -> None:
        """Safe from any thread; never raises for a full disk: tracing must not end training."""
        if self._fd is None:
            return
        line = json.dumps({"time": time.time(), "event": event, **self._who, **facts}) + "\n"
        try:
            os.write(self._fd, line.encode())
        except OSError:
            os.close(self._fd)
            self._fd = None


def trace_path(directory: str | Path, replica_id: int, position: int) -> Path:
    return Path(directory) / f"trace.r{replica_id}.p{position}.jsonl"


def write_atomically(path: Path, text: str) -> None:
    """So that nobody ever reads half of it."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def read_traces(directory: str | Path) -> Iterator[dict[str, Any]]:
    """All events of a run, file by file; a last line cut short by a kill is skipped."""
    for path in sorted(Path(directory).glob("trace.r*.p*.jsonl")):
        with path.open() as lines:
            yield from parse_events(lines)


def parse_events(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The events of a trace's lines; one cut short by a kill is skipped."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # also of bytes that are no text
            continue
