"""`recover-megatron report RUN_DIR`: a self-contained HTML page of a run, and its plots as PNGs."""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recover_megatron.errors import ConfigError
from recover_megatron.record.progress import Progress
from recover_megatron.record.run_folder import newest_run
from recover_megatron.record.run_record import Recovery, RunRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run folder (runs/...)")
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/report")


def run(args: argparse.Namespace) -> int:
    args.run_dir = newest_run(args.run_dir)
    try:
        record = RunRecord(args.run_dir)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    progress = Progress()
    progress.feed(record.events)
    if not progress.commits:
        raise ConfigError(
            f"{args.run_dir}: no iteration was committed, so there is nothing to draw"
        )
    out = args.out or args.run_dir / "report"
    out.mkdir(parents=True, exist_ok=True)
    plots = []
    for name, title, figure in _figures(progress, record.recoveries):
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120)
        (out / f"{name}.png").write_bytes(picture.getvalue())
        plots.append({"title": title, "data": base64.b64encode(picture.getvalue()).decode()})
    (out / "index.html").write_text(_page(args.run_dir, progress, plots), encoding="utf-8")
    print(out / "index.html")
    return 0


def _page(run_dir: Path, progress: Progress, plots: list[dict[str, str]]) -> str:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    )
    losses = sorted(progress.lost.values(), key=lambda loss: loss.time)
    return template.render(
        title=f"Run {run_dir.name}", facts=_facts(progress), plots=plots, losses=losses
    )


def _facts(progress: Progress) -> list[tuple[str, str]]:
    times = [progress.commits[i][0] for i in sorted(progress.commits)]
    tokens = [progress.tokens(i) for i in progress.commits]
    facts = [
        ("iterations", f"{len(progress.commits)}, to {progress.iteration} of "
         f"{progress.train_iters or '?'}"),
        ("replicas", f"{len(progress.started)} started, {len(progress.live)} left, "
         f"{progress.ranks_per_replica} ranks each; policy {progress.policy or '?'}"),
        ("first to last commit", f"{times[-1] - times[0]:.1f} s"),
        ("exit code", "none yet" if progress.exit_code is None else str(progress.exit_code)),
    ]  # fmt: skip
    if None not in tokens:
        facts.append(("tokens committed", f"{sum(t for t in tokens if t):,}"))
    if progress.losses:
        facts.append(("last loss", f"{progress.losses[max(progress.losses)]:.6f}"))
    if progress.save_failures:
        facts.append(("failed saves", str(progress.save_failures)))
    return facts


def _figures(progress: Progress, recoveries: list[Recovery]) -> list[tuple[str, str, Any]]:
    """(file name, title, matplotlib figure)."""
    lost = [r.iteration for r in recoveries if r.iteration is not None]
    iterations = sorted(progress.commits)
    live = [len(progress.commits[i][2]) for i in iterations]
    figures = []
    if progress.losses:
        known = sorted(progress.losses)
        loss = _lines(known, [progress.losses[i] for i in known], "lm loss", lost)
        figures.append(("loss", "Loss", loss))
    rates = _rates(progress)
    if rates:
        at = list(rates)
        total = _lines(at, [rates[i] for i in at], "tokens/s, whole job", lost)
        ranks = {i: len(progress.commits[i][2]) * progress.ranks_per_replica for i in at}
        each = [rates[i] / ranks[i] for i in at]
        figures.append(("throughput", "Throughput", total))
        per_rank = _lines(at, each, "tokens/s per live rank", lost)
        figures.append(("throughput_per_rank", "Throughput per live rank", per_rank))
    replicas = _lines(iterations, live, "live replicas", lost, steps=True)
    figures.append(("replicas", "Live replicas", replicas))
    if recoveries:
        figures.append(("recoveries", "Recoveries by phase", _timeline(recoveries)))
    return figures


def _rates(progress: Progress) -> dict[int, float]:
    """Tokens per second by iteration, from one commit to the next."""
    rates: dict[int, float] = {}
    for i in sorted(progress.commits):
        tokens, before = progress.tokens(i), progress.commits.get(i - 1)
        if tokens is not None and before is not None:
            rates[i] = tokens / max(1e-9, progress.commits[i][0] - before[0])
    return rates


def _lines(
    x: Sequence[int], y: Sequence[float], name: str, lost: list[int], steps: bool = False
) -> Any:
    figure, axes = _new_figure(3.2)
    axes.plot(x, y, "C0.-" if len(x) < 60 else "C0-", lw=1.2, **_step(steps))
    axes.set_xlabel("iteration")
    axes.set_ylabel(name)
    if name != "lm loss":
        axes.set_ylim(bottom=0)
    if steps:
        axes.yaxis.get_major_locator().set_params(integer=True)
    for iteration in lost:
        axes.axvline(iteration, color="C3", ls=":", lw=1)
    return figure


def _step(steps: bool) -> dict[str, str]:
    return {"drawstyle": "steps-mid"} if steps else {}


def _timeline(recoveries: list[Recovery]) -> Any:
    """A bar for each recovery: seen, repaired, recomputed and committed."""
    figure, axes = _new_figure(0.9 + 0.4 * len(recoveries))
    phases = (
        ("seen", "detect_s", "C1"),
        ("repaired", "repair_s", "C3"),
        ("redone", "redo_s", "C2"),
    )
    for row, recovery in enumerate(recoveries):
        start = 0.0
        for name, attribute, color in phases:
            took = 1000 * (getattr(recovery, attribute) or 0.0)
            axes.barh(row, took, left=start, color=color, label=name if row == 0 else None)
            start += took
    labels = [
        f"replica {', '.join(map(str, r.replicas_lost))} at {r.iteration or 'no iteration'}"
        for r in recoveries
    ]
    axes.set_yticks(range(len(recoveries)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the replica died (where that is known), else since it was seen")
    figure.legend(loc="outside upper right", ncols=len(phases), fontsize=8)
    return figure


def _new_figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.add_subplot()
