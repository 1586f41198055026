"""Carries out a LaunchPlan: runs mpirun to the job's end, and says how it ended."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from recover_megatron.console import say
from recover_megatron.launch import slurm
from recover_megatron.launch.host_job import HostJob, without_spares
from recover_megatron.launch.job_folder import JobFolder
from recover_megatron.launch.mpirun import run_mpirun, wait_for_mpirun
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.stall import StallReport
from recover_megatron.launch.start_watch import StartWatch, put_aside
from recover_megatron.launch.verdict import exit_code
from recover_megatron.record.run_folder import fresh_run_folder
from recover_megatron.record.run_record import has_committed
from recover_megatron.session.arguments import TRACE_FLAG
from recover_megatron.session.exits import EXIT_NOBODY, EXIT_TOO_FEW

_ERROR = "recover-megatron launch: error"


def start(plan: LaunchPlan) -> int:
    """The job's exit code, or that of --recover-restart-command if it was run. Raises ConfigError
    for a run folder that cannot be written, and for hosts that do not answer."""
    if plan.job.warning:
        say(f"warning: {plan.job.warning}")
    for name, value in plan.environment:
        os.environ.setdefault(name, value)
    if plan.spare_hosts:
        chosen = without_spares(plan.hosts, plan.spare_hosts, plan.remote_shell)
        plan = replace(plan, hosts=chosen)
    run_dir = fresh_run_folder(plan.run_dir)
    if run_dir != plan.run_dir:
        say(f"{plan.run_dir} holds an earlier run; this one's folder is {run_dir}")
        script = (*plan.script, TRACE_FLAG, str(run_dir))  # the last one counts
        plan = replace(plan, script=script, run_dir=run_dir)
    code = _run(plan)
    command = plan.job.config.restart_command
    if command and code in (EXIT_NOBODY, EXIT_TOO_FEW):
        return restart(command, code, run_dir)
    return code


def _run(plan: LaunchPlan) -> int:
    """The job's code. A job of which a rank dies before it has begun is started once more."""
    for number in (1, 2):
        code, failed = _run_once(plan)
        if not failed:
            return code
        if number == 1:
            say(f"{failed}; the job is started once more")
            put_aside(plan.run_dir, number)
    say(failed, who=_ERROR)
    return EXIT_NOBODY


def _run_once(plan: LaunchPlan) -> tuple[int, str]:
    """The job's code; and, if it was ended because a rank died before it had begun, which."""
    stall = StallReport(plan.run_dir, plan.layout, plan.report_stall_s)
    stall.start()
    try:
        with JobFolder() as folder:
            watch = StartWatch(plan.run_dir, plan.layout, folder.path)
            code = _mpirun(plan, watch, folder)
            watch.stop()
            if watch.failed:
                return code, watch.failed
            return exit_code(code, plan.run_dir / "exit_code", folder.path), ""
    finally:
        stall.stop()


def _mpirun(plan: LaunchPlan, watch: StartWatch, folder: JobFolder) -> int:
    """mpirun's own code; the job's stands in the run folder."""
    if not plan.hosts:
        environment = os.environ | folder.environment
        wait = watch.beside(wait_for_mpirun)
        return run_mpirun(plan.command(), environment, wait, plan.run_dir, watch.look_away)
    orphaned_words = orphaned(plan.job.config.restart_command)
    with HostJob(
        plan.hosts, plan.run_dir, plan.remote_shell, orphaned_words, plan.forward
    ) as host_job:
        print(plan.placement, file=sys.stderr)
        command = plan.command(host_job.arguments)
        environment = {**os.environ, **host_job.environment}
        wait = watch.beside(host_job.wait)
        return run_mpirun(command, environment, wait, plan.run_dir, watch.look_away)


def restart(command: str, code: int, run_dir: Path) -> int:
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
        say(f"{command}: {error}", who=_ERROR)
        return code


def orphaned(restart_command: str) -> dict[str, list[str]]:
    """What another host does after the job's end if this one is lost, by exit code: as `start`
    would."""
    words = {"": slurm.end_of_job()} if slurm.in_allocation() else {}
    if restart_command:
        words[str(EXIT_TOO_FEW)] = _words(restart_command)
    return words


def _words(command: str) -> list[str]:
    """A user's command line, with variables of the environment; no shell reads it."""
    return [os.path.expandvars(word) for word in shlex.split(command)]
