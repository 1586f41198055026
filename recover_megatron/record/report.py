"""`recover-megatron report RUN_DIR`: a self-contained HTML page of a run, and its plots as PNGs."""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

from recover_megatron import plots
from recover_megatron.errors import ConfigError
from recover_megatron.record.audit import AuditedRun, Recovery
from recover_megatron.record.run_folder import newest_run
from recover_megatron.record.run_record import RunRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run folder (runs/...)")
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/report")


def run(args: argparse.Namespace) -> int:
    args.run_dir = newest_run(args.run_dir)
    try:
        record = AuditedRun(args.run_dir)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not record.commits:
        raise ConfigError(
            f"{args.run_dir}: no iteration was committed, so there is nothing to draw"
        )
    out = args.out or args.run_dir / "report"
    out.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, title, figure in _figures(record, record.recoveries):
        picture = plots.png(figure)
        (out / f"{name}.png").write_bytes(picture)
        pictures.append({"title": title, "data": base64.b64encode(picture).decode()})
    (out / "index.html").write_text(_page(args.run_dir, record, pictures), encoding="utf-8")
    print(out / "index.html")
    return 0


def _page(run_dir: Path, record: RunRecord, pictures: list[dict[str, str]]) -> str:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    )
    losses = sorted(record.lost.values(), key=lambda loss: loss.time)
    return template.render(
        title=f"Run {run_dir.name}", facts=_facts(record), plots=pictures, losses=losses
    )


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    times = [record.commits[i].time for i in sorted(record.commits)]
    tokens = [record.tokens(i) for i in record.commits]
    last, code = record.training.train_iters, record.exit_code
    facts = [
        ("iterations", f"{len(record.commits)}, to {record.iteration} of {last or '?'}"),
        (
            "replicas",
            f"{len(record.replicas)} started, {len(record.live)} left, "
            f"{record.ranks_per_replica} ranks each; policy {record.training.policy or '?'}",
        ),
        ("first to last commit", f"{times[-1] - times[0]:.1f} s"),
        ("exit code", "none yet" if code is None else str(code)),
    ]
    if None not in tokens:
        facts.append(("tokens committed", f"{sum(t for t in tokens if t):,}"))
    if record.losses:
        facts.append(("last loss", f"{record.losses[max(record.losses)]:.6f}"))
    if record.save_failures:
        facts.append(("failed saves", str(record.save_failures)))
    return facts


def _figures(record: RunRecord, recoveries: list[Recovery]) -> list[tuple[str, str, plots.Figure]]:
    """(file name, title, figure)."""
    lost = [r.iteration for r in recoveries if r.iteration is not None]
    live = {i: len(commit.replicas) for i, commit in record.commits.items()}
    figures = []
    if record.losses:
        figures.append(("loss", "Loss", plots.by_iteration(record.losses, "lm loss", lost)))
    if rates := record.tokens_per_second():
        whole = plots.by_iteration(rates, "tokens/s, whole job", lost)
        figures.append(("throughput", "Throughput", whole))
        each = {i: rate / (live[i] * record.ranks_per_replica) for i, rate in rates.items()}
        per_rank = plots.by_iteration(each, "tokens/s per live rank", lost)
        figures.append(("throughput_per_rank", "Throughput per live rank", per_rank))
    replicas = plots.by_iteration(live, "live replicas", lost, steps=True)
    figures.append(("replicas", "Live replicas", replicas))
    if recoveries:
        bars = plots.timeline([_bar(recovery) for recovery in recoveries])
        figures.append(("recoveries", "Recoveries by phase", bars))
    return figures


def _bar(recovery: Recovery) -> plots.Bar:
    lost = ", ".join(map(str, recovery.replicas_lost))
    return plots.Bar(
        f"replica {lost} at {recovery.iteration or 'no iteration'}",
        recovery.detect_s or 0.0,
        recovery.repair_s,
        recovery.redo_s or 0.0,
    )
