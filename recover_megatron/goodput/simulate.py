"""`recover-megatron simulate`: what a job would commit under a failure trace, by system and size.

Everything it prints and draws is simulated, from the costs in a calibration file.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from recover_megatron import plots
from recover_megatron.config import POLICIES
from recover_megatron.errors import ConfigError
from recover_megatron.goodput.costs import Growth, Recover, Restart, SimulatedJob, System
from recover_megatron.goodput.failures import FailureTrace, parse_failures
from recover_megatron.goodput.run import Result, simulate

KINDS: dict[str, type[Restart] | type[Recover]] = {"restart": Restart, "recover": Recover}


@dataclass(frozen=True)
class Calibration:
    """A calibration file: the job, the systems by name, and what was assumed."""

    job: SimulatedJob
    systems: Mapping[str, System]
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """One system at one size. `goodput` is the tokens committed against those of the full machine
    without failures, checkpoints or a recovery protocol in the same time: with the shortest
    `reduce` of all systems."""

    system: str
    gpus: int
    failures: int
    goodput: float
    tokens: int
    tokens_per_gpu_s: float
    replicas_left: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration", type=Path, required=True, help="costs as YAML (configs/calibration/)"
    )
    parser.add_argument(
        "--gpus", default="", help="sizes, comma separated; default: the calibration's own"
    )
    parser.add_argument(
        "--failures",
        default="exponential:mean=1080",
        help="fixed:seconds=S, fixed:steps=K, exponential:mean=S, weibull:mean=S:shape=K, "
        "file:PATH or none (default: %(default)s)",
    )
    parser.add_argument(
        "--failures-at",
        type=int,
        default=0,
        metavar="GPUS",
        help="the mean holds for a machine of so many GPUs, and is longer for a smaller one; "
        "default: it holds for every size",
    )
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/simulate"))


def run(args: argparse.Namespace) -> int:
    calibration = load(args.calibration)
    sizes = _sizes(args.gpus, calibration.job)
    trace = parse_failures(args.failures)
    failures = Failures(trace, args.failures_at, args.seed)
    outcomes = sweep(calibration, sizes, failures, 3600 * args.hours)
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(outcomes, args.out / "goodput.csv")
    notes = [f"failures {args.failures}, {args.hours:g} hours, seed {args.seed}"]
    plot(outcomes, [*notes, *calibration.assumptions], args.out / "goodput.png")
    _print(outcomes)
    print(f"{args.out}/goodput.csv, {args.out}/goodput.png")
    return 0


def load(path: Path) -> Calibration:
    """Raises ConfigError naming the file and the key that is wrong."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--calibration {path}: {error}") from None
    if not isinstance(data, dict) or set(data) != {"job", "systems", "assumptions"}:
        raise ConfigError(f"--calibration {path}: expected the keys job, systems and assumptions")
    if not all(isinstance(line, str) for line in data["assumptions"]):
        raise ConfigError(f"--calibration {path}: assumptions must be lines of text; quote them")
    systems: dict[str, System] = {}
    for name, values in data["systems"].items():
        kind = values.pop("kind", None)
        if kind not in KINDS:
            raise ConfigError(f"--calibration {path}: kind of {name} must be restart or recover")
        systems[name] = _build(KINDS[kind], values, f"{path}: systems.{name}")
        policy = getattr(systems[name], "policy", "exact")
        if policy not in POLICIES:
            raise ConfigError(f"--calibration {path}: {name}: policy must be one of {POLICIES}")
    job = _build(SimulatedJob, data["job"], f"{path}: job")
    return Calibration(job, systems, tuple(data["assumptions"]))


def _build(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"--calibration {where} has no {unknown[0]!r}; it has {sorted(known)}")
    try:
        return kind(**{n: _value(v, "Growth" in str(known[n].type)) for n, v in values.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--calibration {where}: {error}") from None


def _value(value: Any, grows: bool) -> Any:
    """A growing cost is a number, or [base, per doubling of the replicas]."""
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(n, int | float | str) for n in numbers) or not 1 <= len(numbers) <= 2:
        raise ValueError(f"expected a number or two, got {value!r}")
    if any(isinstance(n, int | float) and n < 0 for n in numbers):
        raise ValueError(f"{value!r} is negative")
    return Growth(*numbers) if grows else value


def _sizes(text: str, job: SimulatedJob) -> list[int]:
    words = [word for word in text.split(",") if word.strip()]
    try:
        sizes = [int(word) for word in words] or [job.gpus]
    except ValueError:
        raise ConfigError(f"--gpus: expected numbers such as 512,4096, got {text!r}") from None
    for size in sizes:
        if size < job.gpus_per_replica or size % job.gpus_per_replica:
            raise ConfigError(f"--gpus {size} is not whole replicas of {job.gpus_per_replica}")
    return sizes


@dataclass(frozen=True)
class Failures:
    """`trace` is that of a machine of `at` GPUs; what is left to chance is drawn from `seed`."""

    trace: FailureTrace
    at: int
    seed: int


def sweep(
    calibration: Calibration, sizes: Sequence[int], failures: Failures, until_s: float
) -> list[Outcome]:
    """Each system at each size, all of them under the same failures. Microbatches per replica stay
    the calibration's own: the batch grows with the machine."""
    outcomes = []
    each = calibration.job.microbatches // calibration.job.replicas
    best = min(
        calibration.systems.values(), key=lambda s: s.reduce.at(calibration.job.replicas)
    ).reduce
    for gpus in sizes:
        replicas = gpus // calibration.job.gpus_per_replica
        job = replace(calibration.job, replicas=replicas, microbatches=replicas * each)
        here = failures.trace.scaled(failures.at / gpus) if failures.at else failures.trace
        for name, system in calibration.systems.items():
            drawn = here.failures(gpus, failures.seed)
            result = simulate(job, system, drawn, until_s=until_s, mean_s=here.mean_s)
            ideal_s = each * job.compute_s + best.at(replicas)
            outcomes.append(_outcome(name, result, ideal_s))
    return outcomes


def _outcome(name: str, result: Result, ideal_s: float) -> Outcome:
    job, last = result.job, result.last
    tokens = result.tokens / last.gpu_s
    goodput = last.iterations * ideal_s / last.time_s
    return Outcome(name, job.gpus, last.failures, goodput, result.tokens, tokens, last.replicas)


def write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [field.name for field in fields(Outcome)]
        writer.writerow(names)
        writer.writerows([getattr(outcome, name) for name in names] for outcome in outcomes)


def _print(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="simulated")
    for column in (
        "GPUs",
        "system",
        "failures",
        "goodput",
        "tokens/s per live GPU",
        "replicas left",
    ):
        table.add_column(column)
    for o in outcomes:
        rate = f"{o.tokens_per_gpu_s:.0f}"
        cells = (str(o.gpus), o.system, str(o.failures), f"{o.goodput:.1%}", rate)
        table.add_row(*cells, str(o.replicas_left))
    Console().print(table)


def plot(outcomes: Sequence[Outcome], notes: Sequence[str], path: Path) -> None:
    """Goodput against GPUs, one line for each system, the assumptions beneath."""
    lines: dict[str, dict[int, float]] = {}
    for outcome in outcomes:
        lines.setdefault(outcome.system, {})[outcome.gpus] = 100 * outcome.goodput
    plots.goodput(lines, notes, "simulated, not measured", path)
