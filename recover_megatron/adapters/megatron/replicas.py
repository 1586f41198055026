"""Are the parameters of all live replicas bitwise equal, position by position (I2)?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from recover_megatron.errors import ConfigError, Unrecoverable
from recover_megatron.recovery.driver import Communicator, Driver
from recover_megatron.world import ReplicaLayout


def fingerprint(model: Sequence[Any]) -> int:
    """56 bits of a BLAKE2b hash over the bytes of this rank's parameters, in definition order."""
    digest = hashlib.blake2b(digest_size=7)
    for chunk in model:
        for parameter in chunk.parameters():
            data = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(data.numpy().data)
    return int.from_bytes(digest.digest(), "big")


def odd_replicas(prints: dict[int, int]) -> list[int]:
    """The replicas whose fingerprint is not the most frequent one (ties: the lowest replica's)."""
    count = Counter(prints.values())
    most = max(count.values())
    usual = next(p for _, p in sorted(prints.items()) if count[p] == most)
    return sorted(replica for replica, p in prints.items() if p != usual)


def any_in_replica(flag: bool) -> bool:
    """Logical or over the ranks of this replica, which all call it."""
    found = torch.tensor([int(flag)], dtype=torch.int32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return bool(found.item())


def exchange(
    driver: Driver, communicator: Communicator, layout: ReplicaLayout, replica_id: int, mine: int
) -> dict[int, int]:
    """Each live replica's number (63 bits), by replica, within this rank's position group."""
    everyone = np.zeros(layout.replicas, dtype=np.int64)

    def reduce() -> None:
        own = np.zeros(layout.replicas, dtype=np.int64)
        own[replica_id] = mine
        communicator.all_reduce(own, everyone)

    driver.guarded("exchange", reduce)
    return {r: int(everyone[r]) for r in driver.world.replicas}


def check_same_iteration(
    driver: Driver, communicator: Communicator, layout: ReplicaLayout, replica_id: int, at: int
) -> None:
    """Raises ConfigError, at every rank, unless all replicas start after the same iteration."""
    found = exchange(driver, communicator, layout, replica_id, at)
    if len(set(found.values())) > 1:
        each = ", ".join(f"replica {r}: {iteration}" for r, iteration in found.items())
        raise ConfigError(
            f"the replicas loaded different iterations ({each}); --load must lead to the same "
            "checkpoint on every host"
        )


def check_replicas(
    driver: Driver,
    communicator: Communicator,
    layout: ReplicaLayout,
    replica_id: int,
    model: Sequence[Any],
    iteration: int,
) -> int:
    """Compare fingerprints within this rank's position group; every live rank calls it.

    Returns this rank's fingerprint. Raises Unrecoverable naming the odd replica, at every rank of
    the job, whatever position differs. A replica that dies meanwhile is repaired like anywhere.
    """
    mine = fingerprint(model)
    prints = exchange(driver, communicator, layout, replica_id, mine)
    odd = torch.zeros(layout.replicas, dtype=torch.int32, device=torch.cuda.current_device())
    odd[odd_replicas(prints)] = 1
    # Every replica holds every position, so this tells all ranks of the job the same.
    torch.distributed.all_reduce(odd, op=torch.distributed.ReduceOp.MAX)
    named = odd.nonzero().view(-1).tolist()
    if named:
        raise Unrecoverable(
            f"after iteration {iteration} the parameters of replica {', '.join(map(str, named))} "
            f"differ from those of the other replicas of {driver.world.replicas}"
        )
    return mine
