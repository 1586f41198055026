"""`recover-megatron launch`: its flags; plan.py decides what they mean, start.py does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from recover_megatron.launch import slurm
from recover_megatron.launch.host_job import REMOTE_SHELL
from recover_megatron.launch.plan import Submission, make_plan
from recover_megatron.launch.start import start
from recover_megatron.session.job import Job


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
    parser.add_argument("--dry-run", action="store_true", help="print the plan, start nothing")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="-- SCRIPT FLAGS", help="what to run"
    )


def run(args: argparse.Namespace, read_script: Callable[[Sequence[str]], Job]) -> int:
    """The exit code. `read_script` as in plan.make_plan."""
    plan = make_plan(args, read_script)
    if args.dry_run:
        print(plan)
        return 0
    if isinstance(plan, Submission):
        number = slurm.submit(str(plan) + "\n", plan.run_dir)
        print(f"submitted Slurm job {number}; its output: {plan.run_dir}/slurm-{number}.log")
        return 0
    return start(plan)
