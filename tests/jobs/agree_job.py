"""Many agreements while the engine looks for failures as often as it can; says how many of this
rank's were right.

    mpirun ... python agree_job.py COUNT
"""

from __future__ import annotations

import os
import sys

from recover_megatron.collectives.membership.death import Death
from recover_megatron.collectives.membership.ulfm import UlfmMembership

BITS = 24


def without(bit: int) -> int:
    return ((1 << BITS) - 1) & ~(1 << bit % BITS)


def main(count: int) -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    membership = UlfmMembership(Death(rank), lambda ranks: None, poll_s=0.0001)
    right = 0
    for i in range(count):
        expected = -1
        for each in range(membership.size):
            expected &= without(i + 5 * each)
        right += membership.agree(without(i + 5 * rank)) == expected
    print(f"rank {rank}: {right} right")
    membership.agree(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
