"""The watchdog: each rank's parent process. However the rank ends, it makes the others notice.

Open MPI tells the other ranks of a death by SIGKILL at once, but of a process that ends by itself
(os._exit, sys.exit, a crash in a library) not for minutes. So the rank runs in a child process,
and the watchdog, whose own end is what mpirun and the peers see,

* passes on an orderly end, which the rank has announced with `leaves`;
* turns every other end of the rank into SIGKILL to itself;
* ends a rank that makes no progress: also one that holds Python's lock, or that is stopped as a
  whole (SIGSTOP), which a thread of the rank could not do;
* ends what the rank has started when the rank is gone (Megatron's checkpoint writer is a process of
  200 MB in each rank, which would stay for ever).

If the watchdog itself is killed, the kernel kills the rank.

The rank writes the moments until which the next signs of progress must come into a shared page, one
for each thing that is watched; zero means that none is expected.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import glob
import math
import mmap
import os
import select
import signal
import struct
import sys
import time
from typing import NoReturn

from recover_megatron.events import Died, to_line

NAME = "rank-watchdog"  # as `ps -o comm` shows it
POLL_S = 0.2
STACK_LIMIT_S = 3.0
STACK_SIGNAL = signal.SIGUSR2  # faulthandler answers without Python's lock
# What is watched, as it is named when it ends the rank. The second ends a rank that hangs inside
# Open MPI (docs/log.md), for which mpirun would wait.
_WATCHED = (
    "no progress of its own",
    "its engine thread does not run: stuck in a call of Open MPI, or Python's lock is held",
)
_OWN, _ENGINE = range(len(_WATCHED))
_FORMAT = f"{len(_WATCHED)}d"
# The places behind them: 1 + the exit code of an orderly end; 1 if the rank has traced why it dies.
_LEAVES, _SAID = len(_WATCHED), len(_WATCHED) + 1
# Linux's prctl(2).
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_LIBC = ctypes.CDLL(None)
# What may be sent to the rank's parent is meant for the rank.
_PASSED_ON = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "CONT", "ALRM")
MPI_LIMIT_S = 30.0
# Until the first iteration has been computed: imports from a slow file system hold Python's lock.
START_LIMIT_S = 300.0


class Watchdog:
    """The rank's side; used by the training thread, but for `engine_runs` and `engine_rests`.

    Making one forks: the caller goes on as the child, and the process that it was becomes its
    watchdog. So it is made before MPI is started and before torch is imported, while the process is
    small and has one thread. The caller must end with `leaves(code)` and `os._exit(code)`.

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
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the child
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent, child = os.getpid(), os.fork()
        if child:
            _watch_and_end(self._page, child, trace_path or "")
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        faulthandler.enable()  # or Open MPI's own handler would hold a crashed rank for a minute
        faulthandler.register(STACK_SIGNAL, all_threads=True, chain=False)

    def leaves(self, code: int) -> None:
        """The whole world has agreed on this rank's end: what follows is no failure."""
        self._write(_LEAVES, 1.0 + code)

    def last_words(self) -> None:
        """The rank has traced why it is about to die. Any thread may call it."""
        self._write(_SAID, 1.0)

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

    def engine_runs(self, times: int = 1) -> None:
        """By the engine thread; again within `times` MPI_LIMIT_S (START_LIMIT_S at first)."""
        limit_s = MPI_LIMIT_S if self._settled else START_LIMIT_S
        self._write(_ENGINE, time.monotonic() + times * limit_s)

    def engine_rests(self) -> None:
        """By the engine thread: no sign of life is expected until the next one."""
        self._write(_ENGINE, 0.0)

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


def _prctl(option: int, value: object) -> None:
    """Linux's prctl(2) for this process; where it fails, nothing is lost but a convenience."""
    _LIBC.prctl(option, value, 0, 0, 0)


def end_with_parent(number: int) -> None:
    """The kernel sends this process the signal `number` when its parent has ended. Does nothing but
    ask the kernel, so it may be called between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Descendants of this process whose parents have ended become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _watch_and_end(page: mmap.mmap, rank: int, trace_path: str) -> NoReturn:
    """The watchdog's own part: never returns into the rank's code, whatever happens."""
    try:
        _prctl(_PR_SET_NAME, NAME.encode())
        adopt_orphans()
        for name in _PASSED_ON:
            signal.signal(getattr(signal, f"SIG{name}"), lambda number, _: _send(rank, number))
        watch(page, rank, trace_path)
        end_children()
        leaves, _ = _ends(page)
        if leaves:
            os._exit(int(leaves) - 1)
    finally:
        _send(rank, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def watch(page: mmap.mmap, rank: int, trace_path: str) -> None:
    """Until the rank has ended, by itself or for want of progress."""
    known = struct.unpack_from(_FORMAT, page, 0)
    grace, woke = [0.0] * len(_WATCHED), time.monotonic()
    ended = select.poll()
    ended.register(os.pidfd_open(rank), select.POLLIN)
    while not ended.poll(1000 * POLL_S):
        now = time.monotonic()
        # Time in which this process did not run, the rank may not have run either.
        missed = now - woke - POLL_S if now - woke > 2 * POLL_S else 0.0
        woke = now
        deadlines = struct.unpack_from(_FORMAT, page, 0)
        for what, deadline in enumerate(deadlines):
            grace[what] = grace[what] + missed if deadline == known[what] else 0.0
            if deadline and now > deadline + grace[what]:
                _end(rank, trace_path, _WATCHED[what])
                return
        known = deadlines
        _reap(but=rank)
    _tell(trace_path, page, rank)


def _ends(page: mmap.mmap) -> tuple[float, float]:
    """_LEAVES and _SAID."""
    leaves, said = struct.unpack_from("2d", page, _LEAVES * struct.calcsize("d"))
    return leaves, said


def _tell(trace_path: str, page: mmap.mmap, rank: int) -> None:
    """The last words of a rank that had none: how it ended, in its trace."""
    status = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if any(_ends(page)) or status is None:
        return
    if status.si_code == os.CLD_EXITED:
        _trace_death(trace_path, f"its process ended by itself, with code {status.si_status}")
    else:
        _trace_death(trace_path, f"killed by {signal.Signals(status.si_status).name}")


def _reap(but: int) -> None:
    """Adopted processes that have ended, but not the rank: its status is asked for later."""
    for child in _children(os.getpid()):
        if child != but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def end_children() -> None:
    """SIGKILL to all descendants of this process, which has called `adopt_orphans`: those of a
    process that ends become its children."""
    for _ in range(1000):
        children = _children(os.getpid())
        for child in children:
            _send(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        if not children:
            return


def _children(pid: int) -> list[int]:
    tasks = glob.glob(f"/proc/{pid}/task/*/children")
    return [int(child) for task in tasks for child in _read(task).split()]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _end(pid: int, trace_path: str, why: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        _ask_for_stack(pid, trace_path)
    _trace_death(trace_path, f"{why}: ended by its watchdog")
    _send(pid, signal.SIGKILL)


def _trace_death(trace_path: str, reason: str) -> None:
    if not trace_path:
        return
    replica, position = _who(trace_path)
    event = Died(time=time.time(), replica=replica, position=position, reason=reason)
    with contextlib.suppress(OSError), open(trace_path, "a") as trace:
        trace.write(to_line(event))


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
