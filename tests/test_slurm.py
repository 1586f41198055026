"""`launch --slurm`: the batch script, and jobs on a real Slurm of four nodes that lose a rank and a
node. The oracle is plain Megatron without recovery."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from recover_megatron import cli
from recover_megatron.events import Started
from recover_megatron.launch import slurm
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import max_difference, read_log
from recover_megatron.record.run_record import RunRecord
from recover_megatron.session.exits import EXIT_STOPPED, EXIT_TOO_FEW
from recover_megatron.testing.rehearsal import Rehearsal, environment, run_job
from recover_megatron.testing.rig import Rig
from recover_megatron.testing.slurm_rig import Slurm, slurm_missing
from recover_megatron.trace import read_traces

LOSS_LIMIT = 1e-5
real = [
    pytest.mark.mpi,
    pytest.mark.timeout(400),
    pytest.mark.skipif(slurm_missing() is not None, reason=str(slurm_missing())),
]


def test_the_batch_script_outlives_nodes_and_ends_with_a_checkpoint(
    capsys, data_prefix, monkeypatch
):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    job = Rehearsal(data_prefix, 4, 8, pp=2)
    words = ["launch", "--slurm", "--nodes", "4", "--sbatch=--partition=gpu", "--replicas", "4"]
    assert cli.main([*words, "--dry-run", "--", job.script, *job.flags, "--recover"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = {line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH")}
    assert {"--no-kill", "--requeue", "--signal=B:TERM@300", "--nodes=4"} <= options
    assert "--partition=gpu" in options
    assert lines[-1].startswith(f"exec {sys.executable} -m recover_megatron.cli launch --slurm")


def test_outside_an_allocation_the_size_must_be_said(capsys, data_prefix, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    job = Rehearsal(data_prefix, 4, 8)
    command = ["launch", "--slurm", "--replicas", "2", "--", job.script, *job.flags, "--recover"]
    assert cli.main(command) == 2
    assert "say how large, --nodes N" in capsys.readouterr().err


def test_the_allocations_nodes_are_the_hosts(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "n1\\nn2\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert slurm.hosts_of_allocation() == "n1,n2"


@pytest.fixture
def cluster():
    """Four nodes and a controller, in a folder of a short name: sockets in its hosts' temporary
    folders must fit."""
    with tempfile.TemporaryDirectory(prefix="rig") as name:
        folder = Path(name)
        with Rig(folder / "rig", 5) as rig, Slurm(rig, folder / "slurm") as running:
            yield rig, running


class Job:
    """Submitted on the controller by `launch --slurm`."""

    def __init__(self, rig: Rig, running: Slurm, job: Rehearsal, folder: Path, *flags: str):
        self.slurm, self.run, self._ask_at = running, folder / "run", 0.0
        words = ("--recover-bucket-mb", "0.05", "--recover-check-replicas-interval", "5", *flags)
        command = job.recover(4, self.run, *words)
        at = command.index("--replicas")
        command[at:at] = ["--slurm", "--nodes", "4"]
        env = {**environment(), **running.environment}
        env.pop("SLURM_JOB_ID", None)
        done = subprocess.run(
            rig.command(running.controller, command), env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.split("Slurm job ")[1].partition(";")[0]

    @property
    def output(self) -> str:
        log = self.run / f"slurm-{self.number}.log"
        return log.read_text() if log.exists() else "no output"

    @property
    def state(self) -> str:
        return self.slurm.state(self.number)

    @property
    def iteration(self) -> int:
        return RunRecord.read(self.run).iteration

    def until(self, condition, what: str, limit_s: float = 150) -> None:
        limit = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < limit, f"no {what} in {limit_s} s\n{self.output}"
            time.sleep(0.1)

    def starts_again(self, run: Path) -> bool:
        """Slurm would wait for two minutes. It is asked not to, five seconds after the requeue: at
        once, it starts the job before the nodes are done with it, and that fails."""
        if self.state == "PENDING":
            self._ask_at = self._ask_at or time.monotonic() + 5
            if time.monotonic() > self._ask_at:
                self._ask_at = 0.0
                with contextlib.suppress(RuntimeError):  # not completely requeued yet
                    self.slurm("scontrol", "update", f"jobid={self.number}", "starttime=now")
        return run.exists()

    def ends(self, run: Path | None = None) -> str:
        self.until(((run or self.run) / "exit_code").exists, "end")
        self.until(lambda: self.state not in ("RUNNING", "COMPLETING"), "end of job")
        return self.state


@pytest.fixture(scope="module")
def reference(data_prefix, tmp_path_factory):
    """The job, and its log by plain Megatron."""
    job, log = Rehearsal(data_prefix, 40, 8), tmp_path_factory.mktemp("plain") / "log"
    assert run_job(job.plain(), log) == 0, log.read_text()
    return job, read_log(log)


class TestRealSlurm:
    pytestmark = real

    def test_a_rank_is_killed_and_a_node_is_taken_down(self, cluster, reference, tmp_path):
        rig, running = cluster
        job, plain = reference
        started = Job(rig, running, job, tmp_path)
        started.until(lambda: started.iteration >= 5, "iteration 5")
        pids = {e.replica: e.pid for e in read_traces(started.run) if isinstance(e, Started)}
        rig.kill_process("h1", pids[1])
        started.until(lambda: started.iteration >= 15, "iteration 15")
        running("scontrol", "update", "nodename=h2", "state=down", "reason=test")
        assert started.ends() == "COMPLETED", started.output
        record = AuditedRun(started.run)
        assert (started.run / "exit_code").read_text().strip() == "0"
        assert record.survivors == [0, 3], started.output
        assert record.violations(job.iterations, job.microbatches) == []
        assert max_difference(record.losses, plain.losses) <= LOSS_LIMIT

    def test_the_first_node_is_lost_and_another_ends_the_job(self, cluster, reference, tmp_path):
        """With it the batch script, the launcher and mpirun."""
        rig, running = cluster
        job, plain = reference
        started = Job(rig, running, job, tmp_path)
        started.until(lambda: started.iteration >= 5, "iteration 5")
        rig.kill("h0")
        assert started.ends() == "CANCELLED", started.output  # by the other nodes, at the end
        record = AuditedRun(started.run)
        assert (started.run / "exit_code").read_text().strip() == "0"
        assert record.survivors == [1, 2, 3], started.output
        assert record.violations(job.iterations, job.microbatches) == []
        assert max_difference(record.losses, plain.losses) <= LOSS_LIMIT

    def test_with_too_few_replicas_it_is_requeued_and_resumes(self, cluster, reference, tmp_path):
        rig, running = cluster
        job, plain = reference
        save = str(tmp_path / "checkpoint")
        flags = ("--save", save, "--load", save, "--recover-min-replicas", "4")
        requeue = ("--recover-restart-command", "scontrol requeue $SLURM_JOB_ID")
        started = Job(rig, running, job, tmp_path, *flags, *requeue)
        started.until(lambda: started.iteration >= 5, "iteration 5")
        pids = {e.replica: e.pid for e in read_traces(started.run) if isinstance(e, Started)}
        rig.kill_process("h1", pids[1])
        again = started.run / "restart-1"
        started.until(lambda: started.starts_again(again), "requeued job")
        assert started.ends(again) == "COMPLETED", started.output
        assert (started.run / "exit_code").read_text().strip() == str(EXIT_TOO_FEW)
        first, second = AuditedRun(started.run), AuditedRun(again)
        assert min(second.commits) == max(first.commits) + 1
        assert second.survivors == [0, 1, 2, 3]
        assert max_difference(first.losses | second.losses, plain.losses) <= LOSS_LIMIT

    def test_a_signal_before_the_time_limit_ends_with_a_checkpoint(
        self, cluster, data_prefix, tmp_path
    ):
        rig, running = cluster
        save = tmp_path / "checkpoint"
        job = Rehearsal(data_prefix, 4000, 8)
        started = Job(rig, running, job, tmp_path, "--save", str(save), "--save-interval", "9999")
        started.until(lambda: started.iteration >= 3, "iteration 3")
        running("scancel", "--batch", "--signal=TERM", started.number)
        state = started.ends()
        assert (started.run / "exit_code").read_text().strip() == str(EXIT_STOPPED)
        assert state == "FAILED"  # Slurm's word for a code that is not 0
        saved = int((save / "latest_checkpointed_iteration.txt").read_text())
        assert saved == max(AuditedRun(started.run).commits)


@pytest.mark.parametrize(
    "script", sorted((Path(__file__).parent.parent / "scripts" / "slurm").glob("*")), ids=str
)
def test_slurm_reads_all_options_of_our_batch_scripts(script: Path):
    """It stops at the first command."""
    lines = script.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    words = {w for line in lines[:first] if line.startswith("#SBATCH") for w in line.split()[1:]}
    assert {o for o in slurm.OPTIONS if o.startswith(("--no-kill", "--signal"))} <= words
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
