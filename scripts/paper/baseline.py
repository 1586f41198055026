"""The checkpoint-restart baseline: plain Megatron under a supervisor that starts it again.

Nothing is tuned against it: checkpoints go to the local disk, the job starts again as soon as
torchrun has ended, at its full size, and a killed process is seen at once (there is no NCCL whose
time-out would have to pass).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import psutil
from devices import Devices, process_of

from recover_megatron.testing.rehearsal import Jobs, Rehearsal, environment

_EVENTS = (
    ("iteration", re.compile(r" iteration\s+(\d+)/")),
    ("saved", re.compile(r"saved checkpoint of iteration (\d+)")),
    ("loading", re.compile(r"loading checkpoint .*iter_(\d+)")),
    ("loaded", re.compile(r"loaded checkpoint of iteration (\d+)")),
)


@dataclass(frozen=True)
class Event:
    """`kind` is one of _EVENTS, or started, killed, ended; `time` in seconds since the epoch."""

    kind: str
    iteration: int
    time: float


@dataclass
class History:
    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, iteration: int) -> None:
        self.events.append(Event(kind, iteration, time.time()))

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e.kind == kind]

    def after(self, event: Event, kind: str, iteration: int = 0) -> Event | None:
        """The next event of that kind, of that iteration or a later one, after another event."""
        later = self.events[self.events.index(event) + 1 :]
        return next((e for e in later if e.kind == kind and e.iteration >= iteration), None)


def supervise(
    jobs: Jobs,
    name: str,
    job: Rehearsal,
    ranks: int,
    interval: int,
    kills: Mapping[int, int],
    devices: Devices,
) -> History:
    """Run to the end, saving every `interval` iterations; `kills` gives the rank that is killed
    with SIGKILL as soon as an iteration has been logged for the first time."""
    save = jobs.out / name / "checkpoint"
    shutil.rmtree(save, ignore_errors=True)
    flags = ("--save", str(save), "--load", str(save), "--save-interval", str(interval))
    job = replace(job, extra=(*job.extra, *flags))
    history, due = History(), dict(kills)

    def note(kind: str, iteration: int) -> None:
        first = kind == "iteration" and history.events[-1].kind in ("started", "loaded")
        history.add(kind, iteration)
        if first:
            devices.place()
        if kind == "iteration" and iteration in due:
            victim = process_of(due.pop(iteration))
            history.add("killed", iteration)
            os.kill(victim, signal.SIGKILL)

    code, starts = 1, 0
    while code:
        history.add("started", 0)
        log = jobs.out / name / f"start-{starts}.log"
        pending = len(due)
        code = _run(job.plain(ranks), log, note)
        history.add("ended", 0)
        starts += 1
        jobs.say(f"{name}: start {starts} ended with code {code}")
        if code and pending == len(due):
            sys.exit(f"{name} ended by itself with code {code}; see {log}")
    return history


def _run(command: Sequence[str], log: Path, note: Callable[[str, int], None]) -> int:
    """The job to its end; then whatever helper of a killed rank is left (Megatron's checkpoint
    workers outlive it, and its output's other end)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    helpers: set[psutil.Process] = set()
    with log.open("w") as output, log.open() as lines:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(), start_new_session=True
        )
        while process.poll() is None:
            for line in _complete(lines):
                for kind, pattern in _EVENTS:
                    if match := pattern.search(line):
                        helpers |= set(psutil.Process(process.pid).children(recursive=True))
                        note(kind, int(match[1]))
            time.sleep(0.002)
    for helper in helpers:
        with contextlib.suppress(psutil.Error):
            helper.kill()
    return process.returncode


def _complete(lines: TextIO) -> Iterator[str]:
    """The lines that are whole."""
    while (at := lines.tell(), line := lines.readline())[1].endswith("\n"):
        yield line
    lines.seek(at)
