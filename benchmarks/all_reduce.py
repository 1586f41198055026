"""Our ring against Open MPI's own non-blocking all-reduce, in alternation, in one job.

    python benchmarks/all_reduce.py --ranks 2 4 8 --mb 25

Prints the median time of both by number of ranks and transport, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recover_megatron.collectives.membership.engine import Operation


def job(mb: float, rounds: int) -> None:
    """Under mpirun, by every rank."""
    import numpy as np

    from recover_megatron.collectives.fabric.mpi import MpiFabric
    from recover_megatron.collectives.membership.death import Death
    from recover_megatron.collectives.membership.ulfm import UlfmMembership
    from recover_megatron.collectives.openmpi import MPI

    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    membership = UlfmMembership(Death(rank), lambda ranks: None, poll_s=0.02)
    fabric = MpiFabric(membership)
    fabric.open(tuple(range(membership.size)))

    def by_mpi() -> Operation[None]:
        request = MPI.COMM_WORLD.Iallreduce(send, receive, MPI.SUM)
        while not request.Test():
            yield

    send = np.full(int(mb * 2**20) // 4, rank + 1.0, np.float32)
    receive = np.zeros_like(send)
    times: dict[str, list[float]] = {"ours": [], "MPI": []}
    for _ in range(rounds):
        for name, taken in times.items():
            membership.agree(1)  # all begin together
            started = time.perf_counter()
            if name == "ours":
                fabric.wait(fabric.start(send, receive, "sum"))
            else:
                membership.engine.run(by_mpi())
            taken.append(time.perf_counter() - started)
            assert (receive == membership.size * (membership.size + 1) / 2).all()
    if rank == 0:
        ours, theirs = (statistics.median(times[name]) * 1000 for name in ("ours", "MPI"))
        print(f"ours {ours:7.1f} ms   MPI {theirs:7.1f} ms   ratio {ours / theirs:.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mb", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.mb, args.rounds)
        return 0
    from recover_megatron.launch.mpirun import mpirun_prefix

    me = [sys.executable, __file__, "--job", "--mb", str(args.mb), "--rounds", str(args.rounds)]
    for btl in ("tcp,self,sm", "tcp,self"):
        for ranks in args.ranks:
            command = mpirun_prefix()
            command[command.index("btl") + 1] = btl
            print(f"{ranks:3d} ranks, {btl:12s} ", end="", flush=True)
            subprocess.run([*command, "-n", str(ranks), *me], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
