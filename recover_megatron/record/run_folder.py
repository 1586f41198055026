"""The run folder that the user names: a fresh one for each run, and the newest run in it."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from recover_megatron.console import say
from recover_megatron.errors import ConfigError

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
