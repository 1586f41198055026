"""Real processes under mpirun, killed with SIGKILL at named points; no Megatron, so it is quick."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from recover_megatron import cli
from recover_megatron.adapters.megatron.command_line import read_job
from recover_megatron.events import Died, Started
from recover_megatron.launch.mpirun import mpirun_command
from recover_megatron.record.audit import AuditedRun
from recover_megatron.session.exits import EXIT_CONFIG, EXIT_UNRECOVERABLE
from recover_megatron.testing.jobs import driver_job

STEPS, MICROBATCHES = 8, 12
pytestmark = pytest.mark.mpi


def mpirun(job: str, replicas: int, words: list[str]) -> list[str]:
    """The launcher's own line, with `job` run by python itself."""
    script = driver_job.__file__
    if job != "driver_job.py":
        script = str(Path(__file__).with_name("jobs") / job)
    command = mpirun_command(read_job(words), replicas, [script, *words])
    module = command.index("-m", command.index("-n"))
    return command[:module] + command[module + 2 :]


def said_by_ranks(output: str) -> list[str]:
    """Without the lines of MPI's own run-time, which begin with `[host:pid]` or `[warn]`."""
    ours = re.compile(r"(?!\[[^]]+:\d+\] |\[warn\] )")
    return [line for line in output.splitlines() if ours.match(line)]


LAUNCHER = """
import os, pathlib, sys
from recover_megatron.launch import mpirun, verdict
folder = pathlib.Path(sys.argv[1])
code = mpirun.run_mpirun(sys.argv[2:], os.environ, mpirun.wait_for_mpirun, folder)
sys.exit(verdict.exit_code(code, folder / "exit_code"))
"""


def launched(run_dir: Path, command: list[str]) -> list[str]:
    """Waited for as the launcher does."""
    return [sys.executable, "-c", LAUNCHER, str(run_dir), *command]


@pytest.fixture
def drive(run, tmp_path):
    """Runs the driver job over `replicas` x 2 ranks; returns its record, checked for I1, I3-I5."""

    def start(replicas: int, inject: str, *flags: str) -> AuditedRun:
        words = ["--recover", "--micro-batch-size", "1", "--global-batch-size", str(MICROBATCHES)]
        words += ["--tensor-model-parallel-size", "2", "--recover-trace-dir", str(tmp_path / "run")]
        words += ["--recover-inject", inject, *flags]
        code, output = run(launched(tmp_path / "run", mpirun("driver_job.py", replicas, words)))
        assert code == 0, output
        record = AuditedRun(tmp_path / "run")
        assert record.violations(STEPS, MICROBATCHES) == [], output
        return record

    return start


@pytest.mark.parametrize(
    "fault", ["1.0@3:forward.1", "1.1@3:sync.0", "1.0@3:sync.2", "1.1@3:commit", "1.0@3:optimizer"]
)
def test_a_replica_killed_at_any_point_costs_only_its_own_microbatches(drive, fault):
    record = drive(3, fault)
    assert record.survivors == [0, 2]
    (recovery,) = record.recoveries
    assert recovery.iteration == (4 if "optimizer" in fault else 3)
    assert recovery.replicas_lost == [1]
    assert recovery.reassigned_microbatches == 4
    assert (record.directory / "exit_code").read_text() == "0\n"


def test_three_losses_in_a_row_replica_0_first_leave_the_last_replica_with_all_work(drive):
    record = drive(4, "0.0@2:sync.1,2.1@3:forward,1.0@4:commit")
    assert record.survivors == [3]
    assert [r.replicas_lost for r in record.recoveries] == [[0], [2], [1]]
    assert record.assignment(8).share(3) == tuple(range(MICROBATCHES))


def test_a_second_loss_inside_the_repair_is_absorbed(drive):
    record = drive(4, "1.0@3:sync.1,2.1@3:repair")
    assert record.survivors == [0, 3]
    assert sorted(r for x in record.recoveries for r in x.replicas_lost) == [1, 2]


def test_two_replicas_lost_in_the_same_bucket_are_absorbed(drive):
    assert drive(4, "1.0@3:sync.1,2.0@3:sync.1").survivors == [0, 3]


@pytest.mark.parametrize("phase", ["forward.1", "optimizer"])
@pytest.mark.parametrize("kind", ["hang", "hold", "stop"])
def test_a_hung_rank_is_ended_by_its_watchdog(drive, kind, phase):
    """Asleep, asleep with Python's lock, or stopped as a whole; computing, or after a commit."""
    flag = "--recover-hang-timeout" if phase == "forward.1" else "--recover-stall-timeout"
    record = drive(3, f"{kind}:1.1@3:{phase}", flag, "5")
    assert record.survivors == [0, 2]
    (death,) = [e for e in record.of(Died) if (e.replica, e.position) == (1, 1)]
    assert "no progress" in death.reason
    words = (record.directory / "log.r1.p1.txt").read_text()
    assert ("inject.py" in words) == (kind != "stop")  # its stack: where it hung


def test_ranks_that_wait_for_a_hung_one_are_not_taken_for_hung(drive):
    record = drive(2, "hang:1.1@8:forward.0", "--recover-hang-timeout", "5")
    assert record.survivors == [0]  # its peers waited 5 s in a collective, and live


def test_the_console_says_who_was_lost(drive, run, tmp_path):
    drive(3, "0.1@3:sync.1")
    console = (tmp_path / "job.log").read_text()
    (found,) = re.findall(
        r"lost replica 0 \((.*) died first\); 2 of 3 replicas go on, world epoch 1\n", console
    )
    host = socket.gethostname()
    one, both = f"rank 1 on {host}", f"rank 0 on {host}, rank 1 on {host}"
    assert found in (one, both)  # rank 0 dies of it at once


@pytest.mark.parametrize("step", [0, 3])
def test_an_exception_in_one_rank_loses_its_replica_only(drive, monkeypatch, step):
    """In an iteration, and before the first one."""
    monkeypatch.setenv("RAISE_AT", f"1.1@{step}")
    record = drive(3, "")
    assert record.survivors == [0, 2]
    assert "ZeroDivisionError" in (record.directory / "log.r1.p1.txt").read_text()


def test_nothing_is_left_behind(drive, tmp_path, monkeypatch):
    """No process, no temporary file, no shared memory segment of the job's ranks."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    started, segments = time.time(), set(Path("/dev/shm").iterdir())
    record = drive(3, "1.0@3:sync.1")
    assert list(temporary.iterdir()) == []
    # Other jobs may run on this machine: what nobody has mapped is left behind.
    mapped = "".join(_text(maps) for maps in Path("/proc").glob("[0-9]*/maps"))
    new = set(Path("/dev/shm").iterdir()) - segments
    assert [p for p in new if str(p) not in mapped and p.exists()] == []
    assert len(record.finished) == len(record.survivors) * record.ranks_per_replica
    for event in record.of(Started):
        assert event.time > started - 60
        assert not _alive(event.pid)


@pytest.fixture
def verdicts(run, tmp_path):
    """Runs the check job over 3 x 2 ranks; returns its code and what each rank says."""

    def start() -> tuple[int, list[str]]:
        words = ["--recover", "--micro-batch-size", "1", "--global-batch-size", "3"]
        words += ["--tensor-model-parallel-size", "2", "--recover-trace-dir", str(tmp_path / "run")]
        code, _ = run(launched(tmp_path / "run", mpirun("check_job.py", 3, words)))
        logs = [log.read_text() for log in (tmp_path / "run").glob("log.*.txt")]
        lines = [line for log in logs for line in log.splitlines()]
        return code, [line for line in lines if line.startswith("verdict")]

    return start


def test_a_replica_that_differs_in_one_bit_is_named_and_the_job_stops(verdicts):
    code, said = verdicts()
    assert code == EXIT_UNRECOVERABLE
    assert len(said) == 6
    assert all("after iteration 2 the parameters of replica 1 differ" in v for v in said)


def test_replicas_that_loaded_different_iterations_are_named_and_do_not_start(
    verdicts, monkeypatch
):
    monkeypatch.setenv("LOADED", "8")
    code, said = verdicts()
    assert code == EXIT_CONFIG
    assert len(said) == 6
    assert all("(replica 0: 8, replica 1: 9, replica 2: 8)" in v for v in said)


def test_the_doctor_finds_this_machine_fit(capsys):
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "survivor 0 went on" in output
    assert "survivor 2 went on" in output
    assert sys.executable


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_agreements_are_right_while_failures_are_looked_for_all_the_time(run):
    """Two threads in MPI at the same time made one in a thousand wrong."""
    words = ["--recover", "--micro-batch-size", "1", "--global-batch-size", "4"]
    command = mpirun("agree_job.py", 4, words)
    script = next(i for i, word in enumerate(command) if word.endswith("agree_job.py"))
    code, output = run([*command[: script + 1], 3000])
    assert code == 0, output
    assert sorted(said_by_ranks(output)) == [f"rank {rank}: 3000 right" for rank in range(4)]


def test_an_unspecific_error_counts_as_a_loss_only_where_a_lost_member_is_known(run):
    code = (
        "import os\n"
        "from recover_megatron.collectives.openmpi import MPI, lost\n"
        "error = MPI.Exception(MPI.ERR_OTHER)\n"
        "print(type(lost(error, 'all_reduce', lost_is_known=True)).__name__)\n"
        "try:\n"
        "    lost(error, 'all_reduce')\n"
        "except MPI.Exception:\n"
        "    print('raised', flush=True)\n"
        "os._exit(0)"
    )
    words = ["--recover", "--micro-batch-size", "1", "--global-batch-size", "1"]
    command = mpirun("driver_job.py", 1, words)
    python = command.index(sys.executable)
    returned, output = run([*command[: python + 1], "-c", code])
    assert (returned, said_by_ranks(output)) == (0, ["ReplicaLost", "raised"])
