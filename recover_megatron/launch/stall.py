"""Who is waited for, where a whole job stands still: read from the traces, by the launcher."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from recover_megatron.console import say
from recover_megatron.trace import parse_events, trace_path
from recover_megatron.world import ReplicaLayout

# A rank that has traced one of these is done with that iteration ...
_DONE = ("committed", "loss", "parameters")
# ... and with one of these it is so far in it.
_STAGES = ("fetched", "computed", "sync_failed", "repaired")
_TAIL_BYTES = 8192


class StallReport(threading.Thread):
    """Says who is waited for, once, whenever no rank has traced anything for `quiet_s` seconds."""

    def __init__(self, run_dir: Path, layout: ReplicaLayout, quiet_s: float):
        super().__init__(name="recover-stall-report", daemon=True)
        self._run_dir = run_dir
        self._layout = layout
        self._quiet_s = quiet_s
        self._began = time.time()
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()

    def run(self) -> None:
        reported = 0.0
        while not self._stop_asked.wait(min(1.0, self._quiet_s / 4)):
            newest = max([self._began, *(p.stat().st_mtime for p in self._traces())])
            quiet = time.time() - newest
            if quiet > self._quiet_s and newest != reported:
                reported = newest
                say(
                    f"no progress for {quiet:.0f} s; waiting for "
                    + waited_for(self._run_dir, self._layout)
                )

    def _traces(self) -> list[Path]:
        return [p for p in self._run_dir.glob("trace.r*.p*.jsonl") if p.exists()]


def waited_for(run_dir: Path, layout: ReplicaLayout) -> str:
    """The live ranks that are furthest behind, in words, with host and the last that they traced.

    A rank traces nothing while it waits, so the others' last events show how far they came.
    """
    behind: dict[tuple[int, int], list[str]] = {}
    for rank in range(layout.ranks):
        replica, position = layout.replica_of(rank), layout.position_of(rank)
        events = _ends_of(trace_path(run_dir, replica, position))
        if any(e["event"] in ("died", "finished") for e in events):
            continue
        who = f"replica {replica}, position {position} (rank {rank}"
        if not events:
            behind.setdefault((-1, 0), []).append(f"{who}): has not started")
            continue
        telling = [e for e in events if e["event"] in ("started", *_DONE, *_STAGES)]
        last = telling[-1] if telling else events[-1]
        text = f"{who} on {events[0].get('host')}): {_words(last)}"
        behind.setdefault(_progress(last), []).append(text)
    if not behind:
        return "nobody: all ranks have ended"
    furthest = behind[min(behind)]
    if len(behind) == 1 and len(furthest) > 1:
        return f"all {len(furthest)} ranks, which have come equally far; {furthest[0]}"
    return "; ".join(furthest)


def _progress(event: dict[str, Any]) -> tuple[int, int]:
    iteration = event.get("iteration") or 0
    if event["event"] in _DONE:
        return (iteration + 1, 0)
    return (iteration, 1 + _STAGES.index(event["event"]) if event["event"] in _STAGES else 0)


def _words(event: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    iteration = f" iteration {event['iteration']}" if event.get("iteration") else ""
    return f"last seen at {at}, {event['event']}{iteration}"


def _ends_of(path: Path) -> list[dict[str, Any]]:
    """The first event of a trace and its last ones; a line cut short is skipped."""
    try:
        with path.open("rb") as file:
            head = file.readline()
            file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = [head, *file.read().splitlines()]
    except FileNotFoundError:
        return []
    return list(parse_events(lines))
