"""`recover-megatron status RUN_DIR`: how a run stands, refreshed in the terminal."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from recover_megatron.errors import ConfigError
from recover_megatron.record.run_folder import newest_run
from recover_megatron.record.run_record import RunRecord, TraceTail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run folder (runs/...)")
    parser.add_argument("--once", action="store_true", help="print once instead of refreshing")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="default: 2")


def run(args: argparse.Namespace) -> int:
    args.run_dir = newest_run(args.run_dir)
    if not any(args.run_dir.glob("trace.r*.p*.jsonl")):
        raise ConfigError(f"{args.run_dir} is no run folder: there are no traces in it")
    record, tail, console = RunRecord(), TraceTail(args.run_dir), Console()

    def look() -> RenderableType:
        record.feed(tail.new_events())
        return page(record, args.run_dir, time.time())

    if args.once or not console.is_terminal:
        console.print(look())
        return 0
    with Live(look(), console=console, auto_refresh=False) as live:
        while not (args.run_dir / "exit_code").is_file():
            time.sleep(args.every)
            live.update(look(), refresh=True)
        live.update(look(), refresh=True)
    return 0


def page(record: RunRecord, run_dir: Path, now: float) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(record, run_dir, now):
        facts.add_row(Text(name, style="dim"), value)
    if not record.lost:
        return facts
    losses = Table(title="lost replicas", title_justify="left", box=None, padding=(0, 2))
    for column in ("replica", "host", "last iteration", "at", "repaired in", "cause"):
        losses.add_column(column, overflow="fold")
    for loss in sorted(record.lost.values(), key=lambda x: x.time):
        at = time.strftime("%H:%M:%S", time.localtime(loss.time))
        last = "none" if loss.iteration is None else str(loss.iteration)
        took = f"{1000 * loss.repair_s:.0f} ms"
        hosts = ", ".join(loss.hosts)
        losses.add_row(str(loss.replica), hosts, last, at, took, Text(loss.cause))
    return Group(facts, Text(""), losses)


def _facts(record: RunRecord, run_dir: Path, now: float) -> list[tuple[str, str]]:
    of = f" of {record.training.train_iters}" if record.training.train_iters else ""
    when = ""
    if record.commits:
        when = f", {now - record.commits[record.iteration].time:.0f} s ago"
    loss = record.losses.get(record.iteration)
    rate, seconds = record.present_tokens_per_second, record.seconds_per_iteration
    left, live = record.seconds_left, record.live
    ranks = len(live) * record.ranks_per_replica
    rows = [
        ("run", str(run_dir)),
        ("iteration", f"{record.iteration}{of}{when}"),
        ("loss", "" if loss is None else f"{loss:.6f}"),
        ("seconds per iteration", "" if seconds is None else f"{seconds:.3f}"),
    ]
    if rate is not None:
        rows.append(("tokens/s", f"{rate:,.0f}, {rate / max(1, ranks):,.0f} per live rank"))
    rows.append(
        ("live replicas", f"{len(live)} of {len(record.replicas)}, {record.training.policy}")
    )
    if record.save_failures:
        rows.append(("failed saves", str(record.save_failures)))
    if record.exit_code is not None:
        rows.append(("ended", f"with code {record.exit_code}"))
    elif left is not None:
        rows.append(("time left", _duration(left)))
    return rows


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    days, hours = divmod(hours, 24)
    minutes, seconds = divmod(rest, 60)
    return f"{days} d {hours} h" if days else f"{hours}:{minutes:02d}:{seconds:02d}"
