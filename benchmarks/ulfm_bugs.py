"""How often bugs of Open MPI 5.0.11 cost our protocol a healthy replica, and what avoids that.

    python benchmarks/ulfm_bugs.py --jobs 40

Each job is testing/jobs/driver_job.py with 8 replicas of 2 ranks; four replicas are killed at
random moments inside all-reduces of 1 MB, so four must be left. A replica lost beyond that, a job
without survivors, a hang (2 minutes) and a wrong sum are counted. The conditions alternate job by
job, so that they meet the same machine. Prints one line a job and a table at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from recover_megatron.adapters.megatron.command_line import read_job
from recover_megatron.events import FaultInjected
from recover_megatron.launch.mpirun import mpirun_command
from recover_megatron.record.audit import AuditedRun
from recover_megatron.testing.rehearsal import run_job

REPLICAS, KILLS, HANGS_AFTER_S = 8, 4, 120.0
TCP = ("btl", "tcp,self")
DEFAULT_EAGER = ("btl_tcp_eager_limit", "65536")
# Condition -> (the job's environment, settings of Open MPI that differ from ours)
CONDITIONS: dict[str, tuple[dict[str, str], list[tuple[str, str]]]] = {
    "ours, shared memory": ({}, []),
    "ours, TCP": ({}, [TCP]),
    "rendezvous (Open MPI's default), TCP": ({}, [TCP, DEFAULT_EAGER]),
    "without settling, TCP": ({"BENCH_NO_SETTLE": "1"}, [TCP]),
}


def one_job(name: str, seed: int, folder: Path) -> Counter[str]:
    """Counts of one job under one condition."""
    environment, settings = CONDITIONS[name]
    words = ["--recover", "--micro-batch-size", "1", "--global-batch-size", "12"]
    words += ["--tensor-model-parallel-size", "2", "--recover-trace-dir", str(folder)]
    words += ["--recover-inject", f"random:seed={seed}:every=2:count={KILLS}:phase=sync"]
    command = mpirun_command(read_job(words), REPLICAS, ["SCRIPT"])
    python = command[: command.index("-m", command.index("-n"))]
    for setting, value in settings:
        python[python.index(setting) + 1] = value
    os.environ.update(environment)
    log = folder.with_suffix(".log")
    script = str(Path(__file__).with_name("ulfm_bugs_job.py"))
    code = run_job([*python, script, *words], log, limit_s=HANGS_AFTER_S)
    for variable in environment:
        del os.environ[variable]
    record = AuditedRun(folder)
    output = log.read_text() + "".join(p.read_text() for p in folder.glob("log.*.txt"))
    left = len(record.survivors)
    return Counter(
        jobs=1,
        kills=len(record.of(FaultInjected)),
        extra=max(0, REPLICAS - len(record.of(FaultInjected)) - left) if left else 0,
        none_left=int(left == 0),
        hangs=int(code < 0),
        wrong_sums=output.count("AssertionError"),
        crashes=output.count("Signal: "),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=40, help="of each condition")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="parts of the conditions' names")
    args = parser.parse_args()
    chosen = [n for n in CONDITIONS if not args.only or any(part in n for part in args.only)]
    totals: dict[str, Counter[str]] = {name: Counter() for name in chosen}
    with tempfile.TemporaryDirectory(prefix="ulfm-bugs-") as root:
        for seed in range(args.first_seed, args.first_seed + args.jobs):
            for number, name in enumerate(chosen):
                counts = one_job(name, seed, Path(root) / f"{seed}-{number}")
                totals[name] += counts
                print(f"seed {seed:3d}  {name:38s} {dict(+counts)}", flush=True)
    columns = ("jobs", "kills", "extra", "none_left", "hangs", "wrong_sums", "crashes")
    print("| condition | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, total in totals.items():
        print(f"| {name} | " + " | ".join(str(total[c]) for c in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
