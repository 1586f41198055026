"""The folder in which a host's witness and the ranks on that host tell each other things.

One per host and job, made by the witness in the host's own temporary folder (mode 0700). Whoever
writes a file does it atomically; nobody waits for the other.

    ranks/PID   this rank has started, and when, in the kernel's ticks (the rank)
    dead        lines `HOST` or `HOST PID`: proven dead, elsewhere too (the witness)
    silent      lines `HOST`: not heard of for long, dead or not (the witness)
    addresses   lines `HOST ADDRESS`, all of each host (the witness)
    fenced      lines `HOST`: shut out, whatever it may still send (the ranks, after a repair)
    no_quorum   this host's ranks had to leave, being no majority (the ranks)
    done        the job's exit code, once it is certain (the ranks; elsewhere the witness)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from recover_megatron.trace import write_atomically

FOLDER = "RECOVER_HOST_FOLDER"  # environment variables that the witness sets for its ranks
HOST = "RECOVER_HOST_NAME"
WITNESS_PID = "RECOVER_WITNESS_PID"


class HostFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)

    def environment(self, host: str) -> dict[str, str]:
        """For the run-time on this host, and so for its ranks; the caller is the host's witness."""
        temporary = self.path / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            FOLDER: str(self.path),
            HOST: host,
            WITNESS_PID: str(os.getpid()),
            "TMPDIR": str(temporary),  # what the run-time leaves behind goes with the folder
        }

    def write(self, name: str, text: str = "") -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, text)

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def lines(self, name: str) -> frozenset[str]:
        """Empty if the file is not there."""
        try:
            return frozenset((self.path / name).read_text().splitlines())
        except FileNotFoundError:
            return frozenset()

    def write_lines(self, name: str, lines: Iterable[str]) -> None:
        self.write(name, "".join(f"{line}\n" for line in sorted(lines)))

    def ranks(self) -> dict[int, str]:
        """The processes that have said that they are ranks of this host, and when each started."""
        found = [p for p in (self.path / "ranks").glob("*") if p.name.isdigit()]
        return {int(p.name): p.read_text().strip() or "?" for p in found}
