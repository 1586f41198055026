"""The watchdog: a small process beside each rank that ends it when it makes no progress, and that
ends what the rank has started when the rank is gone.

It is a process and not a thread, so that it also ends a rank whose training thread holds Python's
lock, or that is stopped as a whole (SIGSTOP). Peers see a hung rank as a dead replica then. Helper
processes (Megatron's checkpoint writer has one of 200 MB in each rank) do not notice that their
rank was killed or left by os._exit, and would stay for ever.

The rank writes the moments until which the next signs of progress must come into a shared page, one
for each thing that is watched; zero means that none is expected. This file is also the watchdog's
program, run as `python -I -S watchdog.py FD PID TRACE`: standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import json
import math
import mmap
import os
import signal
import struct
import subprocess
import sys
import time

POLL_S = 0.2
HELPERS_EVERY = 5  # polls
STACK_LIMIT_S = 3.0
STACK_SIGNAL = signal.SIGUSR2  # faulthandler answers without Python's lock
# What is watched, as it is named when it ends the rank. The second and third end a rank that hangs
# inside Open MPI (docs/log.md), for which mpirun would wait.
_WATCHED = (
    "no progress of its own",
    "its watcher thread does not run: stuck in Open MPI, or Python's lock is held",
    "its training thread is stuck in a call of Open MPI",
)
_OWN, _WATCHER, _CALL = range(len(_WATCHED))
_FORMAT = f"{len(_WATCHED)}d"
MPI_LIMIT_S = 30.0
# Until the first iteration has been computed: imports from a slow file system hold Python's lock.
START_LIMIT_S = 300.0


class Watchdog:
    """The rank's side. Made before MPI is started; used by the training thread alone.

    `hang_timeout_s` is the longest time between two signs of progress while computing. None: twenty
    times the longest that was seen, at least `floor_s`, and half an hour until the first iteration
    has been computed (kernels are compiled in it). 0: no limit.

    `stall_timeout_s` is the longest time from a commit to the next microbatch: optimizer, log,
    save, evaluation. None: twenty times the longest that was seen, at least half an hour. 0: no
    limit.
    """

    FACTOR = 20.0
    LONG_S = 1800.0

    def __init__(
        self,
        hang_timeout_s: float | None,
        stall_timeout_s: float | None,
        floor_s: float,
        trace_path: str | None,
    ):
        self._hang_timeout_s = hang_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._floor_s = floor_s
        self._last: float | None = None
        self._between = False
        self._longest = {False: 0.0, True: 0.0}  # by _between
        self._settled = False  # the first iteration has been computed
        fd = os.memfd_create("recover-watchdog")
        os.ftruncate(fd, mmap.PAGESIZE)
        self._page = mmap.mmap(fd, mmap.PAGESIZE)
        faulthandler.register(STACK_SIGNAL, all_threads=True, chain=False)
        subprocess.Popen(  # ends with this process, by itself
            [sys.executable, "-I", "-S", __file__, str(fd), str(os.getpid()), trace_path or ""],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # an inherited pipe would keep mpirun waiting
            stderr=subprocess.DEVNULL,
        )
        os.close(fd)

    @property
    def timeout_s(self) -> float:
        """In the present phase; infinite if it has no limit."""
        fixed = self._stall_timeout_s if self._between else self._hang_timeout_s
        if fixed is not None:
            return fixed or math.inf
        measured = self.FACTOR * self._longest[self._between]
        long = self._between or not self._settled
        return max(self.LONG_S if long else self._floor_s, measured)

    def beat(self) -> None:
        """Progress while computing (a microbatch begins); the next must come within timeout_s."""
        self._enter(between=False)

    def between(self) -> None:
        """An iteration is committed; its optimizer step, log, save and evaluation are to end within
        timeout_s."""
        self._enter(between=True)

    def rest(self) -> None:
        """No progress of this rank's own is expected until the next beat: it waits for peers."""
        self._measure(time.monotonic())
        self._settled = self._settled or (self._last is not None and not self._between)
        self._last = None
        self._write(_OWN, 0.0)

    def watcher_runs(self) -> None:
        """By the watcher thread, each time that it has looked at MPI; again within MPI_LIMIT_S
        (START_LIMIT_S at first)."""
        self._write(_WATCHER, self._mpi_limit())

    def watcher_ends(self) -> None:
        self._write(_WATCHER, 0.0)

    def calls_mpi(self, with_peers: bool = False) -> None:
        """By the training thread before a call that must return at once, or, `with_peers`, when all
        peers have made it; `called_mpi` after it. Peers have twice the time, so that of ranks that
        wait for a stuck one, that one alone is ended."""
        self._write(_CALL, self._mpi_limit(2 if with_peers else 1))

    def _mpi_limit(self, times: int = 1) -> float:
        return time.monotonic() + times * (MPI_LIMIT_S if self._settled else START_LIMIT_S)

    def called_mpi(self) -> None:
        self._write(_CALL, 0.0)

    def _enter(self, between: bool) -> None:
        now = time.monotonic()
        self._measure(now)
        self._last, self._between = now, between
        limit = self.timeout_s
        self._write(_OWN, now + limit if limit < math.inf else 0.0)

    def _measure(self, now: float) -> None:
        if self._last is not None:
            longest = self._longest[self._between]
            self._longest[self._between] = max(longest, now - self._last)

    def _write(self, what: int, deadline: float) -> None:
        struct.pack_into("d", self._page, what * struct.calcsize("d"), deadline)


def watch(fd: int, pid: int, trace_path: str) -> None:
    """The watchdog's own loop: until the rank is gone, or has been ended for want of progress."""
    page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
    known = struct.unpack_from(_FORMAT, page, 0)
    grace, woke = [0.0] * len(_WATCHED), time.monotonic()
    helpers: dict[int, str] = {}
    polls = 0
    while os.getppid() == pid:
        if polls % HELPERS_EVERY == 0:
            helpers = helpers_of(pid)
        polls += 1
        time.sleep(POLL_S)
        now = time.monotonic()
        # Time in which this process did not run, the rank may not have run either.
        missed = now - woke - POLL_S if now - woke > 2 * POLL_S else 0.0
        woke = now
        deadlines = struct.unpack_from(_FORMAT, page, 0)
        for what, deadline in enumerate(deadlines):
            grace[what] = grace[what] + missed if deadline == known[what] else 0.0
            if deadline and now > deadline + grace[what]:
                helpers = helpers_of(pid)
                _end(pid, trace_path, _WATCHED[what])
                end_helpers(helpers)
                return
        known = deadlines
    end_helpers(helpers)


def helpers_of(pid: int) -> dict[int, str]:
    """The processes that `pid` and its helpers have started, but for this one, with the moment at
    which each was started."""
    found: dict[int, str] = {}
    for children in glob.glob(f"/proc/{pid}/task/*/children"):
        for child in map(int, _read(children).split()):
            if child != os.getpid():
                found |= {child: _started(child)} | helpers_of(child)
    return found


def end_helpers(helpers: dict[int, str]) -> None:
    """SIGKILL to those of `helpers_of` that still run."""
    for pid, started in helpers.items():
        if started and _started(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _started(pid: int) -> str:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields else ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _end(pid: int, trace_path: str, why: str) -> None:
    try:
        _ask_for_stack(pid, trace_path)
        if trace_path:
            reason = f"{why}: ended by its watchdog"
            event = {"time": time.time(), "event": "died", "reason": reason}
            event |= dict(zip(("replica", "position"), _who(trace_path), strict=True))
            with open(trace_path, "a") as trace:
                trace.write(json.dumps(event) + "\n")
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _ask_for_stack(pid: int, trace_path: str) -> None:
    """The rank's stack goes to its own log; a stopped rank writes none, and is not waited for
    long."""
    folder, name = os.path.split(trace_path)
    log = os.path.join(folder, name.replace("trace.", "log.").replace(".jsonl", ".txt"))
    before, limit = _size(log), time.monotonic() + STACK_LIMIT_S
    os.kill(pid, STACK_SIGNAL)
    time.sleep(POLL_S)
    while trace_path and _size(log) == before and time.monotonic() < limit:
        time.sleep(POLL_S)


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def _who(trace_path: str) -> tuple[int, int]:
    """Replica and position from the trace's name, `trace.rR.pP.jsonl`."""
    _, replica, position, _ = os.path.basename(trace_path).split(".")
    return int(replica[1:]), int(position[1:])


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
