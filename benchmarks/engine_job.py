"""One job of engine.py: times the calls of the collectives layer. Each rank is a replica.

Rank 0 prints one line of JSON: microseconds of an agreement, milliseconds of a 25 MB all-reduce and
of a repair, and per cent of a core that an idle rank uses.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time

import numpy as np

from recover_megatron.collectives.fabric.mpi import MpiFabric
from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.collectives.membership.death import Death
from recover_megatron.collectives.membership.quorum import Evidence, gather_places
from recover_megatron.collectives.membership.ulfm import UlfmMembership
from recover_megatron.config import RecoveryConfig
from recover_megatron.world import ReplicaLayout, World

AGREEMENTS, REDUCTIONS, IDLE_S = 2000, 15, 3.0


def main() -> None:
    config, rank = RecoveryConfig(), int(os.environ["OMPI_COMM_WORLD_RANK"])
    membership = UlfmMembership(Death(rank), lambda ranks: None, config.poll_s)
    layout = ReplicaLayout(membership.size, 1)
    evidence = Evidence(gather_places(membership, "here"), "here")
    fabric = MpiFabric(membership)
    communicator = GuardedCommunicator(membership, fabric, layout, config, evidence)
    world = communicator.begin(World.initial(layout))
    found = measure(communicator)
    if rank == layout.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while communicator.agree(True):
        continue
    started = time.perf_counter()
    communicator.repair(world)
    found["repair ms"] = 1e3 * (time.perf_counter() - started)
    communicator.agree(True)
    if rank == 0:
        print(json.dumps(found), flush=True)
    communicator.agree(True)


def measure(communicator: GuardedCommunicator) -> dict[str, float]:
    def seconds_of(call) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    send = np.ones(25 * 10**6 // 4, np.float32)
    receive = np.empty_like(send)
    agreements = [seconds_of(lambda: communicator.agree(True)) for _ in range(AGREEMENTS)]
    reductions = []
    for _ in range(REDUCTIONS):
        communicator.agree(True)  # all begin together
        reductions.append(seconds_of(lambda: communicator.all_reduce(send, receive)))
    communicator.agree(True)
    cpu = time.process_time()
    time.sleep(IDLE_S)
    idle = (time.process_time() - cpu) / IDLE_S
    return {
        "agree us": 1e6 * statistics.median(agreements),
        "all_reduce ms": 1e3 * statistics.median(reductions),
        "idle cpu %": 100 * idle,
    }


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
