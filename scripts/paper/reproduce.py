"""Makes the paper's figures and tables here, and runs/paper/index.html. See reproduce.sh.

curve      the loss with half of the replicas lost, against plain Megatron without failures
failures   throughput after each failure against checkpoint-restart, against G, and without
cost       what one failure costs, by component and checkpoint interval
simulated  the simulator against the paper's tables, and up to 100,000 GPUs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import comparison
import loss_curve
import page
import restart
import simulated

from recover_megatron.testing.rehearsal import Jobs

DATA = Path("runs/data")
DOCS = Path("docs/reproduction.md")
EXPERIMENTS = ("curve", "failures", "cost", "simulated")


def main() -> int:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="a short form, for CI")
    parser.add_argument(
        "--only",
        default=",".join(EXPERIMENTS),
        help="comma separated; the page shows what is there; default: %(default)s",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument(
        "--docs", action="store_true", help="also put the table into docs/reproduction.md"
    )
    args = parser.parse_args()
    wanted = [name for name in args.only.split(",") if name]
    if unknown := sorted(set(wanted) - set(EXPERIMENTS)):
        parser.error(f"--only: {unknown[0]!r} is not one of {', '.join(EXPERIMENTS)}")
    jobs = Jobs(args.out)
    for name in wanted:
        _run(name, args.quick, jobs)
    jobs.say(f"{page.write(args.out)}")
    if args.docs:
        comparison.write_docs(comparison.rows(args.out), page.machine(args.out), DOCS)
    return 0


def _run(name: str, quick: bool, jobs: Jobs) -> None:
    if name == "curve":
        for curve in loss_curve.curves(quick, DATA):
            loss_curve.run(curve, jobs)
    elif name == "failures":
        restart.run(quick, DATA, jobs)
    elif name == "cost":
        restart.cost(quick, DATA, jobs)
    else:
        simulated.run(quick, jobs.out)
    jobs.say(f"{name}: measured" if name != "simulated" else "simulated")


if __name__ == "__main__":
    sys.exit(main())
