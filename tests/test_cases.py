"""The cases of `../shared/cases` that need a whole job, by their names there. Those of ends are in
test_ends.py, of data preparation in test_prepare_data.py, the small ones in test_small_cases.py.

A job stands for several cases at once where they do not disturb each other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.data import prepare_data
from recover_megatron.events import Committed, Skipped, Started
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log, max_difference
from recover_megatron.testing.rehearsal import Rehearsal, environment
from recover_megatron.trace import read_traces

LOSS_LIMIT = 1e-5
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def corpus(prefix: Path, texts: list[str]) -> str:
    encode, eod, _, dtype = prepare_data.tokenizer_of(None)
    prepare_data.write_dataset(iter(texts), encode, eod, dtype, prefix)
    return str(prefix)


def test_1_2_8_a_blend_without_validation_and_without_tensorboard(run, tmp_path, data_prefix):
    """1: weights in --data-path. 2: evaluation where --split has no part for it. 8, S1: a folder
    for TensorBoard that cannot be made."""
    second = corpus(tmp_path / "second", ["one two three four five six seven " * 60] * 40)
    words = ("--data-path", "0.7", data_prefix, "0.3", second, "--split", "100,0,0")
    words += ("--eval-interval", "2", "--eval-iters", "2")
    job = Rehearsal(data_prefix, 6, 6, pp=2, drop=("data-path", "split"), extra=words)
    code, plain = run(job.plain(), "plain")
    assert code == 0, plain
    board = ("--tensorboard-dir", "/dev/null/board")
    flags = (*board, "--recover-inject", "0.1@4:sync.0")
    code, output = run(job.recover(3, tmp_path / "run", *flags), "recover")
    assert code == 0, output
    assert max_difference(Log(output).losses, Log(plain).losses) <= LOSS_LIMIT
    for said in (plain, output):
        assert "has no part for validation: there is no evaluation" in said
        assert Log(said).validation_losses == {}
    warnings = [line for line in output.splitlines() if "tensorboard_writer" in line]
    assert 1 <= len(warnings) <= 2  # one of each leader
    assert "NotADirectoryError" in warnings[0]
    assert AuditedRun(tmp_path / "run").survivors == [1, 2]


def test_1b_1c_prefixes_without_weights_go_round(run, tmp_path):
    """1b: 24 samples wanted, fewer there. 1c: one of them has a single document, and nothing is
    left for validation, which nobody asks for."""
    many = corpus(tmp_path / "many", [f"document {i} " * 8 for i in range(9)])
    few = corpus(tmp_path / "few", ["only one " * 40])
    words = ("--data-path", many, few)
    job = Rehearsal(many, 6, 4, drop=("data-path",), extra=words)
    code, plain = run(job.plain(), "plain")
    assert code == 0, plain
    code, output = run(
        job.recover(2, tmp_path / "run", "--recover-inject", "1.0@3:backward"), "recover"
    )
    assert code == 0, output
    assert max_difference(Log(output).losses, Log(plain).losses) <= LOSS_LIMIT
    samples = AuditedRun(tmp_path / "run").samples
    assert max(max(ids) for ids in samples.values()) < 23  # fewer than 24 samples


def test_3_dropout_is_exact_over_losses_and_a_resume(run, tmp_path, data_prefix):
    """X1, X2: two of three replicas lost, stopped, and resumed by two replicas."""
    save = str(tmp_path / "checkpoint")
    drop = ("attention-dropout", "hidden-dropout")
    words = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--lr-decay-iters", "10")
    job = Rehearsal(data_prefix, 10, 6, pp=2, layers=2, drop=drop, extra=words)
    check = ("--recover-check-replicas-interval", "1")
    code, output = run(job.recover(2, tmp_path / "whole", *check), "whole")
    assert code == 0, output
    whole = AuditedRun(tmp_path / "whole")
    faults = ("--recover-inject", "1.0@2:sync.0,0.1@4:backward.1", "--save", save)
    half = replace(job, iterations=6)
    code, output = run(half.recover(3, tmp_path / "half", *check, *faults), "half")
    assert code == 0, output
    code, output = run(job.recover(2, tmp_path / "rest", *check, "--load", save), "rest")
    assert code == 0, output
    losses = AuditedRun(tmp_path / "half").losses | AuditedRun(tmp_path / "rest").losses
    assert max_difference(losses, whole.losses) <= LOSS_LIMIT
    without = replace(job, extra=("--lr-decay-iters", "10"), drop=())
    code, output = run(without.plain(), "without")
    assert abs(Log(output).losses[10] - whole.losses[10]) > 1e-3  # dropout does something


def test_6_13_18_22_the_schedule_the_last_save_and_the_tracker_file(run, tmp_path, data_prefix):
    """13: the end is saved without --save-interval. B22: through no planted link. 6: a checkpoint
    of another schedule is refused, or follows Megatron's flags. 18: a release can be loaded."""
    save = tmp_path / "checkpoint"
    save.mkdir()
    (tmp_path / "precious").write_text("precious")
    for name in (".recover_probe", ".recover_probe.0.0"):
        (save / name).symlink_to(tmp_path / "precious")
    job = Rehearsal(data_prefix, 4, 4)
    code, output = run(job.recover(2, tmp_path / "first", "--save", str(save)), "first")
    assert code == 0, output
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (tmp_path / "precious").read_text() == "precious"

    longer = replace(job, iterations=6, extra=("--load", str(save)))
    code, output = run(longer.recover(2, tmp_path / "second"), "second")
    assert code == 2, output
    (said,) = [line for line in output.splitlines() if "error: the schedule of" in line]
    assert "--override-opt_param-scheduler" in said
    for flag, rate in (("override", 2.318e-4), ("use-checkpoint", 1e-4)):
        words = (f"--{flag}-opt_param-scheduler", "--lr", "1e-3")
        code, output = run(longer.recover(2, tmp_path / flag, *words), flag)
        assert code == 0, output
        assert Log(output).rates[5] == pytest.approx(rate, rel=1e-3)

    (save / "iter_0000004").rename(save / "release")
    (save / "latest_checkpointed_iteration.txt").write_text("release")
    code, output = run(replace(longer, iterations=3).recover(2, tmp_path / "release"), "release")
    assert code == 0, output
    losses = Log(output).losses
    assert sorted(losses) == [1, 2, 3]
    assert losses[1] < Log((tmp_path / "first.log").read_text()).losses[1] - 0.2


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_10_11_16_a_launcher_whose_console_goes_away_and_that_is_told_to_end(
    number, tmp_path, data_prefix
):
    """10, L3: as SIGTERM. 11, L4: nobody reads the console any more. 16, L5: in the shell of a
    Slurm allocation of two nodes."""
    host = socket.gethostname()
    slurm = {"SLURM_JOBID": "7", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    slurm |= {"SLURM_NODELIST": f"{host},node2", "SLURM_JOB_NODELIST": f"{host},node2"}
    slurm |= {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    save, folder = tmp_path / "checkpoint", tmp_path / "run"
    job = Rehearsal(data_prefix, 4000, 4)
    command = job.recover(2, folder, "--save", str(save))
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment(), **slurm},
        start_new_session=True,
        # Under nohup the signal is ignored, by the launcher too.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while b"iteration" not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    gone = _last(folder)
    while _last(folder) < gone + 20:  # it goes on without a reader
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 4
    saved = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert saved == _last(folder) > gone
    assert (folder / "exit_code").read_text() == "4\n"


def test_a_launcher_that_is_killed_takes_its_job_along(tmp_path, data_prefix):
    folder = tmp_path / "run"
    command = Rehearsal(data_prefix, 4000, 4).recover(2, folder)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while _last(folder) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    ranks = [e.pid for e in read_traces(folder) if isinstance(e, Started)]
    limit = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < limit
        time.sleep(0.1)
    process.wait()


def _last(folder: Path) -> int:
    committed = (e.iteration for e in read_traces(folder) if isinstance(e, Committed))
    return max(committed, default=0)


def test_7_9_a_used_run_folder_and_an_index_of_other_data(run, tmp_path):
    """7, L2: a second run has a folder of its own. 9, D6, D7: the index belongs to the data, and a
    file of it that was cut short is made anew."""
    texts = [f"document {i} says this and that " * 12 for i in range(60)]
    prefix = corpus(tmp_path / "data", texts[:40])
    cache = tmp_path / "cache"
    words = ("--split", "100,0,0", "--data-cache-path", str(cache))
    job = Rehearsal(prefix, 2, 4, drop=("split", "lr-warmup-iters"), extra=words)

    def documents(name: str) -> int:
        import numpy as np

        code, output = run(job.recover(2, tmp_path / "run"), name)
        assert code == 0, output
        (index,) = cache.glob("*train-document_index.npy")
        return int(np.load(index).max()) + 1

    assert documents("first") == 40
    corpus(tmp_path / "data", texts)
    assert documents("more") == 60
    corpus(tmp_path / "data", texts[:20])
    assert documents("fewer") == 20
    (shuffled,) = cache.glob("*train-shuffle_index.npy")
    os.truncate(shuffled, 150)
    assert documents("cut") == 20
    runs = [tmp_path / "run", *(tmp_path / "run" / f"restart-{n}" for n in (1, 2, 3))]
    assert all(sorted(AuditedRun(folder).commits) == [1, 2] for folder in runs)
    assert len({json.dumps(AuditedRun(folder).losses) for folder in runs}) > 1


@pytest.mark.megatron_lm
def test_b4_an_iteration_to_skip_is_skipped(run, tmp_path, data_prefix):
    """Only the stock script has the flag."""
    from tests.conftest import NO_CHECKOUT, checkout

    path = checkout()
    if path is None:
        pytest.skip(NO_CHECKOUT)
    job = Rehearsal(data_prefix, 6, 4, script=str(path / "pretrain_gpt.py"))
    job = replace(job, extra=("--iterations-to-skip", "3"))
    code, plain = run(job.plain(), "plain")
    assert code == 0, plain
    for policy in ("exact", "versatile"):
        folder = tmp_path / policy
        code, output = run(job.recover(2, folder, "--recover-policy", policy), policy)
        assert code == 0, output
        record = AuditedRun(folder)
        assert sorted(record.commits) == [1, 2, 4, 5, 6]
        assert [e.iteration for e in record.of(Skipped)] == [3, 3]
        samples = [i for ids in record.samples.values() for i in ids]
        assert samples == [i for i in range(24) if not 8 <= i < 12]
        logged = Log(output).losses
        assert max_difference(logged, Log(plain).losses) <= LOSS_LIMIT
