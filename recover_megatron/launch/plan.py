"""What `recover-megatron launch` is about to do, as a value: printed by --dry-run, tested as such.

Making a plan starts nothing and changes nothing. Everything that is wrong with the command line is
said here, as a ConfigError.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.errors import ConfigError
from recover_megatron.launch import slurm
from recover_megatron.launch.host_job import REMOTE_SHELL, Host, parse_hosts, placement
from recover_megatron.launch.model_size import ModelSize, model_size
from recover_megatron.launch.mpirun import mpirun_command
from recover_megatron.launch.run_config import RunConfig, check_flags, load
from recover_megatron.session.arguments import TRACE_FLAG, take_flag
from recover_megatron.session.job import Job
from recover_megatron.world import ReplicaLayout


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A job to start here.

    Attributes:
        job: Its shape.
        layout: Its replicas.
        script: The training script and its flags.
        run_dir: The folder that the user names; a fresh one inside if it holds an earlier run.
        hosts: Where its ranks go; empty for this machine alone.
        spare_hosts: How many of the hosts stay idle.
        remote_shell: What starts a command line on `{host}`.
        environment: Variables that the config sets, unless the user has.
        forward: Variables that ranks on other hosts get, too.
        report_stall_s: After so many seconds without progress it is said who is waited for.
        size: Of the model, where the config tells.
    """

    job: Job
    layout: ReplicaLayout
    script: tuple[str, ...]
    run_dir: Path
    hosts: tuple[Host, ...] = ()
    spare_hosts: int = 0
    remote_shell: str = REMOTE_SHELL
    environment: tuple[tuple[str, str], ...] = ()
    forward: tuple[str, ...] = ()
    report_stall_s: float = 120.0
    size: ModelSize | None = None

    def command(self, more: Sequence[str] = ()) -> list[str]:
        """The words of the mpirun line; `more` are for other hosts."""
        return mpirun_command(self.job, self.layout.replicas, self.script, more)

    @property
    def placement(self) -> str:
        """Which replica goes where, a line a host."""
        return placement(self.hosts, self.layout.replicas, self.layout.ranks_per_replica)

    def __str__(self) -> str:
        lines = [shlex.join(self.command())]
        if self.hosts:
            lines.append(self.placement)
        lines.append(
            f"# {self.layout.replicas} replicas x {self.layout.ranks_per_replica} ranks; "
            f"B = {self.job.microbatches} microbatches of {self.job.samples_per_microbatch} "
            f"samples; run folder {self.run_dir}"
        )
        if self.size is not None:
            lines.append(f"# {self.size}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A Slurm job to submit, which starts the training job on `nodes` nodes of its own. `words` are
    recover-megatron's there."""

    nodes: int
    options: tuple[str, ...]
    words: tuple[str, ...]
    run_dir: Path

    def __str__(self) -> str:
        return slurm.batch_script(self.nodes, self.options, self.words, self.run_dir).rstrip()


def make_plan(
    args: argparse.Namespace, read_script: Callable[[Sequence[str]], Job]
) -> LaunchPlan | Submission:
    """`args` are those of `launch`. `read_script` reads the job's shape from a script and its
    flags, as its framework means them. Raises ConfigError."""
    words = args.script[1:] if args.script[:1] == ["--"] else args.script
    config = _config(args, words)
    script, trace_dir = _with_trace_dir(config.words if config else words, args.slurm)
    job = read_script(script)
    replicas = _replicas(args, config, job)
    layout = job.layout(replicas * job.ranks_per_replica)
    _check_slurm_flags(args)
    environment = tuple(config.environment.items()) if config else ()
    forward = (*args.forward, *(name for name, _ in environment))
    if args.slurm and not slurm.in_allocation():
        return _submission(args, replicas, script, forward)
    named, remote_shell = args.hosts or (config.hosts if config else None), args.remote_shell
    if args.slurm:
        named = named or slurm.hosts_of_allocation()
        remote_shell = slurm.REMOTE_SHELL if remote_shell == REMOTE_SHELL else remote_shell
    hosts: tuple[Host, ...] = ()
    if named:
        hosts = parse_hosts(named, replicas, job.ranks_per_replica, args.spare_hosts)
    return LaunchPlan(
        job=job,
        layout=layout,
        script=tuple(script),
        run_dir=Path(trace_dir),
        hosts=hosts,
        spare_hosts=args.spare_hosts,
        remote_shell=remote_shell,
        environment=environment,
        forward=forward,
        report_stall_s=args.report_stall,
        size=model_size(config.flags) if config else None,
    )


def _replicas(args: argparse.Namespace, config: RunConfig | None, job: Job) -> int:
    asked = args.replicas
    if asked is None and config is not None:
        asked = config.replicas
    replicas = _replicas_for_gpus(job) if asked is None else int(asked)
    if replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, got {replicas}")
    return replicas


def _check_slurm_flags(args: argparse.Namespace) -> None:
    """What would have no effect is refused."""
    inside = slurm.in_allocation()
    if args.slurm and inside and (args.nodes is not None or args.sbatch):
        raise ConfigError(
            f"--nodes and --sbatch are for a job to submit, but this is inside Slurm job "
            f"{slurm.job_number()}, whose nodes are used; leave them out"
        )
    if args.slurm and not inside and args.hosts:
        raise ConfigError(
            "--hosts names nodes of an allocation, and there is none yet; leave it out, or choose "
            "the nodes with --sbatch=--nodelist=..."
        )
    if not args.slurm and (args.nodes is not None or args.sbatch):
        raise ConfigError("--nodes and --sbatch go with --slurm")


def _submission(
    args: argparse.Namespace, replicas: int, script: Sequence[str], forward: Sequence[str]
) -> Submission:
    if args.nodes is None or args.nodes < 1:
        raise ConfigError("--slurm outside an allocation submits a job: say how large, --nodes N")
    words = ["launch", "--slurm", "--replicas", str(replicas)]
    words += ["--spare-hosts", str(args.spare_hosts)] if args.spare_hosts else []
    words += [word for name in forward for word in ("--forward", name)]
    words += ["--report-stall", str(args.report_stall), "--", *script]
    folder, _ = take_flag(script, TRACE_FLAG)
    return Submission(
        nodes=args.nodes,
        options=tuple(args.sbatch),
        words=tuple(words),
        run_dir=Path(folder or "."),
    )


def _config(args: argparse.Namespace, script: Sequence[str]) -> RunConfig | None:
    """The run of `--config`; its keys count where the launcher's own flags are not given."""
    if args.config is None:
        if args.set:
            raise ConfigError("--set changes a --config FILE, and there is none")
        return None
    if script:
        raise ConfigError(f"give --config or a script, not both: {script[0]}")
    config = load(args.config, args.set)
    if not Path(config.script).is_file():
        raise ConfigError(
            f"--config {args.config}: there is no script {config.script} here; run it in the "
            "Megatron-LM checkout, or --set script=/path/to/pretrain_gpt.py"
        )
    check_flags(config)
    return config


def _with_trace_dir(script: Sequence[str], in_slurm: bool) -> tuple[list[str], str]:
    """Every launched job has a run folder; one is named after the script and time if need be."""
    folder, words = take_flag(script, TRACE_FLAG)
    if folder is None:
        name = Path(script[0]).stem if script else "job"
        folder = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    elif in_slurm:
        folder = slurm.run_folder(folder)
    return [*words, TRACE_FLAG, folder], folder


def _replicas_for_gpus(job: Job) -> int:
    import torch

    gpus = torch.cuda.device_count()
    if gpus < job.ranks_per_replica:
        raise ConfigError(
            f"this machine has {gpus} GPUs, fewer than one replica's {job.ranks_per_replica} "
            "ranks; say how many replicas to start with --replicas R"
        )
    return gpus // job.ranks_per_replica
