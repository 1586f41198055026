"""`recover-megatron compare`: a run with failures beside a failure-free reference.

Writes summary.json and report.png: both losses over each other, their difference, live replicas
and tokens/s by iteration.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from recover_megatron import plots
from recover_megatron.console import say
from recover_megatron.errors import ConfigError
from recover_megatron.record.audit import AuditedRun, missing_samples
from recover_megatron.record.run_folder import newest_run

_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*")
_VALIDATION = re.compile(r"validation loss at iteration (\d+) .*?lm loss value: ([-+.\dEe]+)")
_NUMBER = r"([-+.\dEe]+)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", required=True, help="run folder of the job with failures")
    parser.add_argument(
        "--reference", required=True, help="log file or run folder of the failure-free job"
    )
    parser.add_argument("--tokens-per-iteration", type=int, default=0, help="for tokens/s")
    parser.add_argument("--out", default=".", help="folder for summary.json and report.png")


def run(args: argparse.Namespace) -> int:
    try:
        record = AuditedRun(newest_run(Path(args.run)))
        is_run = Path(args.reference).is_dir()
        reference = AuditedRun(newest_run(Path(args.reference))) if is_run else None
        losses = reference.losses if reference else read_log(Path(args.reference)).losses
        common = sorted(set(record.losses) & set(losses))
        if not common:
            raise ValueError(
                f"no iteration is in both: {args.run} has {_span(record.losses)}, {args.reference} "
                f"{_span(losses)}"
            )
        summary = summarize(record, losses, reference, args.tokens_per_iteration)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if len(common) < max(len(record.losses), len(losses)):
        say(
            f"compared are the {len(common)} iterations {_span(common)} that both have, of "
            f"{len(record.losses)} and {len(losses)}"
        )
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_summary(summary, out)
    plot(record, losses, args.tokens_per_iteration, out / "report.png")
    print(json.dumps({k: v for k, v in summary.items() if not isinstance(v, list)}, indent=1))
    return 0


def _span(iterations: Collection[int]) -> str:
    return f"{min(iterations)}-{max(iterations)}" if iterations else "none"


class Log:
    """The numbers of a Megatron console log by iteration (a later line for the same one wins)."""

    def __init__(self, text: str):
        self.losses: dict[int, float] = {}
        self.step_s: dict[int, float] = {}
        self.grad_norms: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.batches: dict[int, float] = {}
        self.balance: dict[int, float] = {}  # of experts
        self.validation_losses = {int(k): float(v) for k, v in _VALIDATION.findall(text)}
        for line in _LINE.finditer(text):
            for numbers, name, unit in (
                (self.losses, "lm loss", 1.0),
                (self.step_s, r"elapsed time per iteration \(ms\)", 1e-3),
                (self.grad_norms, "grad norm", 1.0),
                (self.rates, "learning rate", 1.0),
                (self.batches, "global batch size", 1.0),
                (self.balance, "load_balancing_loss", 1.0),
            ):
                if found := re.search(rf"{name}:\s+{_NUMBER}", line[0]):
                    numbers[int(line[1])] = float(found[1]) * unit


def read_log(path: Path) -> Log:
    log = Log(path.read_text(encoding="utf-8", errors="replace"))
    if not log.losses:
        raise ValueError(f"{path} has no Megatron log line with an 'lm loss'")
    return log


def summarize(
    record: AuditedRun,
    reference_losses: Mapping[int, float],
    reference: AuditedRun | None,
    tokens_per_iteration: int,
) -> dict[str, Any]:
    """The facts of summary.json. `reference` gives the failure-free run's sample ids."""
    commits = record.commits
    shared = set(record.losses) & set(reference_losses)
    rates = record.tokens_per_second(tokens_per_iteration)
    return {
        "iterations": len(commits),
        "compared_iterations": len(shared),
        "microbatches_per_iteration": next(iter(commits.values())).microbatches,
        "committed_microbatches": [commit.microbatches for commit in commits.values()],
        "samples_identical": samples_identical(record, reference) if reference else None,
        "max_abs_loss_difference": max_difference(
            {i: record.losses[i] for i in shared}, {i: reference_losses[i] for i in shared}
        ),
        "replicas_start": len(record.replicas),
        "replicas_end": len(record.survivors),
        "parameters_bitwise_equal": record.parameters_bitwise_equal,
        "recoveries": [r.as_dict() for r in record.recoveries],
        "tokens_per_s": median(rates.values()) if rates else None,
    }


def samples_identical(record: AuditedRun, reference: AuditedRun) -> bool:
    """Of the iterations that both have committed."""
    mine, theirs = record.samples, reference.samples
    shared = set(mine) & set(theirs)
    known = not any(missing_samples(mine[i]) for i in shared)
    return known and bool(shared) and all(mine[i] == theirs[i] for i in shared)


def max_difference(losses: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Over the iterations that both have. Raises ValueError if they do not have the same ones."""
    if set(losses) != set(reference):
        raise ValueError(
            f"the runs logged different iterations: {len(losses)} and {len(reference)} of them"
        )
    return max(abs(losses[i] - reference[i]) for i in losses)


def write_summary(summary: Mapping[str, Any], folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def plot(
    record: AuditedRun, reference: Mapping[int, float], tokens_per_iteration: int, path: Path
) -> None:
    """report.png: four panels over the iterations; a vertical line marks each recovery."""
    marks = [
        (r.iteration, f"replica {', '.join(map(str, r.replicas_lost))} lost in {r.phase}")
        for r in record.recoveries
        if r.iteration is not None
    ]
    runs = plots.Comparison(
        losses=record.losses,
        reference=reference,
        live={i: len(commit.replicas) for i, commit in record.commits.items()},
        rates=record.tokens_per_second(tokens_per_iteration),
        marks=marks,
    )
    path.write_bytes(plots.png(plots.comparison(runs)))
