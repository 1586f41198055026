"""`recover-megatron launch`: works out the ranks and hosts, and runs the job (mpirun.py).

Everything that is wrong with the command line is said before mpirun starts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.console import say
from recover_megatron.errors import ConfigError
from recover_megatron.launch import slurm
from recover_megatron.launch.host_job import (
    REMOTE_SHELL,
    Host,
    HostJob,
    parse_hosts,
    placement,
    without_spares,
)
from recover_megatron.launch.job_folder import JobFolder
from recover_megatron.launch.model_size import model_size
from recover_megatron.launch.mpirun import mpirun_command, run_mpirun, wait_for_mpirun
from recover_megatron.launch.run_config import RunConfig, check_flags, load
from recover_megatron.launch.stall import StallReport
from recover_megatron.launch.start_watch import StartWatch, put_aside
from recover_megatron.launch.verdict import exit_code
from recover_megatron.record.run_folder import fresh_run_folder
from recover_megatron.record.run_record import has_committed
from recover_megatron.session.arguments import TRACE_FLAG, take_flag
from recover_megatron.session.exits import EXIT_NOBODY, EXIT_TOO_FEW
from recover_megatron.session.job import Job
from recover_megatron.world import ReplicaLayout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a run as YAML (configs/) instead of -- SCRIPT"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key or flag of the config; may be repeated",
    )
    parser.add_argument(
        "--replicas", type=int, help="default: as many as this machine's GPUs allow"
    )
    parser.add_argument(
        "--hosts",
        help="NAME[:RANKS],... of the hosts to use, this one among them or not; the job then "
        "outlives the loss of any of them (docs/hosts.md); default: this machine alone",
    )
    parser.add_argument(
        "--remote-shell",
        default=REMOTE_SHELL,
        metavar="COMMAND",
        help="what starts a command line on {host} (default: %(default)s)",
    )
    parser.add_argument(
        "--spare-hosts",
        type=int,
        default=0,
        metavar="K",
        help="leave K of the hosts idle: they stand in for hosts that do not answer at the start",
    )
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="in an allocation: use its nodes; elsewhere: submit a job that does (--nodes)",
    )
    parser.add_argument("--nodes", type=int, help="of the Slurm job to submit")
    parser.add_argument(
        "--forward",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable of the environment that ranks on other hosts get, too; may be repeated",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more option of the Slurm job, such as --sbatch=--partition=gpu; may be repeated",
    )
    parser.add_argument(
        "--report-stall",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="say who is waited for when no rank has made progress for so long (default: 120)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the mpirun line, start nothing"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="-- SCRIPT FLAGS", help="what to run"
    )


def run(args: argparse.Namespace, read_script: Callable[[Sequence[str]], Job]) -> int:
    """`read_script` reads the job's shape from a script and its flags, as its framework means
    them."""
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    config = _config(args, script)
    if config is not None:
        script = config.words
    script, trace_dir = _with_trace_dir(script, args.slurm)
    job = read_script(script)
    replicas = args.replicas if args.replicas is not None else _replicas_for_gpus(job)
    if replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, got {replicas}")
    layout = job.layout(replicas * job.ranks_per_replica)
    _check_slurm_flags(args)
    if args.slurm and not slurm.in_allocation():
        return _submit(args, replicas, script, Path(trace_dir))
    if args.slurm:
        args.hosts = args.hosts or slurm.hosts_of_allocation()
        if args.remote_shell == REMOTE_SHELL:
            args.remote_shell = slurm.REMOTE_SHELL
    hosts: tuple[Host, ...] = ()
    if args.hosts:
        hosts = parse_hosts(args.hosts, replicas, job.ranks_per_replica, args.spare_hosts)
        if not args.dry_run:
            hosts = without_spares(hosts, args.spare_hosts, args.remote_shell)
    if args.dry_run:
        print(shlex.join(mpirun_command(job, replicas, script)))
        if hosts:
            print(placement(hosts, replicas, job.ranks_per_replica))
        print(
            f"# {replicas} replicas x {job.ranks_per_replica} ranks; B = {job.microbatches} "
            f"microbatches of {job.samples_per_microbatch} samples; run folder {trace_dir}"
        )
        if config is not None and (size := model_size(config.flags)) is not None:
            print(f"# {size}")
        return 0
    if job.warning:
        say(f"warning: {job.warning}")
    run_dir = fresh_run_folder(Path(trace_dir))
    if run_dir != Path(trace_dir):
        say(f"{trace_dir} holds an earlier run; this one's folder is {run_dir}")
        script = [*script, TRACE_FLAG, str(run_dir)]  # the last one counts
    code = Start(
        job=job,
        replicas=replicas,
        script=script,
        hosts=hosts,
        remote_shell=args.remote_shell,
        run_dir=run_dir,
        forward=tuple(args.forward),
        report_stall=args.report_stall,
    ).run(layout)
    command = job.config.restart_command
    if command and code in (EXIT_NOBODY, EXIT_TOO_FEW):
        return _restart(command, code, run_dir)
    return code


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


def _restart(command: str, code: int, run_dir: Path) -> int:
    """Run --recover-restart-command; its exit code. Not after a job that committed nothing: what
    ended that would end the next one too."""
    if not has_committed(run_dir):
        say("not restarted, since no iteration was committed")
        return code
    say(f"restarting: {command}")
    environment = {"RECOVER_EXIT_CODE": str(code), "RECOVER_RUN_DIR": str(run_dir)}
    try:
        return subprocess.run(_words(command), env=os.environ | environment).returncode
    except OSError as error:
        say(f"{command}: {error}", who="recover-megatron launch: error")
        return code


def _submit(args: argparse.Namespace, replicas: int, script: Sequence[str], run_dir: Path) -> int:
    if args.nodes is None or args.nodes < 1:
        raise ConfigError("--slurm outside an allocation submits a job: say how large, --nodes N")
    words = ["launch", "--slurm", "--replicas", str(replicas)]
    words += ["--spare-hosts", str(args.spare_hosts)] if args.spare_hosts else []
    words += [word for name in args.forward for word in ("--forward", name)]
    words += ["--report-stall", str(args.report_stall), "--", *script]
    if args.dry_run:
        print(slurm.batch_script(args.nodes, args.sbatch, words, run_dir), end="")
        return 0
    number = slurm.submit(args.nodes, args.sbatch, words, run_dir)
    print(f"submitted Slurm job {number}; its output: {run_dir}/slurm-{number}.log")
    return 0


def _config(args: argparse.Namespace, script: Sequence[str]) -> RunConfig | None:
    """The run of `--config`; its other keys stand for the launcher's flags that are not given."""
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
    args.replicas = config.replicas if args.replicas is None else args.replicas
    args.hosts = args.hosts or config.hosts
    for name, value in config.environment.items():
        os.environ.setdefault(name, value)
    args.forward = [*args.forward, *config.environment]
    return config


@dataclass(frozen=True)
class Start:
    """What is started."""

    job: Job
    replicas: int
    script: Sequence[str]
    hosts: Sequence[Host]
    remote_shell: str
    run_dir: Path
    forward: tuple[str, ...]
    report_stall: float

    def run(self, layout: ReplicaLayout) -> int:
        """The job's code. A job of which a rank dies before it has begun is started once more."""
        for number in (1, 2):
            code, failed = self._once(layout)
            if not failed:
                return code
            if number == 1:
                say(f"{failed}; the job is started once more")
                put_aside(self.run_dir, number)
        say(failed, who="recover-megatron launch: error")
        return EXIT_NOBODY

    def _once(self, layout: ReplicaLayout) -> tuple[int, str]:
        """The job's code; and, if it was ended because a rank died before it had begun, which."""
        stall = StallReport(self.run_dir, layout, self.report_stall)
        stall.start()
        try:
            with JobFolder() as folder:
                watch = StartWatch(self.run_dir, layout, folder.path)
                code = self._mpirun(watch, folder)
                watch.stop()
                if watch.failed:
                    return code, watch.failed
                return exit_code(code, self.run_dir / "exit_code", folder.path), ""
        finally:
            stall.stop()

    def _mpirun(self, watch: StartWatch, folder: JobFolder) -> int:
        """mpirun's own code; the job's stands in the run folder."""
        if not self.hosts:
            command = mpirun_command(self.job, self.replicas, self.script)
            environment = os.environ | folder.environment
            wait = watch.beside(wait_for_mpirun)
            return run_mpirun(command, environment, wait, self.run_dir, watch.look_away)
        orphaned = _orphaned(self.job.config.restart_command)
        with HostJob(
            self.hosts, self.run_dir, self.remote_shell, orphaned, self.forward
        ) as host_job:
            print(placement(self.hosts, self.replicas, self.job.ranks_per_replica), file=sys.stderr)
            command = mpirun_command(self.job, self.replicas, self.script, host_job.arguments)
            environment = {**os.environ, **host_job.environment}
            wait = watch.beside(host_job.wait)
            return run_mpirun(command, environment, wait, self.run_dir, watch.look_away)


def _orphaned(restart_command: str) -> dict[str, list[str]]:
    """What another host does after the job's end if this one is lost: as `run` would."""
    words = {"": slurm.end_of_job()} if slurm.in_allocation() else {}
    if restart_command:
        words[str(EXIT_TOO_FEW)] = _words(restart_command)
    return words


def _words(command: str) -> list[str]:
    """A user's command line, with variables of the environment; no shell reads it."""
    return [os.path.expandvars(word) for word in shlex.split(command)]


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
