"""Many agreements while the watcher drives MPI's progress as often as it can; says how many of this
rank's were right.

    mpirun ... python agree_job.py COUNT
"""

from __future__ import annotations

import os
import sys

from recover_megatron.collectives.ulfm import UlfmTransport
from recover_megatron.collectives.watcher import Watcher

BITS = 24


def without(bit: int) -> int:
    return ((1 << BITS) - 1) & ~(1 << bit % BITS)


def main(count: int) -> None:
    transport = UlfmTransport()
    Watcher(transport, frozenset(), 0.0001, lambda ranks: None).start()
    right = 0
    for i in range(count):
        expected = -1
        for rank in range(transport.size):
            expected &= without(i + 5 * rank)
        right += transport.agree(without(i + 5 * transport.rank)) == expected
    print(f"rank {transport.rank}: {right} right")
    transport.agree(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
