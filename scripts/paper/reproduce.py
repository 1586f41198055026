"""Makes the paper's figures and tables here, and runs/paper/index.html. See reproduce.sh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import loss_curve

from recover_megatron.tools.rehearsal import Jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short form, for CI")
    parser.add_argument("--only", default="curve", help="comma separated; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    args = parser.parse_args()
    jobs = Jobs(args.out)
    for curve in loss_curve.curves(args.quick, Path("runs/data")):
        jobs.say(str(loss_curve.run(curve, jobs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
