"""Whatever way a rank ends, the others notice, and lose its replica or end with it; and how a job
begins and ends. The cases E1 to E4, W, B1 of the issue "Sound".

Each job strikes several replicas, one after the other; the oracle is plain Megatron.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.events import Died, Finished
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log, max_difference
from recover_megatron.testing.rehearsal import Rehearsal
from recover_megatron.trace import read_traces

LOSS_LIMIT = 1e-5
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture
def ending(run, tmp_path, monkeypatch):
    """Runs a job in which ranks end as `endings` says; returns its code, console and run folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("jobs") / "ending"))
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))

    def start(job: Rehearsal, replicas: int, endings: str, *flags: str, name: str = "run"):
        (tmp_path / "ended").mkdir(exist_ok=True)
        monkeypatch.setenv("ENDINGS", endings)
        code, output = run(job.recover(replicas, tmp_path / name, *flags), name)
        return code, output, tmp_path / name

    return start


def seconds_until_noticed(folder: Path, rank: int) -> float:
    """From the end of `rank` until any rank of another replica knew of it."""
    began = float((folder.parent / "ended" / str(rank)).read_text())
    seen = [
        e.time - began
        for e in read_traces(folder)
        if e.KIND in ("peer_failed", "sync_failed", "repaired") and e.time >= began
    ]
    return min(seen)


ENDS = [
    *("return", "exception", "sys.exit(0)", "os._exit(0)", "abort", "out of memory"),
    *("os._exit(1):thread", "segmentation fault:thread", "SIGKILL to its parent"),
]


def test_every_way_to_end_is_noticed_and_loses_one_replica(ending, run, data_prefix, capsys):
    """E1, E3: nine replicas of one rank end in nine ways, the tenth goes on alone."""
    job = Rehearsal(data_prefix, len(ENDS) + 2, 10)
    _, plain = run(job.plain(), "plain")
    endings = ";".join(f"{rank}@{rank + 2}:{how}" for rank, how in enumerate(ENDS))
    flags = ("--recover-check-replicas-interval", "1")
    code, output, folder = ending(job, len(ENDS) + 1, endings, *flags)
    assert code == 0, output
    record = AuditedRun(folder)
    assert record.violations(job.iterations, job.microbatches) == []
    assert record.survivors == [len(ENDS)]
    assert max_difference(record.losses, Log(plain).losses) <= LOSS_LIMIT
    assert [r.replicas_lost for r in record.recoveries] == [[rank] for rank in range(len(ENDS))]
    for rank, how in enumerate(ENDS):
        seconds = seconds_until_noticed(folder, rank)
        with capsys.disabled():
            print(f"\n  {how}: noticed after {seconds:.3f} s", end="")
        assert seconds < 20, how  # not by MPI's heartbeat, after 300 s
    reasons = {e.replica: e.reason for e in record.of(Died)}
    assert reasons[1] == "ZeroDivisionError: as any bug would"
    assert reasons[2] == "left by sys.exit(0), while others are in 'iteration'"
    assert reasons[3] == "its process ended by itself, with code 0"
    assert reasons[4] == "killed by SIGABRT"
    assert reasons[7] == "killed by SIGSEGV"


def test_an_end_of_one_of_two_ranks_takes_its_replica_along(ending, run, data_prefix, capsys):
    """E2: its mate waits for it inside the replica, where no collective of ours can wake it."""
    job = Rehearsal(data_prefix, 6, 8, pp=2)
    _, plain = run(job.plain(), "plain")
    endings = "3@2:sys.exit(0);1@3:os._exit(1);4@4:abort"
    code, output, folder = ending(job, 4, endings, "--recover-check-replicas-interval", "1")
    assert code == 0, output
    record = AuditedRun(folder)
    assert record.violations(job.iterations, job.microbatches) == []
    assert [r.replicas_lost for r in record.recoveries] == [[1], [0], [2]]
    assert max_difference(record.losses, Log(plain).losses) <= LOSS_LIMIT
    for rank in (3, 1, 4):
        with capsys.disabled():
            seconds = seconds_until_noticed(folder, rank)
            print(f"\n  rank {rank}: noticed after {seconds:.3f} s", end="")
    assert "left by sys.exit(0), not all with it" in str([e.reason for e in record.of(Died)])


def test_an_exit_of_all_ranks_is_an_orderly_end(ending, data_prefix):
    code, output, folder = ending(
        Rehearsal(data_prefix, 6, 4), 2, "0@3:sys.exit(0);1@3:sys.exit(0)"
    )
    record = AuditedRun(folder)
    assert code == 0, output
    assert record.survivors == [0, 1]
    assert sorted(record.commits) == [1, 2]
    assert record.recoveries == []


def test_the_same_error_everywhere_ends_the_job_once_with_a_checkpoint(
    ending, tmp_path, data_prefix
):
    """W: it is no hardware's fault, and a restart would meet it again."""
    save, ran = tmp_path / "checkpoint", tmp_path / "restarted"
    words = ("--save", str(save), "--save-interval", "100")
    words += ("--recover-restart-command", f"touch {ran}")
    job = Rehearsal(data_prefix, 6, 4)
    code, output, _ = ending(job, 2, "0@4:exception;1@4:exception", *words)
    assert code == 3, output
    (said,) = [line for line in output.splitlines() if "met the same error" in line]
    assert "all 2 replicas met the same error in iteration 4: ZeroDivisionError: as any" in said
    assert "sitecustomize.py:" in said
    assert said.endswith(f"the checkpoint of iteration 3 is in {save}")
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert not ran.exists()
    resumed = replace(job, extra=("--load", str(save)))
    code, output, folder = ending(resumed, 2, "", name="resumed")
    assert code == 0, output
    assert sorted(AuditedRun(folder).commits) == [4, 5, 6]


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit(1)"])
def test_a_rank_that_dies_while_mpi_starts_costs_a_second_start(ending, data_prefix, how):
    """B1: the others would wait for it in MPI_Init for ever."""
    code, output, folder = ending(Rehearsal(data_prefix, 3, 4, pp=2), 2, f"3@mpi:{how}")
    assert code == 0, output
    assert "recover: rank 3 (replica 1, position 1) died before the job had begun" in output
    assert "the job is started once more" in output
    record = AuditedRun(folder)
    assert record.survivors == [0, 1]
    assert sorted(record.commits) == [1, 2, 3]
    assert list((folder / "start-1").glob("trace.*"))


def test_a_disk_that_fills_up_for_one_rank_costs_nothing(ending, data_prefix):
    """S4: neither its log nor its trace can grow any more; the leader's go to the console."""
    code, output, folder = ending(Rehearsal(data_prefix, 6, 4), 2, "0@3:full disk")
    assert code == 0, output
    assert sorted(Log(output).losses) == list(range(1, 7))
    for name in ("log", "trace"):
        assert len([x for x in output.splitlines() if f"{name}.r0.p0" in x and "warning" in x]) == 1
    ended = {e.replica for e in read_traces(folder) if isinstance(e, Finished)}
    assert ended == {1}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_run_folder_costs_nothing(ending, tmp_path, data_prefix):
    """S3, 8A. The exit code is known all the same."""
    import subprocess

    small = tmp_path / "run"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)], check=True)
    try:
        code, output, _ = ending(Rehearsal(data_prefix, 30, 4), 2, "0@20:SIGKILL")
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert code == 0, output
    assert "cannot be written ([Errno 28] No space left on device): training goes on" in output
    assert sorted(Log(output).losses)[-1] == 30
