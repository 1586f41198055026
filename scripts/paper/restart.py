"""Recovery against checkpoint-restart: the same job, the same failures, measured here.

1. `failures`: replicas are lost one after the other; tokens/s per live rank after each failure,
   tokens against rank-hours, throughput against G, and what recovery costs without failures.
2. `cost`: what one failure costs by component, for several checkpoint intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from baseline import Event, History, supervise
from devices import Devices, missing
from experiment import write_csv, write_summary

from recover_megatron.events import FaultInjected
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log
from recover_megatron.testing.rehearsal import Jobs, Rehearsal, corpus

FLAGS = ("--recover-bucket-mb", "0.2", "--recover-check-replicas-interval", "50")


@dataclass(frozen=True)
class Plan:
    """`lost` of `replicas` are lost, one every `every` iterations; the restarted job, which always
    has all its ranks, stops after the first `compared` of those failures."""

    job: Rehearsal
    replicas: int
    lost: int
    compared: int
    every: int
    interval: int  # of checkpoints; no divisor of `every`: failures strike anywhere between two
    share: float  # of a core, for each rank

    @property
    def failures(self) -> list[int]:
        """The iterations in which a replica is lost."""
        return [self.every * (k + 1) + 1 for k in range(self.lost)]


def plan(quick: bool, data: Path) -> Plan:
    job = Rehearsal(corpus(data), 0, 128, micro_batch_size=2)
    if quick:
        return Plan(replace(job, global_batch_size=16), 4, 2, 1, 5, 4, 0.4)
    return Plan(job, 16, 10, 8, 24, 10, 0.1)


def run(quick: bool, data: Path, jobs: Jobs) -> dict[str, Any]:
    name, p = "failures", plan(quick, data)
    job = replace(p.job, iterations=p.failures[-1] + p.every - 1)
    # Three jobs of different lengths, and one schedule of the learning rate.
    p = replace(p, job=replace(p.job, extra=("--lr-decay-iters", str(job.iterations))))
    job = replace(job, extra=p.job.extra)
    with Devices(p.share) as devices:
        steady = replace(job, iterations=3 * p.every)
        reference = jobs.plain(f"{name}/reference", steady, p.replicas, devices.place)
        spec = ",".join(f"{k}.0@{i}:sync" for k, i in enumerate(p.failures))
        record = _recover(jobs, f"{name}/recover", job, p.replicas, spec, devices)
        kills = {i - 1: k for k, i in enumerate(p.failures[: p.compared])}
        job = replace(job, iterations=p.failures[p.compared - 1] + p.every - 1)
        history = supervise(jobs, f"{name}/restart", job, p.replicas, p.interval, kills, devices)
    return _write(p, reference, record, history, jobs.out / name)


def _recover(
    jobs: Jobs, name: str, job: Rehearsal, replicas: int, spec: str, devices: Devices
) -> AuditedRun:
    flags = (*FLAGS, "--recover-inject", spec)
    return jobs.recover(name, job, replicas, *flags, on_first=devices.place)


def _write(
    p: Plan, reference: Log, record: AuditedRun, history: History, folder: Path
) -> dict[str, Any]:
    tokens = p.job.tokens_per_iteration
    recover, restart = _after_failures(p, record), _restarted(p, history)
    rows = [
        [k + 1, p.replicas - k - 1, round(slow, 2), round(fast, 2), round(fast / slow, 3)]
        for k, (slow, fast) in enumerate(zip(restart, recover, strict=False))
    ]
    write_csv(
        folder / "after_failure.csv",
        ["failure", "ranks_left", "restart_tok_s_rank", "recover_tok_s_rank", "ratio"],
        rows,
    )
    curves = {"recover": _curve(p, record), "restart": _restart_curve(p, history)}
    end = min(curve[-1][0] for curve in curves.values())
    marks = [end * k / 5 for k in range(1, 6)]
    total = [
        [round(m, 2), *(round(_at(curves[n], m) * tokens) for n in ("restart", "recover"))]
        for m in marks
    ]
    write_csv(folder / "tokens.csv", ["rank_s", "restart_tokens", "recover_tokens"], total)
    by_g, fit = _throughput(p, record)
    plain_s = median(s for i, s in reference.step_s.items() if i > 3)
    plain = tokens / plain_s / p.replicas
    write_csv(folder / "throughput.csv", ["replicas", "g", "measured_tok_s_rank", "formula"], by_g)
    phases = {
        "before the first failure": _rate(p, record, 3, p.failures[0] - 1),
        "between failures 1 and 2": _rate(p, record, p.failures[0], p.failures[1] - 1),
        "after the last failure": _rate(p, record, p.failures[-1], max(record.commits)),
    }
    write_csv(
        folder / "phases.csv",
        ["phase", "reference_tok_s_rank", "recover_tok_s_rank"],
        [[phase, round(plain, 2), round(rate, 2)] for phase, rate in phases.items()],
    )
    passing = [g for _, g, measured, _ in by_g if measured > plain]
    recoveries = record.recoveries
    summary = {
        "share_of_a_core": None if missing() else p.share,
        "no_shares_because": missing(),
        "replicas": p.replicas,
        "microbatches_per_iteration": p.job.microbatches,
        "tokens_per_iteration": p.job.tokens_per_iteration,
        "checkpoint_interval": p.interval,
        "iterations_between_failures": p.every,
        "t_c_s": fit[0],
        "t_r_s": fit[1],
        "reference_tok_s_rank": plain,
        "passes_reference_at_g": min(passing, default=None),
        "ratio_after_failure": [row[4] for row in rows],
        "tokens_at_the_end": total[-1][2] / total[-1][1] - 1,
        "detect_repair_redo_s": [
            fmean(getattr(r, part) or 0.0 for r in recoveries)
            for part in ("detect_s", "repair_s", "redo_s")
        ],
        "restart_s": _downtimes(history),
        "violations": record.violations(max(record.commits), p.job.microbatches),
        "loss_difference_to_reference": max(
            abs(record.losses[i] - loss) for i, loss in reference.losses.items()
        ),
    }
    write_summary(folder, summary)
    return summary


def _faults(record: AuditedRun) -> list[float]:
    return [e.time for e in record.of(FaultInjected)]


def _after_failures(p: Plan, record: AuditedRun) -> list[float]:
    """Tokens/s per live rank from each failure to the next, or to the last commit."""
    times = [*_faults(record), record.commits[max(record.commits)].time]
    done = [*p.failures, max(record.commits) + 1]
    ranks = [p.replicas - k - 1 for k in range(p.lost)]
    return [
        (b - a) * p.job.tokens_per_iteration / (until - since) / n
        for (a, b), (since, until), n in zip(pairwise(done), pairwise(times), ranks, strict=True)
    ]


def _restarted(p: Plan, history: History) -> list[float]:
    """The same for the restarted job, whose ranks are always all there."""
    kills = history.of("killed")
    last = max(history.of("iteration"), key=lambda e: e.time)
    ends = [*kills[1:], last]
    return [
        (end.iteration - kill.iteration)
        * p.job.tokens_per_iteration
        / (end.time - kill.time)
        / p.replicas
        for kill, end in zip(kills, ends, strict=True)
    ]


def _curve(p: Plan, record: AuditedRun) -> list[tuple[float, int]]:
    """(rank-seconds since the first commit, iterations committed since then)."""
    spent, curve = 0.0, [(0.0, 0)]
    for i in sorted(record.commits)[1:]:
        live = len(record.assignment(i).replicas)
        spent += live * (record.commits[i].time - record.commits[i - 1].time)
        curve.append((spent, i - 1))
    return curve


def _restart_curve(p: Plan, history: History) -> list[tuple[float, int]]:
    """What is lost at a failure is taken away again when the checkpoint has been loaded."""
    first = history.of("iteration")[0].time
    return [
        (p.replicas * (e.time - first), e.iteration - 1)
        for e in history.events
        if e.kind in ("iteration", "loaded") and e.time >= first
    ]


def _at(curve: Sequence[tuple[float, int]], spent: float) -> int:
    return max(done for at, done in curve if at <= spent)


def _rate(p: Plan, record: AuditedRun, first: int, last: int) -> float:
    """Tokens/s per live rank between two commits, all with the same members."""
    seconds = record.commits[last].time - record.commits[first].time
    live = len(record.assignment(last).replicas)
    return (last - first) * p.job.tokens_per_iteration / seconds / live


def _throughput(
    p: Plan, record: AuditedRun
) -> tuple[list[tuple[int, int, float, float]], tuple[float, float]]:
    """(replicas, G, measured, formula) in tokens/s per rank, and the fit (t_c, T_r): least squares
    of the iteration's time over G, of iterations in which nothing is lost."""
    times: dict[int, list[float]] = {}
    for i in sorted(record.commits)[2:]:
        if i not in p.failures and i - 1 not in p.failures:
            took = record.commits[i].time - record.commits[i - 1].time
            times.setdefault(len(record.assignment(i).replicas), []).append(took)
    points = [(-(-p.job.microbatches // n), median(took), n) for n, took in times.items()]
    mean_g, mean_t = fmean(g for g, _, _ in points), fmean(t for _, t, _ in points)
    t_c = sum((g - mean_g) * (t - mean_t) for g, t, _ in points) / sum(
        (g - mean_g) ** 2 for g, _, _ in points
    )
    t_r = mean_t - t_c * mean_g
    tokens = p.job.tokens_per_iteration
    rows = [
        (n, g, round(tokens / t / n, 2), round(tokens / (g * t_c + t_r) / n, 2))
        for g, t, n in points
    ]
    return rows, (t_c, t_r)


def _downtimes(history: History) -> list[float]:
    """From each kill to the first iteration after it."""
    return [
        after.time - kill.time
        for kill in history.of("killed")
        if (after := history.after(kill, "iteration")) is not None
    ]


# --- what one failure costs ----------------------------------------------------------------------

COST_COLUMNS = (
    "checkpoint_interval_steps system training_s timeout_exit_s save_s restart_init_s load_s "
    "rerun_s recovery_s total_s"
).split()


def cost(quick: bool, data: Path, jobs: Jobs) -> dict[str, Any]:
    """One failure, N - 1 iterations after the checkpoint of iteration N (the paper's table)."""
    intervals = (2,) if quick else (2, 4, 8, 16, 32, 64)
    replicas, share = (2, 0.4) if quick else (4, 0.4)
    job = Rehearsal(corpus(data), 0, 16, micro_batch_size=2)
    rows: list[list[Any]] = []
    with Devices(share) as devices:
        for n in intervals:
            here, victim = replace(job, iterations=2 * n + 1), replicas - 1
            kills = {2 * n - 1: victim}
            history = supervise(jobs, f"cost/{n}/restart", here, replicas, n, kills, devices)
            rows.append([n, "checkpoint-restart", *_restart_cost(history, n)])
            spec = f"{victim}.0@{2 * n}:sync"
            record = _recover(jobs, f"cost/{n}/recover", here, replicas, spec, devices)
            rows.append([n, "recover", *_recover_cost(record, n)])
    table = [[round(c, 3) if isinstance(c, float) else c for c in row] for row in rows]
    write_csv(jobs.out / "cost" / "cost.csv", COST_COLUMNS, table)
    summary = {
        "replicas": replicas,
        "share_of_a_core": None if missing() else share,
        "total_s": {f"{row[1]} {row[0]}": row[-1] for row in rows},
    }
    write_summary(jobs.out / "cost", summary)
    return summary


def _restart_cost(history: History, n: int) -> list[Any]:
    saved = next(e for e in history.of("saved") if e.iteration == n)
    before = next(e for e in history.of("iteration") if e.iteration == n)
    (kill,) = history.of("killed")
    ended = _next(history, kill, "ended")
    loading, loaded = _next(history, kill, "loading"), _next(history, kill, "loaded")
    caught_up = _next(history, loaded, "iteration", kill.iteration)
    parts = [
        kill.time - saved.time,
        ended.time - kill.time,
        saved.time - before.time,
        loading.time - ended.time,
        loaded.time - loading.time,
        caught_up.time - loaded.time,
    ]
    return [*parts, "", sum(parts)]


def _next(history: History, event: Event, kind: str, iteration: int = 0) -> Event:
    found = history.after(event, kind, iteration)
    if found is None:
        raise ValueError(f"no {kind} of iteration {iteration} after {event}")
    return found


def _recover_cost(record: AuditedRun, n: int) -> list[Any]:
    (fault,) = record.of(FaultInjected)
    (recovery,) = record.recoveries
    parts = [
        fault.time - record.commits[n].time,
        recovery.detect_s or 0.0,
        recovery.repair_s + (recovery.redo_s or 0.0),
    ]
    return [*parts[:2], "", "", "", "", parts[2], sum(parts)]
