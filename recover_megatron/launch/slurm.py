"""Slurm: the hosts of an allocation, what starts a command on one of them, and the batch script
that `launch --slurm` submits where there is no allocation yet.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recover_megatron.errors import ConfigError

# One step a host isolates the hosts from each other; --no-kill: Slurm itself must not end a step,
# or the job, for a lost node (docs/ulfm.md).
REMOTE_SHELL = (
    "srun --overlap --no-kill --kill-on-bad-exit=0 --mpi=none --export=ALL --cpu-bind=none "
    "-N1 -n1 -w {host} sh -c"
)
# Slurm must neither end the job for a lost node (--no-kill) nor kill it at its time limit before a
# checkpoint is saved (--signal: SIGTERM to the launcher, which is the batch script's own process).
OPTIONS = (
    "--no-kill",
    "--requeue",
    "--exclusive",
    "--signal=B:TERM@300",
    "--open-mode=append",
    "--ntasks-per-node=1",
)


def in_allocation() -> bool:
    return job_number() is not None


def job_number() -> str | None:
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")


def hosts_of_allocation() -> str:
    """For --hosts: the allocation's nodes, in Slurm's order."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S607  Slurm's own
    except OSError as error:
        raise ConfigError(f"--slurm: cannot run scontrol: {error}") from None
    names = done.stdout.split()
    if done.returncode or not names:
        raise ConfigError(f"--slurm: scontrol cannot tell the nodes of {nodes!r}: {done.stderr}")
    return ",".join(names)


def run_folder(folder: str) -> str:
    """A requeued job starts again with the same words; its traces go to a folder of their own."""
    times = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return f"{folder}/restart-{times}" if times else folder


def end_of_job() -> list[str]:
    """What ends this allocation, where the batch script's own end cannot."""
    return ["scancel", str(job_number())]


def submit(batch: str, run_dir: Path) -> str:
    """Write a batch script to RUN_DIR/job.sbatch and submit it; the job's number."""
    if shutil.which("sbatch") is None:
        raise ConfigError("--slurm: there is no sbatch here; run it where jobs are submitted")
    run_dir.mkdir(parents=True, exist_ok=True)
    script = run_dir / "job.sbatch"
    script.write_text(batch, encoding="utf-8")
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S607
    if done.returncode:
        raise ConfigError(f"--slurm: sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip()


def batch_script(nodes: int, more: Sequence[str], words: Sequence[str], run_dir: Path) -> str:
    """`exec`, so that Slurm's signals reach the launcher and not a shell."""
    options = [*OPTIONS, f"--nodes={nodes}", f"--output={run_dir.resolve()}/slurm-%j.log", *more]
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in options)]
    command = [sys.executable, "-m", "recover_megatron.cli", *words]
    lines += [f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)}", ""]
    return "\n".join(lines)


def _quoted(option: str) -> str:
    """As sbatch reads it: blanks in a value stand in quotes."""
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else option
