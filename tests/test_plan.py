"""What `launch` is about to do, as a value."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from recover_megatron.adapters.megatron.command_line import read_script
from recover_megatron.errors import ConfigError
from recover_megatron.launch import command
from recover_megatron.launch.host_job import REMOTE_SHELL, Host
from recover_megatron.launch.plan import LaunchPlan, Submission, make_plan
from recover_megatron.testing.rehearsal import SCRIPT
from recover_megatron.world import ReplicaLayout

FLAGS = (
    *("--recover", "--micro-batch-size", "1", "--global-batch-size", "12"),
    *("--tensor-model-parallel-size", "2", "--recover-trace-dir", "runs/mine"),
)


def plan(*words: str, script: tuple[str, ...] = (SCRIPT, *FLAGS)) -> LaunchPlan | Submission:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return make_plan(parser.parse_args([*words, *(("--", *script) if script else ())]), read_script)


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_a_plan_for_this_machine():
    made = plan("--replicas", "3", "--report-stall", "7")
    assert made == LaunchPlan(
        job=read_script([SCRIPT, *FLAGS]),
        layout=ReplicaLayout(3, 2),
        script=(SCRIPT, *FLAGS),
        run_dir=Path("runs/mine"),
        report_stall_s=7.0,
    )
    assert made.command()[-len(FLAGS) - 1 :] == [SCRIPT, *FLAGS]
    assert str(made).splitlines()[1].startswith("# 3 replicas x 2 ranks; B = 12 microbatches of 1")


def test_a_plan_over_hosts_says_where_each_replica_goes():
    made = plan("--replicas", "2", "--hosts", "a:2,b:2,c:2", "--spare-hosts", "1", "--forward", "X")
    assert isinstance(made, LaunchPlan)
    assert made.hosts == (Host("a", 2), Host("b", 2), Host("c", 2))
    assert (made.spare_hosts, made.forward, made.remote_shell) == (1, ("X",), REMOTE_SHELL)
    assert "a: replicas 0\nb: replicas 1\nc: replicas none" in str(made)


def test_without_a_run_folder_one_is_named_after_the_script():
    made = plan("--replicas", "2", script=(SCRIPT, *FLAGS[:-2]))
    assert made.run_dir.parent == Path("runs")
    assert made.run_dir.name.startswith("pretrain-")


def test_outside_an_allocation_slurm_means_a_submission(tmp_path):
    made = plan("--slurm", "--nodes", "4", "--sbatch=--partition=gpu", "--replicas", "2")
    assert isinstance(made, Submission)
    assert (made.nodes, made.options, made.run_dir) == (
        4,
        ("--partition=gpu",),
        Path("runs/mine"),
    )
    assert "#SBATCH --nodes=4" in str(made)
    with pytest.raises(ConfigError, match="say how large, --nodes N"):
        plan("--slurm", "--replicas", "2")


def test_inside_one_its_nodes_are_used_and_a_requeued_job_has_a_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    made = plan("--slurm", "--replicas", "2", "--hosts", "n1,n2")
    assert isinstance(made, LaunchPlan)
    assert made.hosts == (Host("n1", 2), Host("n2", 2))
    assert made.remote_shell.startswith("srun ")
    assert made.run_dir == Path("runs/mine/restart-2")


def test_making_a_plan_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"script: {SCRIPT}\nreplicas: 2\nenvironment: {{PLANNED: 1}}\nflags:\n"
        "  recover: true\n  micro-batch-size: 1\n  global-batch-size: 4\n"
    )
    made = plan("--config", str(config), script=())
    assert isinstance(made, LaunchPlan)
    assert (made.environment, made.forward) == ((("PLANNED", "1"),), ("PLANNED",))
    assert made.layout.replicas == 2
    assert plan("--config", str(config), "--replicas", "3", script=()).layout.replicas == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    import os

    assert "PLANNED" not in os.environ
