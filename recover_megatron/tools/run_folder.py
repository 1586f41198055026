"""A job's two folders: the run folder that the user names, and a temporary one of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from recover_megatron.collectives.watchdog import adopt_orphans
from recover_megatron.console import say
from recover_megatron.errors import ConfigError
from recover_megatron.trace import JOB_FOLDER

_MARKS = ("trace.r*.jsonl", "log.r*.txt", "exit_code")


def fresh_run_folder(asked: Path) -> Path:
    """`asked`, made; or, if it holds an earlier run, the first free `asked/restart-N`: two runs in
    one folder could not be told apart, and nothing of the earlier one may be lost.

    Raises ConfigError for a folder that cannot be made or written.
    """
    try:
        restarts = (_restart(asked, number) for number in itertools.count(1))
        folder = next(f for f in itertools.chain([asked], restarts) if not holds_run(f))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"--recover-trace-dir {asked}: cannot be written ({error}); name another folder"
        ) from None


def newest_run(folder: Path) -> Path:
    """The run in `folder` that began last: itself, or its last `restart-N`, which is said. Numbers
    may be missing: Slurm counts restarts that came to nothing, too."""
    numbers = (path.name.removeprefix("restart-") for path in folder.glob("restart-*"))
    restarts = [_restart(folder, int(n)) for n in numbers if n.isdigit()]
    held = sorted(filter(holds_run, restarts), key=lambda path: int(path.name[8:]))
    if not held:
        return folder
    say(f"the last run in {folder} is {held[-1]}")
    return held[-1]


def holds_run(folder: Path) -> bool:
    return any(next(folder.glob(mark), None) is not None for mark in _MARKS)


def _restart(folder: Path, number: int) -> Path:
    return folder / f"restart-{number}"


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
