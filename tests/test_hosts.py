"""Training on four hosts (tests/rig.py), one replica of two pipeline stages on each, that loses
hosts and links. The oracle is plain Megatron without recovery."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.events import PeerFailed, Repaired, SyncFailed
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log, max_difference
from recover_megatron.record.run_record import RunRecord
from recover_megatron.session.exits import EXIT_UNRECOVERABLE
from recover_megatron.testing import rig as rigs
from recover_megatron.testing.rehearsal import Rehearsal, environment

ITERATIONS, MICROBATCHES = 60, 8
LOSS_LIMIT = 1e-5
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(300),
    pytest.mark.skipif(rigs.missing() is not None, reason=str(rigs.missing())),
]


class Training:
    """A job started on the rig's first host."""

    def __init__(
        self,
        rig: rigs.Rig,
        job: Rehearsal,
        folder: Path,
        remote_shell: str = "",
        spares: int = 0,
        forward: Sequence[str] = (),
    ):
        self.rig, self.run = rig, folder / "run"
        self.log = folder / "launch.log"
        options = ("--recover-bucket-mb", "0.05", "--recover-check-replicas-interval", "5")
        command = job.recover(len(rig.names) - spares, self.run, *options)
        at = command.index("--replicas")
        command[at:at] = [word for name in forward for word in ("--forward", name)]
        command[at:at] = ["--spare-hosts", str(spares)]
        command[at:at] = ["--hosts", ",".join(rig.names), "--remote-shell"]
        command.insert(at + 3, remote_shell or rig.remote_shell)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                rig.command("h0", command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(), **rig.environment("h0")},
            )

    def wait_for_iteration(self, number: int, limit_s: float = 120) -> None:
        self._until(lambda: self.iteration >= number, f"iteration {number}", limit_s)

    def wait_for_the_end(self, limit_s: float = 120) -> None:
        self._until((self.run / "exit_code").exists, "end", limit_s)

    @property
    def iteration(self) -> int:
        return RunRecord.read(self.run).iteration

    def words_of(self, replica: int) -> str:
        """Of all its ranks: the first to leave says why, the others that it has gone."""
        return "".join(log.read_text() for log in sorted(self.run.glob(f"log.r{replica}.p*.txt")))

    def _until(self, true, what: str, limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < limit, f"no {what}: {self.log.read_text()}"
            time.sleep(0.1)

    def check(self, plain: Log, survivors: list[int]) -> AuditedRun:
        """The right replicas have survived, and trained as plain Megatron would have."""
        record = AuditedRun(self.run)
        assert record.survivors == survivors
        assert record.violations(ITERATIONS, MICROBATCHES) == []
        assert record.parameters_bitwise_equal
        assert max_difference(record.losses, plain.losses) <= LOSS_LIMIT
        assert (self.run / "exit_code").read_text() == "0\n"
        return record


@pytest.fixture(scope="module")
def job(data_prefix):
    return Rehearsal(data_prefix, ITERATIONS, MICROBATCHES, pp=2)


@pytest.fixture(scope="module")
def plain(job, tmp_path_factory) -> Log:
    folder = tmp_path_factory.mktemp("plain")
    done = subprocess.run(
        job.plain(), capture_output=True, text=True, env=environment(), cwd=Path.cwd()
    )
    (folder / "log").write_text(done.stdout)
    assert done.returncode == 0, done.stderr
    return Log(done.stdout)


@pytest.fixture
def training(job, tmp_path):
    with rigs.Rig(tmp_path / "rig", 4) as rig:
        started = Training(rig, job, tmp_path)
        started.wait_for_iteration(4)
        yield started


def nothing_is_left(training: Training, hosts: list[str]) -> None:
    """Within five seconds: where mpirun is lost, a host's relay ends by itself."""
    limit = time.monotonic() + 5
    for host in hosts:
        while training.rig.processes(host) and time.monotonic() < limit:
            time.sleep(0.1)
        assert training.rig.processes(host) == []
        assert list(training.rig.temporary(host).glob("recover-*")) == []


def test_two_hosts_die_one_after_the_other(training, plain):
    training.rig.kill("h2")
    training.wait_for_iteration(training.iteration + 5)
    training.rig.kill("h1")
    training.wait_for_the_end()
    assert training.process.wait(5) == 0
    record = training.check(plain, [0, 3])
    assert [r.replicas_lost for r in record.recoveries] == [[2], [1]]
    nothing_is_left(training, ["h0", "h3"])
    assert "lost communication" not in training.log.read_text()


def test_three_hosts_die_at_once_mpiruns_own_among_them(training, plain):
    for host in ("h0", "h1", "h2"):
        training.rig.kill(host)
    training.wait_for_the_end()
    training.check(plain, [3])
    nothing_is_left(training, ["h3"])


def test_of_two_halves_one_goes_on_and_a_healed_link_does_it_no_harm(training, plain):
    training.rig.partition(["h2", "h3"])
    training.wait_for_iteration(12)
    training.rig.heal()
    training.wait_for_the_end()
    assert training.process.wait(5) == 0
    training.check(plain, [0, 1])
    for replica in (2, 3):
        assert "no sign of life from h0, h1" in training.words_of(replica)
    nothing_is_left(training, training.rig.names)


def test_mpiruns_host_alone_behind_a_dead_link_leaves_and_the_others_go_on(training, plain):
    training.rig.link("h0", up=False)
    training.wait_for_the_end()
    training.check(plain, [1, 2, 3])
    assert training.process.wait(60) == EXIT_UNRECOVERABLE
    assert "the ranks on h0 had to leave, being no majority" in training.log.read_text()
    nothing_is_left(training, training.rig.names)


def test_a_short_outage_and_a_slow_link_cost_nobody(training, plain):
    training.rig.link("h2", up=False)
    time.sleep(6)  # the outage itself
    training.rig.link("h2", up=True)
    training.rig.slow("h3", kbit_s=8000)
    training.wait_for_the_end(180)
    assert training.process.wait(5) == 0
    training.check(plain, [0, 1, 2, 3])
    nothing_is_left(training, training.rig.names)


def test_a_host_that_cannot_be_started_is_named_with_the_reason(job, tmp_path):
    with rigs.Rig(tmp_path / "rig", 2) as rig:
        nobody_listens = rig.remote_shell.replace("ssh ", "ssh -p 2222 ")
        started = Training(rig, job, tmp_path, nobody_listens)
        assert started.process.wait(60) != 0
        assert "recover: host h1 did not start (code 255): ssh: connect" in started.log.read_text()
        nothing_is_left(started, ["h0", "h1"])


def test_a_spare_host_stands_in_for_one_that_does_not_answer(job, tmp_path):
    with rigs.Rig(tmp_path / "rig", 3) as rig:
        rig.kill("h1")
        started = Training(rig, replace(job, iterations=5), tmp_path, spares=1)
        started.wait_for_the_end()
        assert started.process.wait(60) == 0
        said = started.log.read_text()
        assert "recover: host h1 does not answer: ssh: connect" in said
        assert "h0: replicas 0\nh2: replicas 1\n" in said
        assert AuditedRun(started.run).survivors == [0, 1]


def test_ranks_elsewhere_that_end_by_themselves_are_noticed(
    job, plain, tmp_path, monkeypatch, capsys
):
    """By sys.exit, by os._exit, and by an abort in another thread, at one of the two ranks of a
    replica on another host each; the variables that say so are handed on."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("jobs") / "ending"))
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))
    monkeypatch.setenv("ENDINGS", "3@4:sys.exit(0);5@8:os._exit(0);6@12:abort:thread")
    (tmp_path / "ended").mkdir()
    with rigs.Rig(tmp_path / "rig", 4) as rig:
        training = Training(rig, job, tmp_path, forward=("ENDED", "ENDINGS"))
        training.wait_for_the_end()
        record = training.check(plain, [0])
        nothing_is_left(training, rig.names)
    assert [r.replicas_lost for r in record.recoveries] == [[1], [2], [3]]
    for rank in (3, 5, 6):
        began = float((tmp_path / "ended" / str(rank)).read_text())
        seen = [
            e.time - began for e in record.of(PeerFailed, SyncFailed, Repaired) if e.time >= began
        ]
        with capsys.disabled():
            print(f"\n  rank {rank}: noticed after {min(seen):.3f} s", end="")
        assert min(seen) < 20
