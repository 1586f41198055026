"""Seeded random kills of a real training job, run by scripts/stress.sh.

Four replicas of two pipeline stages (8 ranks) train on real text; each seed ends two of the
replicas at a random iteration, position, phase and bucket. One line per seed: what was killed, and
whether the job ended with code 0, kept the design's invariants, and has the losses, samples and
parameters that it must have. A summary line comes last.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from recover_megatron.events import FaultInjected, PeerFailed, Repaired, SyncFailed
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log, max_difference, samples_identical
from recover_megatron.testing.rehearsal import Rehearsal, corpus, run_job

REPLICAS, KILLS, EVERY = 4, 2, 4
OPTIONS = ("--recover-bucket-mb", "0.05", "--recover-check-replicas-interval", "1")
LOSS_LIMIT = 1e-5
HANGS_AFTER_S = 300.0


def failures_of(
    record: AuditedRun, log: Log, reference: AuditedRun, job: Rehearsal, code: int
) -> list[str]:
    """What is wrong with a run and its console log, in words; empty if nothing is."""
    wrong = [f"exit code {code}"] if code else []
    wrong += record.violations(job.iterations, job.microbatches)
    if not wrong:
        difference = max_difference(record.losses, reference.losses)
        if difference > LOSS_LIMIT:
            wrong.append(f"I6: the loss differs by {difference:.2g}")
        if not samples_identical(record, reference):
            wrong.append("I1: the samples are not those of the failure-free run")
        if not record.parameters_bitwise_equal:
            wrong.append("I2: parameters were not compared or differ")
        if set(log.losses) != set(reference.losses):
            wrong.append(f"I7: the console shows iterations {sorted(log.losses)} only")
        if len(record.survivors) != REPLICAS - KILLS:
            wrong.append(f"{len(record.survivors)} replicas survived, not {REPLICAS - KILLS}")
    return wrong


def seconds_until_seen(record: AuditedRun) -> Iterator[tuple[str, float]]:
    """For each fault: its kind, and how long it took until a rank of another replica knew."""
    for fault in record.of(FaultInjected):
        later = (
            e.time - fault.time
            for e in record.of(PeerFailed, SyncFailed, Repaired)
            if e.time >= fault.time and e.replica != fault.replica
        )
        yield fault.fault.partition(":")[0], min(later, default=float("inf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--stages", type=int, default=2, help="pipeline stages, and so ranks, of each"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/stress"))
    parser.add_argument(
        "--ends", action="store_true", help="draw the way to end too: exceptions, exits, crashes"
    )
    args = parser.parse_args()
    kind = ":kind=any" if args.ends else ""
    job = Rehearsal(corpus(Path("runs/data")), KILLS * EVERY + 2, 12, pp=args.stages)
    reference = None
    repairs: list[float] = []
    failed: list[int] = []
    seen: dict[str, list[float]] = {}  # by way of ending: seconds until a survivor knew
    started = time.monotonic()
    for seed in [None, *range(args.first_seed, args.first_seed + args.seeds)]:
        name = "reference" if seed is None else f"seed-{seed}"
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        spec = "" if seed is None else f"random:seed={seed}:every={EVERY}:count={KILLS}{kind}"
        injected = ("--recover-inject", spec) if spec else ()
        began = time.monotonic()
        command = job.recover(REPLICAS, folder, *OPTIONS, *injected)
        code = run_job(command, args.out / f"{name}.log", limit_s=HANGS_AFTER_S)
        record = AuditedRun(folder)
        if seed is None:
            reference = record
            wrong = record.violations(job.iterations, job.microbatches)
            if code or wrong:
                sys.exit(f"stress: the failure-free run failed with code {code}: {wrong}")
            continue
        assert reference is not None
        log = Log((args.out / f"{name}.log").read_text())
        wrong = failures_of(record, log, reference, job, code)
        repairs += [r.repair_s for r in record.recoveries]
        if wrong:
            failed.append(seed)
        for end, took in seconds_until_seen(record):
            seen.setdefault(end, []).append(took)
        killed = " ".join(e.fault.removeprefix("kill:") for e in record.of(FaultInjected))
        verdict = "; ".join(wrong) or "ok"
        print(
            f"seed {seed:4d}  {killed:40s} {time.monotonic() - began:5.0f} s  {verdict}", flush=True
        )
    share = f"{args.seeds - len(failed)} of {args.seeds} seeds right"
    mid = f"{median(repairs) * 1000:.0f} ms" if repairs else "none"
    print(
        f"{share}, {len(repairs)} recoveries, median repair {mid}, "
        f"{time.monotonic() - started:.0f} s" + (f"; failed: {failed}" if failed else "")
    )
    for name, times in sorted(seen.items()):
        print(
            f"{name:10s} {len(times):4d} times, seen after {median(times):.3f} s (median), "
            f"{max(times):.3f} s (longest)"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
