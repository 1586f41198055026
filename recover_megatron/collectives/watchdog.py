"""The watchdog: a small process beside each rank that ends it when it makes no progress.

It is a process and not a thread, so that it also ends a rank whose training thread holds Python's
lock, or that is stopped as a whole (SIGSTOP). Peers see a hung rank as a dead replica then.

The rank writes the moment until which the next sign of progress must come into a shared page; zero
means that none is expected (it waits for peers or is done). This file is also the watchdog's
program, run as `python -I -S watchdog.py FD PID TRACE`: standard library only.
"""

from __future__ import annotations

import faulthandler
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
STACK_SIGNAL = signal.SIGUSR2  # faulthandler answers without Python's lock
_FORMAT = "d"


class Watchdog:
    """The rank's side. Made before MPI is started; used by the training thread alone.

    `hang_timeout_s` is the longest time between two signs of progress while computing. None: twenty
    times the longest that was seen, at least `floor_s`, and half an hour until the first iteration
    has been computed (kernels are compiled in it). 0: no watchdog.

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
        self._page: mmap.mmap | None = None
        if hang_timeout_s == 0:
            return
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
        self._write(0.0)

    def _enter(self, between: bool) -> None:
        now = time.monotonic()
        self._measure(now)
        self._last, self._between = now, between
        limit = self.timeout_s
        self._write(now + limit if limit < math.inf else 0.0)

    def _measure(self, now: float) -> None:
        if self._last is not None:
            longest = self._longest[self._between]
            self._longest[self._between] = max(longest, now - self._last)

    def _write(self, deadline: float) -> None:
        if self._page is not None:
            struct.pack_into(_FORMAT, self._page, 0, deadline)


def watch(fd: int, pid: int, trace_path: str) -> None:
    """The watchdog's own loop: until the rank is gone, or has been ended for want of progress."""
    page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
    grace, woke = 0.0, time.monotonic()
    while os.getppid() == pid:
        time.sleep(POLL_S)
        now = time.monotonic()
        # Time in which this process did not run, the rank may not have run either.
        grace = grace + (now - woke - POLL_S) if now - woke > 2 * POLL_S else grace
        woke = now
        (deadline,) = struct.unpack_from(_FORMAT, page, 0)
        if not deadline or now < deadline:
            grace = 0.0
        elif now > deadline + grace:
            _end(pid, trace_path)
            return


def _end(pid: int, trace_path: str) -> None:
    try:
        os.kill(pid, STACK_SIGNAL)  # its stack goes to its own log
        time.sleep(POLL_S)
        if trace_path:
            reason = "no progress of its own: ended by its watchdog"
            event = {"time": time.time(), "event": "died", "reason": reason}
            event |= dict(zip(("replica", "position"), _who(trace_path), strict=True))
            with open(trace_path, "a") as trace:
                trace.write(json.dumps(event) + "\n")
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _who(trace_path: str) -> tuple[int, int]:
    """Replica and position from the trace's name, `trace.rR.pP.jsonl`."""
    _, replica, position, _ = os.path.basename(trace_path).split(".")
    return int(replica[1:]), int(position[1:])


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
