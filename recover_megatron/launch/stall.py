"""Who is waited for, where a whole job stands still: read from the traces, by the launcher."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from recover_megatron.console import say
from recover_megatron.events import (
    Committed,
    Computed,
    Event,
    Fetched,
    Loss,
    Parameters,
    Repaired,
    SyncFailed,
)
from recover_megatron.record.run_record import RunRecord, TraceTail
from recover_megatron.world import ReplicaLayout

# A rank that has traced one of these is done with that iteration ...
_DONE = (Committed, Loss, Parameters)
# ... and with one of these it is so far in it.
_STAGES: tuple[type[Event], ...] = (Fetched, Computed, SyncFailed, Repaired)


class StallReport(threading.Thread):
    """Says who is waited for, once, whenever no rank has traced anything for `quiet_s` seconds."""

    def __init__(self, run_dir: Path, layout: ReplicaLayout, quiet_s: float):
        super().__init__(name="recover-stall-report", daemon=True)
        self._layout = layout
        self._quiet_s = quiet_s
        self._tail, self._record = TraceTail(run_dir), RunRecord()
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()

    def run(self) -> None:
        newest, reported = time.time(), False
        while not self._stop_asked.wait(min(1.0, self._quiet_s / 4)):
            if events := self._tail.new_events():
                self._record.feed(events)
                newest, reported = max(newest, events[-1].time), False
            quiet = time.time() - newest
            if quiet > self._quiet_s and not reported:
                reported = True
                waited = waited_for(self._record, self._layout)
                say(f"no progress for {quiet:.0f} s; waiting for {waited}")


def waited_for(record: RunRecord, layout: ReplicaLayout) -> str:
    """The live ranks that are furthest behind, in words, with host and the last that they traced.

    A rank traces nothing while it waits, so the others' last events show how far they came.
    """
    dead = {event.place for event in record.deaths}
    behind: dict[tuple[int, int], list[str]] = {}
    for rank in range(layout.ranks):
        place = layout.replica_of(rank), layout.position_of(rank)
        if place in dead or place in record.finished:
            continue
        who = f"replica {place[0]}, position {place[1]} (rank {rank}"
        last = record.last.get(place)
        if last is None:
            behind.setdefault((-1, 0), []).append(f"{who}): has not started")
            continue
        host = record.started[place].host if place in record.started else "?"
        behind.setdefault(_progress(last), []).append(f"{who} on {host}): {_words(last)}")
    if not behind:
        return "nobody: all ranks have ended"
    furthest = behind[min(behind)]
    if len(behind) == 1 and len(furthest) > 1:
        return f"all {len(furthest)} ranks, which have come equally far; {furthest[0]}"
    return "; ".join(furthest)


def _progress(event: Event) -> tuple[int, int]:
    iteration: int = _iteration(event) or 0
    if isinstance(event, _DONE):
        return (iteration + 1, 0)
    return (iteration, 1 + _STAGES.index(type(event)) if isinstance(event, _STAGES) else 0)


def _words(event: Event) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.time))
    number = _iteration(event)
    return f"last seen at {at}, {event.KIND}" + (f" iteration {number}" if number else "")


def _iteration(event: Any) -> int | None:
    return getattr(event, "iteration", None)
