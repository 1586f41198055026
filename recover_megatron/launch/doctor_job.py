"""Three ranks, each a replica; rank 1 dies in an all-reduce, the others repair and reduce again.

Run by `recover-megatron doctor` under mpirun.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from recover_megatron.collectives.fabric.mpi import MpiFabric
from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.collectives.membership.death import Death
from recover_megatron.collectives.membership.quorum import Evidence, gather_places
from recover_megatron.collectives.membership.ulfm import UlfmMembership
from recover_megatron.config import RecoveryConfig
from recover_megatron.errors import ReplicaLost
from recover_megatron.world import ReplicaLayout, World


def main() -> int:
    config, rank = RecoveryConfig(), int(os.environ["OMPI_COMM_WORLD_RANK"])
    membership = UlfmMembership(Death(rank), lambda ranks: None, config.poll_s)
    layout = ReplicaLayout(membership.size, 1)
    evidence = Evidence(gather_places(membership, "here"), "here")
    fabric = MpiFabric(membership)
    communicator = GuardedCommunicator(membership, fabric, layout, config, evidence)
    communicator.begin(World.initial(layout))
    ones, total = np.ones(1 << 20, dtype=np.float32), np.empty(1 << 20, dtype=np.float32)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started, world = time.monotonic(), World.initial(layout)
    while True:
        vote = True
        try:
            communicator.all_reduce(ones, total)
        except ReplicaLost:
            vote = False
        if communicator.agree(vote):
            break
        world = communicator.repair(world)
    took = time.monotonic() - started
    right = world.replicas == (0, 2) and bool((total == 2).all())
    if right:
        print(f"survivor {rank} went on after {took:.2f} s", flush=True)
    communicator.agree(True)
    return 0 if right else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
