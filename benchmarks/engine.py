"""What the collectives layer costs, by revision: agreement, all-reduce, repair, an idle rank.

    git worktree add /tmp/before REVISION
    python benchmarks/engine.py --against /tmp/before --ranks 2 4 --rounds 7

Runs benchmarks/engine_job.py of this tree and of the other in alternation, each with its own
package, and prints the medians over the rounds and their ratio (below 1: this tree is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from recover_megatron.launch.mpirun import mpirun_prefix

HERE = Path(__file__).resolve().parent.parent


def measure(tree: Path, ranks: int, btl: str) -> dict[str, float]:
    command = mpirun_prefix()
    command[command.index("btl") + 1] = btl
    job = str(tree / "benchmarks" / "engine_job.py")
    done = subprocess.run(
        [*command, "-n", str(ranks), sys.executable, job],
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) != 1:
        sys.exit(f"the job of {tree} did not end well (code {done.returncode}):\n{done.stderr}")
    found: dict[str, float] = json.loads(lines[0])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", type=Path, help="the other revision's tree")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    trees = [args.against.resolve(), HERE] if args.against else [HERE]
    for btl in ("tcp,self,sm", "tcp,self"):
        for ranks in args.ranks:
            taken: dict[Path, dict[str, list[float]]] = {t: defaultdict(list) for t in trees}
            for _ in range(args.rounds):
                for tree in trees:
                    for name, value in measure(tree, ranks, btl).items():
                        taken[tree][name].append(value)
            for name in taken[HERE]:
                medians = [statistics.median(taken[tree][name]) for tree in trees]
                ratio = f"   ratio {medians[-1] / medians[0]:.2f}" if len(trees) > 1 else ""
                said = "   ".join(f"{value:9.1f}" for value in medians)
                print(f"{ranks} ranks, {btl:12s} {name:14s} {said}{ratio}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
