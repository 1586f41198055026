"""A temporary folder of the job's own, and the end of what the job leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from recover_megatron.collectives.membership.watchdog import adopt_orphans
from recover_megatron.trace import JOB_FOLDER


class JobFolder(contextlib.AbstractContextManager["JobFolder"]):
    """A folder for what the run-time, the ranks and their helpers leave behind; it goes with the
    job, and so do processes of the job that are left."""

    def __enter__(self) -> JobFolder:
        adopt_orphans()
        # Where something still writes into it, the job has not failed for that.
        self._temporary = tempfile.TemporaryDirectory(prefix="recover-", ignore_cleanup_errors=True)
        self.path = Path(self._temporary.name)
        return self

    def __exit__(self, *_: object) -> None:
        end_orphans({JOB_FOLDER: str(self.path)})
        self._temporary.cleanup()

    @property
    def environment(self) -> Mapping[str, str]:
        # But what torch has compiled outlives the job.
        compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)
        folder = str(self.path)
        return {JOB_FOLDER: folder, "TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": kept}


def end_orphans(mark: Mapping[str, str]) -> None:
    """SIGKILL to this process's descendants whose environment holds `mark`."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getpid()).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                found = process.environ()
                if all(found.get(name) == value for name, value in mark.items()):
                    process.send_signal(signal.SIGKILL)
                    process.wait(5)
