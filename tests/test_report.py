"""`status` and `report` over a run's traces, and the report in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from recover_megatron import cli
from recover_megatron.record.run_record import RunRecord, TraceTail
from recover_megatron.record.status import page
from tests import browser


def write(folder: Path, replica: int, position: int, *events: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"trace.r{replica}.p{position}.jsonl").open("a") as trace:
        for event in events:
            who = {"replica": replica, "position": position}
            trace.write(json.dumps({**who, **event}) + "\n")


def commit(time: float, iteration: int, assignment: str, epoch: int) -> dict:
    return {
        "time": time,
        "event": "committed",
        "iteration": iteration,
        "assignment": assignment,
        "microbatches": 4,
        "bucket_epochs": [epoch],
        "world_epoch": epoch,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two replicas of two ranks; replica 1 dies in iteration 3 of 6, of markup in its reason."""
    folder = tmp_path / "run"
    facts = {"train_iters": 6, "tokens_per_sample": 100, "samples_per_microbatch": 2}
    for replica in (0, 1):
        for position in (0, 1):
            started = {"time": 100.0, "event": "started", "host": f"node{replica}"}
            training = {"time": 101.0, "event": "training", "policy": "exact", **facts}
            write(folder, replica, position, started, training)
            for i in (1, 2):
                write(folder, replica, position, commit(100.0 + 2 * i, i, "r0: 0-1\nr1: 2-3", 0))
    write(folder, 1, 1, {"time": 105.0, "event": "died", "reason": "ECC <b>error</b> & more\nline"})
    write(folder, 1, 0, {"time": 105.1, "event": "died", "reason": "rank 3 of its replica"})
    repaired = {"event": "repaired", "world_epoch": 1, "replicas": [0], "replicas_lost": [1]}
    for position in (0, 1):
        again = {"time": 105.3, "iteration": 3, "repair_s": 0.125}
        write(folder, 0, position, {**repaired, **again})
        for i in (3, 4):
            losses = {"lm loss": 5.0 - i}
            write(
                folder,
                0,
                position,
                commit(100.0 + 4 * (i - 1), i, "r0: 0-3", 1),
                {"time": 100.0 + 4 * i, "event": "loss", "iteration": i, "losses": losses},
            )
        write(folder, 0, position, {"time": 113.0, "event": "finished", "code": 0, "replicas": [0]})
    return folder


def test_progress_says_how_a_run_stands(run_dir):
    record = RunRecord()
    record.feed(TraceTail(run_dir).new_events())
    assert (record.iteration, record.replicas, record.live) == (4, (0, 1), (0,))
    assert record.tokens(4) == 800
    assert record.seconds_per_iteration == pytest.approx((112 - 102) / 3)
    assert record.present_tokens_per_second == pytest.approx(240)
    assert record.seconds_left == pytest.approx(2 * 10 / 3)
    (loss,) = record.lost.values()
    assert (loss.replica, loss.hosts, loss.iteration) == (1, ("node1",), 2)
    assert loss.cause == "ECC <b>error</b> & more"


def test_a_tail_reads_each_line_once_and_waits_for_whole_ones(tmp_path):
    write(tmp_path, 0, 0, {"time": 1.0, "event": "started"})
    tail = TraceTail(tmp_path)
    assert len(tail.new_events()) == 1
    path = tmp_path / "trace.r0.p0.jsonl"
    with path.open("a") as trace:
        trace.write('{"time": 2.0, "ev')
    assert tail.new_events() == []
    with path.open("a") as trace:
        trace.write('ent": "finished", "code": 0}\n')
    assert [e.KIND for e in tail.new_events()] == ["finished"]


def test_the_status_page(run_dir):
    record = RunRecord()
    record.feed(TraceTail(run_dir).new_events())
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(page(record, run_dir, now=114.0))
    text = console.export_text()
    assert "4 of 6, 2 s ago" in text
    assert "1 of 2, exact" in text
    assert "240, 120 per live rank" in text
    assert re.search(r"1 +node1 +2 .* 125 ms +ECC <b>error</b> & more", text)


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_folder_without_traces_is_refused(tmp_path, command, capsys):
    assert cli.main([command, str(tmp_path)]) == 2
    assert "no traces" in capsys.readouterr().err


@pytest.fixture
def report(run_dir, capsys) -> Path:
    assert cli.main(["report", str(run_dir)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == run_dir / "report" / "index.html"
    return page


def test_the_report_is_one_page_with_its_plots_beside_it(report):
    text = report.read_text()
    assert text.count("data:image/png;base64,") == 5
    names = {p.stem for p in report.parent.glob("*.png")}
    assert names == {"loss", "throughput", "throughput_per_rank", "replicas", "recoveries"}
    assert "ECC &lt;b&gt;error&lt;/b&gt; &amp; more" in text  # what a rank said is text
    assert "node1" in text
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)  # nothing is fetched


@browser.needed
def test_the_report_in_a_browser(report, tmp_path):
    assert browser.plots_drawn(report, tmp_path) == 5
