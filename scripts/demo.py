"""The demo, run by scripts/demo.sh: does the loss curve survive the loss of half the replicas?

1. trains without failures: plain Megatron (one replica's worth of ranks), and four replicas with
   --recover;
2. trains again while two of the four replicas are killed, one in the middle of an all-reduce and
   one in its backward pass;
3. measures what --recover costs without failures, in alternation with plain data parallelism;
4. compares, prints a table, and writes summary.json and report.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from recover_megatron.record import compare
from recover_megatron.testing.rehearsal import Jobs, Rehearsal, corpus

LIMIT = 1e-5  # largest accepted difference of the loss
FAULTS = "1.3@6:sync.2,0.1@14:backward.1"
OPTIONS = ("--recover-bucket-mb", "0.1", "--recover-check-replicas-interval", "5")


def full(prefix: str) -> Rehearsal:
    """The demo's job; as a file: configs/demo.yaml."""
    return Rehearsal(prefix, 20, 16, tp=2, pp=2, hidden_size=128, seq_length=128, layers=4)


def step_time_ratio(demo: Jobs, job: Rehearsal) -> float:
    """Median step with --recover and no failure / plain Megatron data parallelism over gloo, same
    job, two replicas, in alternation; the first two steps of each run warm up."""
    steps: dict[str, list[float]] = {"plain": [], "recover": []}
    for turn in range(2):
        for kind in ("plain", "recover"):
            name = f"step-time-{kind}-{turn}"
            shutil.rmtree(demo.out / name, ignore_errors=True)  # of an earlier demo
            command = job.plain(2) if kind == "plain" else job.recover(2, demo.out / name)
            log = compare.read_log(demo.run(name, command))
            steps[kind] += [s for i, s in log.step_s.items() if i > 2]
    return median(steps["recover"]) / median(steps["plain"])


def table(summary: dict[str, Any], console: Console) -> None:
    grid = Table(title="with failures, against the run without", show_header=False)
    wanted = (
        "iterations replicas_start replicas_end microbatches_per_iteration samples_identical "
        "max_abs_loss_difference max_abs_loss_difference_to_plain parameters_bitwise_equal "
        "tokens_per_s step_time_ratio seconds"
    ).split()
    for name in wanted:
        value = summary.get(name)
        if value is not None:
            grid.add_row(
                name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value)
            )
    console.print(grid)
    recoveries = Table(title="recoveries (seconds)")
    columns = (
        "iteration phase replicas_lost detect_s repair_s redo_s reassigned_microbatches".split()
    )
    for column in columns:
        recoveries.add_column(column.replace("_", " "))
    for recovery in summary["recoveries"]:
        cells = (recovery[c] for c in columns)
        recoveries.add_row(*(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells))
    console.print(recoveries)


def passed(summary: dict[str, Any]) -> bool:
    differences = [
        summary["max_abs_loss_difference"],
        summary.get("max_abs_loss_difference_to_plain", 0.0),
    ]
    return bool(
        summary["samples_identical"]
        and summary["parameters_bitwise_equal"]
        and max(differences) <= LIMIT
        and set(summary["committed_microbatches"]) == {summary["microbatches_per_iteration"]}
        and not any(r["live_microbatches_recomputed"] for r in summary["recoveries"])
        and summary["replicas_end"] == summary["replicas_start"] - len(summary["recoveries"])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two replicas, one kill, 90 seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    args = parser.parse_args()
    demo = Jobs(args.out)
    prefix = corpus(Path("runs/data"))
    demo.say("text prepared")
    if args.quick:
        job, replicas, faults = Rehearsal(prefix, 10, 8, tp=2, pp=2), 2, "1.2@4:sync.1"
    else:
        job, replicas, faults = full(prefix), 4, FAULTS
    reference = demo.recover("without-failures", job, replicas, *OPTIONS)
    record = demo.recover("with-failures", job, replicas, *OPTIONS, "--recover-inject", faults)
    tokens = job.tokens_per_iteration
    summary = compare.summarize(record, reference.losses, reference, tokens)
    summary["violations"] = record.violations(job.iterations, job.microbatches)
    summary["step_time_ratio"] = None  # not measured with --quick
    losses = reference.losses
    if not args.quick:
        losses = demo.plain("plain", job).losses
        summary["max_abs_loss_difference_to_plain"] = compare.max_difference(record.losses, losses)
        summary["step_time_ratio"] = step_time_ratio(demo, replace(job, iterations=18, tp=1))
    summary["seconds"] = round(demo.seconds)
    compare.plot(record, losses, tokens, args.out / "report.png")
    compare.write_summary(summary, args.out)
    table(summary, demo.console)
    good = passed(summary) and not summary["violations"]
    for violation in summary["violations"]:
        demo.say(violation)
    demo.say(f"{'PASSED' if good else 'FAILED'}: {args.out}/report.png, {args.out}/summary.json")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
