"""A fixed share of a core for each rank, as every rank has a GPU of its own on a cluster.

Many ranks on few cores share them, so a rank that dies would make the others faster, which no GPU
does. A control group for each rank (Linux, root) takes that away: its training thread gets its
share and no more. Other threads, such as gloo's and the watcher's, are the host's work, not the
GPU's, and are not limited.
"""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

from recover_megatron.testing.rehearsal import descendants

ROOT = Path("/sys/fs/cgroup/cpu")  # version 1, which groups threads
PERIOD_US = 20_000
RANKS = ("OMPI_COMM_WORLD_RANK", "RANK")


def missing() -> str | None:
    """Why there can be no fixed shares here; None if there can."""
    if os.geteuid() != 0:
        return "control groups need root"
    return None if (ROOT / "cpu.cfs_quota_us").exists() else f"no control groups in {ROOT}"


class Devices(AbstractContextManager["Devices"]):
    """`share` of one core for each rank of the jobs that this process starts. Does nothing where
    `missing()`."""

    def __init__(self, share: float):
        self.share = share
        self._groups: dict[str, Path] = {}

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            for _try in range(100):  # a process that was killed leaves its group a moment later
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.05)

    def place(self) -> None:
        """The training thread of every rank that runs now into its group. Called once a job has
        done its first iteration: starting is not slowed down."""
        if missing():
            return
        for rank, pid in _processes().items():
            with contextlib.suppress(OSError):  # it has just ended
                (self._group(rank) / "tasks").write_text(str(pid))

    def _group(self, rank: str) -> Path:
        if rank not in self._groups:
            group = ROOT / f"recover-{os.getpid()}-{rank}"
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(self.share * PERIOD_US)))
            self._groups[rank] = group
        return self._groups[rank]


def process_of(rank: int) -> int:
    """The process of a rank of the job that runs now, started by this process."""
    return _processes()[str(rank)]


def _processes() -> dict[str, int]:
    """By rank; of a rank's processes the first: its helpers were started later."""
    found: dict[str, int] = {}
    for pid in descendants(os.getpid()):
        rank = _rank(pid)
        if rank is not None:
            found.setdefault(rank, pid)
    return found


def _rank(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
    return next((found[name] for name in RANKS if name in found), None)
