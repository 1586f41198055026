"""What the paper's experiments share: where a result was measured, and how it is kept.

Each experiment writes OUT/NAME/summary.json and CSVs beside it; page.py makes the page of what is
there, so that one can be measured again without the others.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PUBLISHED = Path(os.environ.get("RECOVER_PAPER_CSV", "../shared/paper"))


def provenance() -> dict[str, str]:
    """Date, machine and commit of a measurement."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607
        capture_output=True,
        text=True,
    ).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} cores ({_processor()}), {memory:.0f} GiB, no GPU"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "commit": commit or "unknown"}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**summary, **provenance()}, indent=1)
    (folder / "summary.json").write_text(text + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def published(name: str) -> list[dict[str, str]]:
    """The rows of one of the paper's tables; empty where the tables are not at hand."""
    path = PUBLISHED / f"{name}.csv"
    return read_csv(path) if path.is_file() else []
