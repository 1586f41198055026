"""runs/paper/index.html: one self-contained page of what the experiments have left."""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comparison
import jinja2
from experiment import published, read_csv
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass
class Section:
    name: str
    title: str
    text: str
    plots: list[str] = field(default_factory=list)
    tables: list[tuple[str, list[list[str]]]] = field(default_factory=list)


def write(out: Path) -> Path:
    """The page; its plots beside it as PNGs."""
    sections = [
        _loss(out, "loss_curve", "Loss curve, 16 replicas of which 8 are lost"),
        _loss(out, "loss_curve_3d", "Loss curve, 4 replicas of TP2 x PP2 of which 2 are lost"),
        _failures(out),
        _throughput(out),
        _cost(out),
        _simulated(out),
    ]
    there = [section for section in sections if section is not None]
    found = comparison.rows(out)
    table = [["figure", "published", "ours", "ratio", "kind", "command", "date, commit"]]
    table += [row.cells() for row in found]
    text = (
        "Published figures: 7B on 128 and 512 GPUs. Ours: a model of some 100,000 parameters here."
    )
    there.append(Section("table", "All figures", text, tables=[("", table)]))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text())
    path = out / "index.html"
    path.write_text(template.render(sections=there, machine=machine(out)))
    return path


def machine(out: Path) -> str:
    names = ("loss_curve", "failures", "cost", "simulated")
    facts = (comparison.summary(out, name) for name in names)
    return " / ".join(dict.fromkeys(f["machine"] for f in facts if f is not None))


def _figure(height: float = 3.6, panels: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(10, height), layout="constrained")
    return figure, figure.subplots(panels, 1, sharex=True)


def _encode(figure: Figure, path: Path) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    path.write_bytes(picture.getvalue())
    return base64.b64encode(picture.getvalue()).decode()


def _table(path: Path) -> tuple[str, list[list[str]]]:
    with path.open(newline="") as file:
        return path.name, list(csv.reader(file))


def _column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _loss(out: Path, name: str, title: str) -> Section | None:
    facts = comparison.summary(out, name)
    if facts is None:
        return None
    rows = read_csv(out / name / "losses.csv")
    steps = _column(rows, "step")
    figure, (loss, difference) = _figure(6, 2)
    reference = _column(rows, "reference")
    loss.plot(steps, reference, "k-", lw=4, alpha=0.25, label="without failures (plain Megatron)")
    for policy, color in (("exact", "C0"), ("versatile", "C1")):
        values = _column(rows, policy)
        loss.plot(steps, values, f"{color}-", lw=1, label=policy)
        gaps = [max(1e-9, abs(a - b)) for a, b in zip(values, reference, strict=True)]
        difference.semilogy(steps, gaps, f"{color}-", lw=0.8, label=policy)
    for failure in facts["failures"]:
        for axes in (loss, difference):
            axes.axvline(failure["iteration"], color="C3", ls=":", lw=0.8)
    loss.set_ylabel("lm loss")
    loss.legend()
    difference.set_ylabel("|loss - reference|")
    difference.set_xlabel("iteration; dotted: a replica is lost during gradient sync")
    exact, versatile = facts["exact"], facts["versatile"]
    text = (
        f"{facts['replicas'][0]} replicas, {facts['replicas'][1]} at the end; "
        f"{facts['microbatches_per_iteration']} microbatches and {facts['tokens_per_iteration']} "
        f"tokens an iteration. exact: the same samples, largest difference "
        f"{exact['maximum']:.1e}. versatile: other samples after a loss, so each iteration's loss "
        f"is that of other text; mean difference {versatile['mean']:.4f}, of ten iterations at a "
        f"time {versatile['mean_of_10']:.4f} (the paper's have some 500 times the tokens)."
    )
    at = [row for row in rows if row["step"] in ("1", "50", "100", "150", "200", "250")]
    columns = ["step", "reference", "exact", "versatile", "live_replicas"]
    ours = [columns, *([f"{float(r[c]):.6g}" for c in columns] for r in at)]
    section = Section(name, title, text, [_encode(figure, out / f"{name}.png")], [("ours", ours)])
    paper = published("recover_loss_7b_512gpu")
    if paper and name == "loss_curve":
        section.tables.append(("paper, 7B on 512 GPUs", _lines(paper)))
    return section


def _lines(rows: list[dict[str, str]]) -> list[list[str]]:
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def _failures(out: Path) -> Section | None:
    facts = comparison.summary(out, "failures")
    if facts is None:
        return None
    rows = read_csv(out / "failures" / "after_failure.csv")
    figure, axes = _figure()
    failures = _column(rows, "failure")
    axes.plot(failures, _column(rows, "ratio"), "C0o-", label="measured here")
    paper = published("recover_vs_restart_after_failure_128gpu")
    if paper:
        known = (_column(paper, "failure"), _column(paper, "ratio"))
        axes.plot(*known, "C3s--", label="paper, 128 GPUs")
    axes.set_xlabel("after failure")
    axes.set_ylabel("tokens/s per rank,\nrecover / restart")
    axes.set_ylim(bottom=0)
    axes.legend()
    plots = [_encode(figure, out / "after_failure.png")]
    figure, axes = _figure()
    tokens = read_csv(out / "failures" / "tokens.csv")
    for name, color in (("restart", "C3"), ("recover", "C0")):
        values = _column(tokens, f"{name}_tokens")
        axes.plot(_column(tokens, "rank_s"), values, f"{color}o-", label=name)
    axes.set_xlabel("rank-seconds")
    axes.set_ylabel("tokens committed")
    axes.legend()
    plots.append(_encode(figure, out / "tokens.png"))
    detect, repair, redo = facts["detect_repair_redo_s"]
    down = facts["restart_s"]
    shares = (
        f"each rank has {facts['share_of_a_core']:g} of a core, as a GPU of its own"
        if facts["share_of_a_core"]
        else f"ranks share the cores ({facts['no_shares_because']})"
    )
    text = (
        f"{facts['replicas']} replicas of one rank; one is lost every "
        f"{facts['iterations_between_failures']} iterations; {shares}. The restarted job has all "
        f"its ranks again, saves every {facts['checkpoint_interval']} iterations and is down for "
        f"{min(down):.0f} to {max(down):.0f} s at each failure. Recovery: seen after "
        f"{1000 * detect:.0f} ms, repaired in {1000 * repair:.0f} ms, redone in "
        f"{1000 * redo:.0f} ms. In the paper both systems wait 130 to 140 s for NCCL's time-out, "
        "so that there the ratio comes from the survivors' larger G alone; here there is none to "
        "wait for, and the ratio is mostly that of a start of all processes to a repair, at this "
        "distance between failures."
    )
    tables = [_table(out / "failures" / name) for name in ("after_failure.csv", "tokens.csv")]
    title = "Against checkpoint-restart, failure after failure"
    return Section("failures", title, text, plots, tables)


def _throughput(out: Path) -> Section | None:
    facts = comparison.summary(out, "failures")
    if facts is None:
        return None
    rows = read_csv(out / "failures" / "throughput.csv")
    figure, axes = _figure()
    g = _column(rows, "g")
    axes.plot(g, _column(rows, "measured_tok_s_rank"), "C0o", label="measured")
    axes.plot(g, _column(rows, "formula"), "C0-", lw=1, label="G s / (G t_c + T_r)")
    axes.axhline(facts["reference_tok_s_rank"], color="k", ls="--", lw=1, label="reference")
    axes.set_xlabel("G, microbatches of one replica: grows as replicas are lost")
    axes.set_ylabel("tokens/s per rank")
    axes.set_ylim(bottom=0)
    axes.legend()
    passes = comparison.passes_reference_at(facts)
    measured = facts["passes_reference_at_g"]
    text = (
        f"Fit: t_c = {1000 * facts['t_c_s']:.0f} ms, T_r = {1000 * facts['t_r_s']:.0f} ms. By the "
        "fit the survivors "
        + (f"pass plain Megatron at G = {passes:.1f}" if passes else "never pass plain Megatron")
        + (f"; the first measured point above it is G = {measured}. " if measured else ". ")
        + "Below: tokens/s per rank before, between and after the failures."
    )
    tables = [_table(out / "failures" / name) for name in ("throughput.csv", "phases.csv")]
    paper = published("recover_throughput_phases_512gpu")
    if paper:
        tables.append(("paper, 512 GPUs", _lines(paper)))
    title = "Throughput against G, and without failures"
    return Section("throughput", title, text, [_encode(figure, out / "throughput.png")], tables)


def _cost(out: Path) -> Section | None:
    if comparison.summary(out, "cost") is None:
        return None
    figure, axes = _figure()
    _stack(axes, read_csv(out / "cost" / "cost.csv"))
    plots = [_encode(figure, out / "cost.png")]
    text = (
        "Seconds from the last checkpoint, saved every N iterations, to the same iteration "
        "after a failure. On one machine torchrun sees a killed process at once, the checkpoint is "
        "small and on a local disk, and starting Python is what a restart costs. The save is the "
        "job's first, which starts Megatron's writer processes."
    )
    tables = [_table(out / "cost" / "cost.csv")]
    paper = published("recover_failure_cost_128gpu")
    if paper:
        tables.append(("paper, 128 GPUs", _lines(paper)))
    return Section("cost", "What one failure costs", text, plots, tables)


def _stack(axes: Axes, rows: list[dict[str, str]]) -> None:
    parts = [name for name in rows[0] if name.endswith("_s") and name != "total_s"]
    labels = [f"{r['checkpoint_interval_steps']}, {r['system']}" for r in rows]
    left = [0.0] * len(rows)
    for part in parts:
        values = [float(row[part] or 0) for row in rows]
        axes.barh(labels, values, left=left, label=part.removesuffix("_s").replace("_", " "))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(fontsize=8)


def _simulated(out: Path) -> Section | None:
    facts = comparison.summary(out, "simulated")
    if facts is None:
        return None
    picture = (out / "simulated" / "goodput.png").read_bytes()
    text = (
        f"recover-megatron simulate: the policies and the decision table of the product over a "
        f"trace of failures. Of {facts['figures']} published figures it gives back "
        f"{facts['within_5_percent']} within 5 % (constants fitted: configs/calibration/); the "
        f"worst is {facts['worst'][1]} ({100 * facts['worst'][4]:+.1f} %). The plot predicts."
    )
    if facts["largest_error_here"] is not None:
        text += (
            " Below, too: the run that was measured here, from its own t_c, T_r, detection and "
            f"repair; largest error {100 * facts['largest_error_here']:.1f} %."
        )
    tables = [_table(out / "simulated" / f"against_{whom}.csv") for whom in ("paper", "here")]
    plot = base64.b64encode(picture).decode()
    return Section(
        "simulated", "Simulated: the paper's scale, and 100,000 GPUs", text, [plot], tables
    )
