"""Each published figure beside ours: the rows of the page's first table and of
docs/reproduction.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiment import published, read_csv

COMMAND = "scripts/paper/reproduce.sh --only "
BEGIN = "<!-- made by scripts/paper/reproduce.sh --docs -->"
END = "<!-- end of table -->"


@dataclass(frozen=True)
class Row:
    figure: str
    published: float | None
    ours: float | None
    kind: str  # measured, simulated or fitted
    experiment: str  # of reproduce.py
    source: str  # machine, date and commit

    @property
    def ratio(self) -> float | None:
        if self.published is None or self.ours is None or not self.published:
            return None
        return self.ours / self.published

    def cells(self) -> list[str]:
        numbers = [_number(self.published), _number(self.ours), _number(self.ratio)]
        return [self.figure, *numbers, self.kind, f"`--only {self.experiment}`", self.source]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def summary(out: Path, name: str) -> dict[str, Any] | None:
    path = out / name / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else None


def passes_reference_at(failures: dict[str, Any]) -> float | None:
    """G at which G s / (G t_c + T_r) is the reference's throughput; None if it never is."""
    tokens = failures["tokens_per_iteration"] / failures["microbatches_per_iteration"]
    reference = failures["reference_tok_s_rank"]
    gained = tokens - reference * failures["t_c_s"]
    return reference * failures["t_r_s"] / gained if gained > 0 else None


def rows(out: Path) -> list[Row]:
    """Of what has been measured so far."""
    found: list[Row] = []
    for name, kind in (
        ("loss_curve", _loss),
        ("failures", _failures),
        ("cost", _cost),
        ("simulated", _simulated),
    ):
        facts = summary(out, name)
        if facts is not None:
            found += kind(out, facts, f"{facts['date']}, {facts['commit']}")
    return found


def _loss(out: Path, facts: dict[str, Any], source: str) -> Iterator[Row]:
    table = published("recover_loss_7b_512gpu")
    gaps = [abs(float(r["recover_loss"]) - float(r["reference_loss"])) for r in table]
    mean, largest = (fmean(gaps), max(gaps)) if gaps else (None, None)
    for where, more in (("", facts), (", 4 x TP2 x PP2", summary(out, "loss_curve_3d"))):
        if more is None:
            continue
        source = f"{more['date']}, {more['commit']}"
        for policy in ("versatile", "exact"):
            d, words = more[policy], f"difference of the loss, `{policy}`{where}"
            paper = (mean, largest) if policy == "versatile" and not where else (None, None)
            yield Row(f"{words}: mean", paper[0], d["mean"], "measured", "curve", source)
            yield Row(f"{words}: largest", paper[1], d["maximum"], "measured", "curve", source)
            if policy == "versatile":
                figure = f"{words}: mean, of ten iterations at a time"
                yield Row(figure, None, d["mean_of_10"], "measured", "curve", source)


def _failures(out: Path, facts: dict[str, Any], source: str) -> Iterator[Row]:
    paper = [float(r["ratio"]) for r in published("recover_vs_restart_after_failure_128gpu")]
    for k, ours in enumerate(facts["ratio_after_failure"]):
        figure = f"throughput per GPU, recover / restart, after failure {k + 1}"
        theirs = paper[k] if k < len(paper) else None
        yield Row(figure, theirs, ours, "measured", "failures", source)
    figure = "G at which the survivors pass the reference (fit; published: between 128 and 256)"
    yield Row(figure, None, passes_reference_at(facts), "measured", "failures", source)
    totals = published("recover_tokens_per_gpu_hour_128gpu")
    more = None
    if totals:
        more = float(totals[-1]["recover_mtokens"]) / float(totals[-1]["restart_mtokens"])
    figure = "tokens for the same GPU-hours, recover / restart"
    yield Row(figure, more, 1 + facts["tokens_at_the_end"], "measured", "failures", source)
    phases = published("recover_throughput_phases_512gpu")
    ours_by_phase = read_csv(out / "failures" / "phases.csv")
    for k, ours_row in enumerate(ours_by_phase):
        theirs = None
        if phases:
            theirs = float(phases[k]["recover_tok_s_gpu"]) / float(phases[k]["reference_tok_s_gpu"])
        ours = float(ours_row["recover_tok_s_rank"]) / float(ours_row["reference_tok_s_rank"])
        figure = f"throughput per GPU, recover / reference, {ours_row['phase']}"
        yield Row(figure, theirs, ours, "measured", "failures", source)


def _cost(out: Path, facts: dict[str, Any], source: str) -> Iterator[Row]:
    paper = {
        (r["checkpoint_interval_steps"], r["system"]): float(r["total_s"])
        for r in published("recover_failure_cost_128gpu")
    }
    for row in read_csv(out / "cost" / "cost.csv"):
        interval, system = row["checkpoint_interval_steps"], row["system"]
        theirs, ours = paper.get((interval, system)), float(row["total_s"])
        figure = f"seconds for one failure, {system}, N = {interval}"
        yield Row(figure, theirs, ours, "measured", "cost", source)


def _simulated(out: Path, facts: dict[str, Any], source: str) -> Iterator[Row]:
    for row in read_csv(out / "simulated" / "against_paper.csv"):
        figure = f"{row['table']}: {row['figure']}"
        theirs, ours = float(row["published"]), float(row["simulated"])
        yield Row(figure, theirs, ours, "simulated", "simulated", source)
    for name, goodput in facts["goodput"].items():
        yield Row(f"goodput, {name}", None, goodput, "predicted", "simulated", source)


def write_docs(found: Sequence[Row], machine: str, path: Path) -> None:
    """Put the table between the marks of docs/reproduction.md."""
    head = "| figure | published | ours | ratio | kind | command | date, commit |\n"
    lines = "".join(f"| {' | '.join(row.cells())} |\n" for row in found)
    before, _, rest = path.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    table = f"\n\nMachine: {machine}.\n\n{head}|{'---|' * 7}\n{lines}\n"
    path.write_text(before + BEGIN + table + END + after)
