"""Megatron training that loses replicas: losses, samples and parameters of the failure-free run.

Each test runs through our own pretrain.py and, where MEGATRON_LM_PATH names a checkout, through
Megatron-LM's stock pretrain_gpt.py. The oracle is plain Megatron without recovery.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.events import Committed, Evaluated, FaultInjected, SaveFailed
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log, max_difference
from recover_megatron.session.exits import (
    EXIT_STOPPED,
    EXIT_TOO_FEW,
    EXIT_UNRECOVERABLE,
)
from recover_megatron.testing.rehearsal import Rehearsal, environment
from recover_megatron.trace import read_traces
from recover_megatron.workload.samples import sample_ids

LOSS_LIMIT = 1e-5
OPTIONS = ("--recover-bucket-mb", "0.05", "--recover-check-replicas-interval", "1")
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture
def train(run, tmp_path):
    """`plain` and `recovered` run a job and return its log, and for the latter its record too."""

    class Train:
        def plain(self, job: Rehearsal, data_parallel: int = 1) -> Log:
            code, output = run(job.plain(data_parallel), "plain")
            assert code == 0, output
            return Log(output)

        def recovered(self, job: Rehearsal, replicas: int, *flags: str) -> tuple[Log, AuditedRun]:
            code, output = run(job.recover(replicas, tmp_path / "run", *OPTIONS, *flags), "recover")
            assert code == 0, output
            record = AuditedRun(tmp_path / "run")
            assert record.violations(job.iterations, job.microbatches) == [], output
            assert record.parameters_bitwise_equal
            for iteration, samples in record.samples.items():
                assert list(samples) == expected_samples(job, iteration)
            return Log(output), record

    return Train()


def expected_samples(job: Rehearsal, iteration: int) -> list[int]:
    consumed = (iteration - 1) * job.global_batch_size
    return [
        i for m in range(job.global_batch_size) for i in sample_ids(consumed, m, micro_batch_size=1)
    ]


def assert_same_training(log: Log, plain: Log) -> None:
    assert max_difference(log.losses, plain.losses) <= LOSS_LIMIT
    assert log.grad_norms == pytest.approx(plain.grad_norms, abs=2e-3)  # logged with 3 decimals
    assert log.rates == plain.rates


def test_without_failures_recover_is_plain_data_parallelism(train, data_prefix, script):
    job = Rehearsal(data_prefix, 5, 6, script=script)
    plain = train.plain(job, data_parallel=2)
    log, record = train.recovered(job, 2)
    assert_same_training(log, plain)
    assert record.recoveries == []


def test_killed_in_the_middle_of_an_all_reduce_in_tp_x_pp(train, data_prefix, script):
    job = Rehearsal(data_prefix, 6, 6, tp=2, pp=2, script=script)
    plain = train.plain(job)
    log, record = train.recovered(job, 2, "--recover-inject", "1.3@3:sync.1")
    assert_same_training(log, plain)
    (recovery,) = record.recoveries
    assert (recovery.iteration, recovery.phase, recovery.replicas_lost) == (3, "sync", [1])
    assert recovery.reassigned_microbatches == 3
    assert recovery.live_microbatches_recomputed == 0


def test_killed_in_forward_backward_and_optimizer_until_one_is_left(train, data_prefix, script):
    job = Rehearsal(data_prefix, 8, 8, pp=2, script=script)
    plain = train.plain(job)
    faults = "0.0@2:backward.1,2.1@4:forward.1,1.0@6:optimizer"
    log, record = train.recovered(job, 4, "--recover-inject", faults)
    assert_same_training(log, plain)
    assert record.survivors == [3]
    assert [r.replicas_lost for r in record.recoveries] == [[0], [2], [1]]
    # I7: the console went on from replica to replica; not a line is missing.
    assert sorted(log.losses) == list(range(1, 9))


@pytest.fixture
def versatile(run, tmp_path):
    """Runs a job under `versatile`; its losses must be plain Megatron's on the same samples."""

    def start(job: Rehearsal, replicas: int, inject: str, *flags: str) -> AuditedRun:
        words = ("--recover-policy", "versatile", "--recover-inject", inject, *OPTIONS, *flags)
        code, output = run(job.recover(replicas, tmp_path / "run", *words), "recover")
        assert code == 0, output
        record = AuditedRun(tmp_path / "run")
        assert record.violations(job.iterations, job.microbatches) == [], output
        assert record.parameters_bitwise_equal
        samples = [i for ids in record.samples.values() for i in ids]
        (tmp_path / "samples.json").write_text(json.dumps(samples))
        replay = Path(__file__).with_name("jobs") / "replay_job.py"
        torchrun = job.plain()[: job.plain().index("-m", 3)]
        code, output = run([*torchrun, replay, tmp_path / "samples.json", *job.flags], "replay")
        assert code == 0, output
        log, plain = Log((tmp_path / "recover.log").read_text()), Log(output)
        assert log.grad_norms == pytest.approx(plain.grad_norms, abs=2e-3)
        # Traced, not logged: the stock script logs a mean of the first two iterations.
        assert max_difference(record.losses, plain.losses) <= LOSS_LIMIT
        return record

    return start


def test_versatile_lets_a_spare_stand_in_without_computing(versatile, data_prefix, script):
    """Six microbatches on four replicas: three majors of two, and a spare."""
    job = Rehearsal(data_prefix, 5, 6, script=script)
    record = versatile(job, 4, "1.0@3:sync.1")
    (recovery,) = record.recoveries
    assert (recovery.iteration, recovery.replicas_lost) == (3, [1])
    assert recovery.reassigned_microbatches == 0
    assert str(record.assignment(2)) == "r0: 0-1\nr1: 2-3\nr2: 4-5\nr3: withheld 2"
    assert str(record.assignment(3)) == "r0: 0-1\nr2: 4-5\nr3: 2-3"
    stream = [3, 7]  # of replica 3, of which nothing had been committed
    assert set(stream) <= set(record.samples[3])


def test_versatile_goes_over_the_policy_boundary_in_pipelines(versatile, data_prefix):
    job = Rehearsal(data_prefix, 5, 7, pp=2)
    record = versatile(job, 3, "1.1@2:backward.1,2.0@4:commit")
    assert [r.reassigned_microbatches for r in record.recoveries] == [3, 3]
    assert record.survivors == [0]
    samples = [i for ids in record.samples.values() for i in ids]
    assert len(set(samples)) == len(samples) == 5 * 7  # none twice


def test_versatile_streams_go_on_from_a_checkpoint(versatile, run, tmp_path, data_prefix):
    save = str(tmp_path / "checkpoint")
    first = versatile(
        Rehearsal(data_prefix, 4, 6), 3, "1.0@2:sync", "--save", save, "--save-interval", "4"
    )
    before = {i for ids in first.samples.values() for i in ids}
    # The second job is longer, and with it its schedule.
    longer = ("--override-opt_param-scheduler", "--load", save)
    words = (*OPTIONS, "--recover-policy", "versatile", *longer)
    for replicas in (3, 2):
        job, folder = Rehearsal(data_prefix, 6, 6), tmp_path / f"resumed-{replicas}"
        code, output = run(job.recover(replicas, folder, *words), "resume")
        assert code == 0, output
        record = AuditedRun(folder)
        assert sorted(record.commits) == [5, 6]
        after = [i for ids in record.samples.values() for i in ids]
        assert len(set(after)) == 12
        assert not set(after) & before  # none twice, in the whole training
        if replicas == 3:
            assert 7 in after  # where the lost replica's stream stood


def test_too_few_replicas_leave_a_checkpoint_from_which_fewer_go_on(
    train, run, tmp_path, data_prefix, script
):
    job = Rehearsal(data_prefix, 6, 4, script=script)
    plain = train.plain(job)
    save = str(tmp_path / "checkpoint")
    flags = ("--recover-min-replicas", "2", "--recover-inject", "0.0@3:backward", "--save", save)
    flags += ("--save-interval", "1000")
    code, output = run(job.recover(2, tmp_path / "first", *OPTIONS, *flags), "first")
    assert code == EXIT_TOO_FEW, output
    assert "only 1 of 2 replicas are left after iteration 3, fewer than --recover-min" in output
    assert (Path(save) / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    code, output = run(job.recover(1, tmp_path / "second", *OPTIONS, "--load", save), "second")
    assert code == 0, output
    resumed = AuditedRun(tmp_path / "second")
    assert sorted(resumed.commits) == [4, 5, 6]
    for iteration, samples in resumed.samples.items():
        assert list(samples) == expected_samples(job, iteration)
    for iteration, loss in resumed.losses.items():
        assert loss == pytest.approx(plain.losses[iteration], abs=LOSS_LIMIT)


def test_killed_in_a_save_the_next_replica_saves_and_any_number_resumes(
    train, run, tmp_path, data_prefix, script
):
    """Scenarios 9 and 17."""
    job = Rehearsal(data_prefix, 8, 12, script=script)
    plain = train.plain(job)
    save = str(tmp_path / "checkpoint")
    faults = ("--save", save, "--save-interval", "3", "--recover-inject", "0.0@3:save")
    _, record = train.recovered(job, 3, *faults)
    assert record.survivors == [1, 2]
    assert [e.phase for e in record.of(FaultInjected)] == ["save"]
    tracker = Path(save) / "latest_checkpointed_iteration.txt"
    assert tracker.read_text().strip() in ("6", "8")
    tracker.write_text("6")  # the stock script saves once more at its end
    for replicas in (4, 2, 1):
        folder = tmp_path / f"resumed-{replicas}"
        code, output = run(job.recover(replicas, folder, *OPTIONS, "--load", save), "resume")
        assert code == 0, output
        resumed = AuditedRun(folder)
        assert sorted(resumed.commits) == [7, 8]
        for iteration, loss in resumed.losses.items():
            assert loss == pytest.approx(plain.losses[iteration], abs=LOSS_LIMIT)


def test_an_evaluation_is_shared_and_goes_on_when_a_replica_is_killed_in_it(
    train, data_prefix, script
):
    """Scenario 11."""
    evaluate = ("--eval-interval", "2", "--eval-iters", "2")
    # In two tensor-parallel ranks, of which one reads no data.
    job = Rehearsal(data_prefix, 6, 6, tp=2, script=script, extra=evaluate)
    plain = train.plain(job)
    log, record = train.recovered(job, 3, "--recover-inject", "0.1@4:evaluate")
    assert_same_training(log, plain)
    assert sorted(plain.validation_losses) == [2, 4, 6]
    assert max_difference(log.validation_losses, plain.validation_losses) <= LOSS_LIMIT
    assert record.survivors == [1, 2]
    assert [e.phase for e in record.of(FaultInjected)] == ["evaluate"]
    shares = [e.assignment for e in record.of(Evaluated) if (e.replica, e.position) == (1, 0)]
    assert shares[0] == "r0: 0-1\nr1: 2-3\nr2: 4-5"
    assert shares[2:4] == ["r1: 2-3, 0\nr2: 4-5, 1", "r1: 0-2\nr2: 3-5"]


def test_tensorboard_goes_on_with_the_next_replica(train, tmp_path, data_prefix, script):
    """Scenario 8."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars(folder: Path) -> dict[str, dict[int, float]]:
        events = EventAccumulator(str(folder)).Reload()
        tags = events.Tags()["scalars"]
        return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags}

    job = Rehearsal(data_prefix, 6, 6, script=script)
    plain = train.plain(replace(job, extra=("--tensorboard-dir", str(tmp_path / "plain"))))
    logged = ("--tensorboard-dir", str(tmp_path / "board"), "--recover-inject", "0.0@4:backward")
    log, record = train.recovered(job, 3, *logged)
    assert_same_training(log, plain)
    mine, theirs = scalars(tmp_path / "board"), scalars(tmp_path / "plain")
    assert sorted(mine["lm loss"]) == list(range(1, 7))
    assert max_difference(mine["lm loss"], theirs["lm loss"]) <= LOSS_LIMIT
    assert mine["recover/live-replicas"] == {1: 3, 2: 3, 3: 3, 4: 2, 5: 2, 6: 2}
    assert mine["recover/repair-time-ms"][4] > 0
    assert set(theirs) <= set(mine)


def test_a_checkpoint_moves_both_ways_between_plain_megatron_and_ours(
    train, run, tmp_path, data_prefix, script
):
    """Trained to iteration 4 by one and to 8 by the other, with a replica lost on our side."""
    job = Rehearsal(data_prefix, 8, 6, pp=2, script=script)
    whole = train.plain(job)
    words = {name: (str(tmp_path / f"by-{name}"),) for name in ("plain", "ours")}
    half = ("--exit-interval", "4", "--save-interval", "1000", "--save")
    code, output = run(replace(job, extra=(*half, *words["plain"])).plain(), "first-plain")
    assert code == 0, output
    faults = (*OPTIONS, "--recover-inject", "1.0@2:sync.1")
    command = job.recover(3, tmp_path / "first", *half, *words["ours"], *faults)
    code, output = run(command, "first-ours")
    assert code == 0, output
    assert AuditedRun(tmp_path / "first").survivors == [0, 2]

    code, output = run(replace(job, extra=("--load", *words["ours"])).plain(), "then-plain")
    assert code == 0, output
    logged = Log(output)
    assert sorted(logged.losses) == [5, 6, 7, 8]
    last = {i: logged.losses[i] for i in (7, 8)}  # the stock script logs a mean at its second
    assert max_difference(last, {i: whole.losses[i] for i in last}) <= LOSS_LIMIT
    faults = (*OPTIONS, "--recover-inject", "0.1@6:sync.1")
    command = job.recover(2, tmp_path / "then", "--load", *words["plain"], *faults)
    code, output = run(command, "then-ours")
    assert code == 0, output
    record = AuditedRun(tmp_path / "then")
    assert record.survivors == [1]
    assert max_difference(record.losses, {i: whole.losses[i] for i in record.losses}) <= LOSS_LIMIT


def test_a_save_that_fails_costs_nothing_and_is_tried_again(train, tmp_path, data_prefix, script):
    """Scenario 10. The disk is full for the first of two stages from iteration 3 on. Its replica is
    lost later, and the next one saves."""
    save = tmp_path / "checkpoint"
    job = Rehearsal(data_prefix, 8, 6, pp=2, script=script)
    plain = train.plain(job)
    words = ("--save", str(save), "--save-interval", "2", "--recover-inject")
    log, record = train.recovered(job, 3, *words, "full:0.0@3:forward,0.1@7:forward")
    assert_same_training(log, plain)
    assert record.survivors == [1, 2]
    failures = record.of(SaveFailed)
    assert [(e.replica, e.iteration) for e in failures] == [(0, 4), (0, 6)]
    assert "Worker failure" in failures[0].reason
    output = (record.directory / "log.r0.p0.txt").read_text()
    assert "no checkpoint of iteration 4: " in output
    kept = sorted(p.name for p in save.iterdir())
    assert kept == ["iter_0000002", "iter_0000008", "latest_checkpointed_iteration.txt"]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "8"


def test_a_folder_that_cannot_be_written_is_found_before_the_save(train, tmp_path, data_prefix):
    (tmp_path / "file").write_text("")
    job = Rehearsal(data_prefix, 4, 6, pp=2)
    words = ("--save", str(tmp_path / "file" / "checkpoint"), "--save-interval", "2")
    _, record = train.recovered(job, 2, *words)
    assert record.survivors == [0, 1]
    failures = record.of(SaveFailed)
    assert [(e.replica, e.iteration) for e in failures] == [(0, 2), (0, 4)]
    assert "Not a directory" in failures[0].reason


def test_the_last_save_is_repeated_if_its_replica_is_killed_in_it_and_no_helper_stays(
    train, tmp_path, data_prefix, monkeypatch
):
    mark = f"RECOVER_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    save = tmp_path / "checkpoint"
    job = Rehearsal(data_prefix, 4, 6)
    words = ("--save", str(save), "--save-interval", "2", "--recover-inject", "0.0@4:save")
    _, record = train.recovered(job, 3, *words)
    assert record.survivors == [1, 2]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    limit = time.monotonic() + 5
    while left := [p.parent.name for p in Path("/proc").glob("[0-9]*/environ") if mark in _text(p)]:
        assert time.monotonic() < limit, left
        time.sleep(0.1)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_an_exit_by_time_is_agreed_across_replicas(run, tmp_path, data_prefix, script):
    save, folder = tmp_path / "checkpoint", tmp_path / "run"
    job = Rehearsal(data_prefix, 4000, 4, script=script)
    limit = ("--exit-duration-in-mins", "0.2", "--save", str(save), "--save-interval", "100000")
    code, output = run(job.recover(2, folder, *limit, *OPTIONS), "recover")
    assert code == 0, output
    record = AuditedRun(folder)
    assert record.survivors == [0, 1]
    last = {r: max(e.iteration for e in record.of(Committed) if e.replica == r) for r in (0, 1)}
    assert last[0] == last[1] < 4000
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) == last[0]


def test_sigterm_ends_the_whole_job_with_a_checkpoint_and_code_4(
    run, tmp_path, data_prefix, script
):
    job = Rehearsal(data_prefix, 400, 4, script=script)
    save, folder = str(tmp_path / "checkpoint"), tmp_path / "run"
    command = job.recover(2, folder, "--save", save, "--save-interval", "1000")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    while not any(isinstance(e, Committed) for e in read_traces(folder)):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == EXIT_STOPPED
    output = (tmp_path / "log").read_text()
    (stopped,) = re.findall(r"stopped: by a signal, after iteration (\d+); the checkpoint", output)
    assert (Path(save) / "latest_checkpointed_iteration.txt").read_text().strip() == stopped
    record = AuditedRun(folder)
    assert max(record.commits) == int(stopped)
    assert record.survivors == [0, 1]


def test_a_nan_in_one_replica_loses_that_replica_only(train, data_prefix, script):
    job = Rehearsal(data_prefix, 4, 6, script=script)
    plain = train.plain(job)
    log, record = train.recovered(job, 3, "--recover-inject", "nan:1.0@2:gradient")
    assert_same_training(log, plain)
    assert record.survivors == [0, 2]
    assert "found NaN" in (record.directory / "log.r1.p0.txt").read_text()


def test_the_same_nan_on_a_second_replica_stops_the_job_with_the_samples(
    run, tmp_path, data_prefix, script
):
    """Microbatches 2 and 3 of 6 are replica 1's; replica 2 computes one of them again."""
    job = Rehearsal(data_prefix, 4, 6, pp=2, script=script)
    faults = "nan:1.1@2:gradient,nan:2.0@2:gradient.1"
    code, output = run(job.recover(3, tmp_path / "run", *OPTIONS, "--recover-inject", faults))
    assert code == EXIT_UNRECOVERABLE, output
    assert "NaN or infinity in microbatches [2, 3] on a second replica" in output
    assert "Look at samples [8, 9]; iteration 1 is the last that was committed" in output
    assert AuditedRun(tmp_path / "run").survivors == [0, 2]


@pytest.mark.timeout(600)
def test_random_kills_in_any_phase(run, tmp_path):
    stress = Path(__file__).resolve().parent.parent / "scripts" / "stress.py"
    out = str(tmp_path / "stress")
    code, output = run([sys.executable, stress, "--seeds", 1, "--first-seed", 100, "--out", out])
    assert code == 0, output
    assert "1 of 1 seeds right, 2 recoveries" in output
