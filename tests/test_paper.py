"""The paper's experiments in their short form: every result is there, and the page shows it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from recover_megatron.testing.rehearsal import environment
from tests import browser

ROOT = Path(__file__).resolve().parent.parent
REPRODUCE = ROOT / "scripts" / "paper" / "reproduce.py"
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("paper")
    command = [sys.executable, str(REPRODUCE), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def summary(results: Path, name: str) -> dict:
    return json.loads((results / name / "summary.json").read_text())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_exact_loss_is_the_failure_free_one(results):
    facts = summary(results, "loss_curve")
    assert facts["replicas"] == [4, 2]
    assert [f["iteration"] for f in facts["failures"]] == [5, 9]
    assert facts["exact"]["maximum"] <= 1e-5
    assert facts["versatile"]["violations"] == facts["exact"]["violations"] == []
    assert facts["versatile"]["maximum"] > facts["exact"]["maximum"]  # other samples


def test_throughput_after_failures_and_the_restarted_job(results):
    facts = summary(results, "failures")
    assert facts["violations"] == []
    assert facts["loss_difference_to_reference"] <= 1e-5
    assert len(facts["restart_s"]) == 1
    assert facts["restart_s"][0] > sum(facts["detect_repair_redo_s"])
    by_g = rows(results / "failures" / "throughput.csv")
    assert [(row["replicas"], row["g"]) for row in by_g] == [("4", "2"), ("3", "3"), ("2", "4")]
    tokens = rows(results / "failures" / "tokens.csv")
    assert int(tokens[-1]["recover_tokens"]) > int(tokens[-1]["restart_tokens"])


def test_the_cost_of_a_failure_adds_up(results):
    for row in rows(results / "cost" / "cost.csv"):
        parts = [float(v or 0) for k, v in row.items() if k.endswith("_s") and k != "total_s"]
        assert float(row["total_s"]) == pytest.approx(sum(parts), abs=0.01)


@browser.needed
def test_the_page_shows_it_all(results, tmp_path):
    assert browser.plots_drawn(results / "index.html", tmp_path) == 6
    text = (results / "index.html").read_text()
    assert text.count("measured") > 10
    assert "simulated or predicted" in text
