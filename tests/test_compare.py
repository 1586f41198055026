"""`recover-megatron compare` on runs that are not of the same iterations (R2 of the cases)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recover_megatron import cli
from recover_megatron.events import Committed, Fetched, Finished, Loss, Started
from recover_megatron.trace import Trace


def run_of(folder: Path, iterations: range) -> Path:
    """A run of one replica whose loss is 1 / iteration."""
    trace = Trace(str(folder), 0, 0)
    trace.emit(Started(pid=1))
    for i in iterations:
        trace.emit(Fetched(iteration=i, microbatches=(0,), samples=((i,),)))
        trace.emit(Committed(iteration=i, assignment="r0: 0", microbatches=1))
        trace.emit(Loss(iteration=i, losses={"lm loss": 1 / i}))
    trace.emit(Finished(code=0))
    return folder


def compare(run: Path, reference: Path, out: Path) -> int:
    words = ["compare", "--run", run, "--reference", reference, "--out", out]
    return cli.main([str(word) for word in words])


def test_r2_the_iterations_that_both_have_are_compared(tmp_path, capsys):
    resumed, whole = (
        run_of(tmp_path / "resumed", range(11, 16)),
        run_of(tmp_path / "a", range(1, 13)),
    )
    assert compare(resumed, whole, tmp_path) == 0
    assert "compared are the 2 iterations 11-12 that both have, of 5 and 12" in (
        capsys.readouterr().err
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["compared_iterations"] == 2
    assert summary["max_abs_loss_difference"] == 0
    assert summary["samples_identical"] is True
    assert summary["microbatches_per_iteration"] == 1
    assert compare(whole, whole, tmp_path) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("iterations", [range(0), range(20, 22)])
def test_r2_nothing_in_common_is_one_sentence(tmp_path, capsys, iterations):
    other, whole = run_of(tmp_path / "other", iterations), run_of(tmp_path / "a", range(1, 13))
    assert compare(other, whole, tmp_path) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "no iteration is in both" in said
    assert "1-12" in said


def test_r2_a_log_of_every_fifth_iteration(tmp_path, capsys):
    lines = [f" iteration {i:8d}/ 12 | lm loss: {1 / i:.6E} |" for i in (5, 10)]
    (tmp_path / "log").write_text("\n".join(lines))
    assert compare(run_of(tmp_path / "run", range(1, 13)), tmp_path / "log", tmp_path) == 0
    assert "the 2 iterations 5-10" in capsys.readouterr().err


def test_the_last_run_in_a_folder_is_meant(tmp_path, capsys):
    run_of(tmp_path / "run", range(1, 4))
    run_of(tmp_path / "run" / "restart-1", range(4, 7))
    assert compare(tmp_path / "run", run_of(tmp_path / "a", range(1, 7)), tmp_path) == 0
    assert "iterations 4-6" in capsys.readouterr().err
