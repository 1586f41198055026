"""The exit codes of a job, and where its ranks leave them for the launcher. Standard library only.

mpirun's own exit code is 0 even if every rank was killed (docs/ulfm.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from recover_megatron.trace import JOB_FOLDER, write_atomically

EXIT_NOBODY = 1  # no replica reached the end
EXIT_CONFIG = 2
EXIT_UNRECOVERABLE = 3
EXIT_STOPPED = 4
EXIT_TOO_FEW = 5
STOP_SIGNAL = signal.SIGUSR1  # asks a rank to stop after the iteration; mpirun hands it on to all


def write_exit_code(run_dir: str | None, code: int) -> None:
    """By every replica, since any may be killed before it does, into the run folder and into the
    job's temporary one, since either may be full."""
    if run_dir:
        with contextlib.suppress(OSError):
            write_atomically(Path(run_dir) / "exit_code", f"{code}\n")
    leave_in_job_folder("done", f"{code}\n")


def leave_in_job_folder(name: str, text: str) -> None:
    """A file for the launcher on this host; without a launcher, or room, nothing."""
    if folder := os.environ.get(JOB_FOLDER):
        with contextlib.suppress(OSError):
            write_atomically(Path(folder) / name, text)
