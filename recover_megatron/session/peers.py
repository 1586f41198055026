"""What replicas tell each other beside gradients: from which iteration they start, and whether
their parameters are bitwise equal, position by position (I2)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from recover_megatron.errors import ConfigError, Unrecoverable
from recover_megatron.session.session import Session


class Peers:
    """The ranks that hold the same position in other replicas. Every live rank makes the same
    calls; a replica that dies meanwhile is repaired like anywhere."""

    def __init__(self, session: Session):
        self._session = session

    def exchange(self, mine: int) -> dict[int, int]:
        """Each live replica's number (63 bits), by replica, within this rank's position group."""
        session = self._session
        everyone = np.zeros(session.layout.replicas, dtype=np.int64)

        def reduce() -> None:
            own = np.zeros_like(everyone)
            own[session.replica_id] = mine
            session.communicator.all_reduce(own, everyone)

        session.driver.guarded("exchange", reduce)
        return {r: int(everyone[r]) for r in session.world.now.replicas}

    def check_same_iteration(self, at: int) -> None:
        """Raises ConfigError, at every rank, unless all replicas start after the same iteration."""
        found = self.exchange(at)
        if len(set(found.values())) > 1:
            each = ", ".join(f"replica {r}: {iteration}" for r, iteration in found.items())
            raise ConfigError(
                f"the replicas loaded different iterations ({each}); --load must lead to the same "
                "checkpoint on every host"
            )

    def check_parameters(self, parameters: Iterable[torch.Tensor], iteration: int) -> int:
        """Compare fingerprints of the parameters within this rank's position group.

        Returns:
            This rank's fingerprint.

        Raises:
            Unrecoverable: Names the odd replica, at every rank of the job, whatever position
                differs.
        """
        session = self._session
        mine = fingerprint(parameters)
        prints = self.exchange(mine)
        replicas = session.layout.replicas
        odd = torch.zeros(replicas, dtype=torch.int32, device=torch.cuda.current_device())
        odd[odd_replicas(prints)] = 1
        # Every replica holds every position, so this tells all ranks of the job the same.
        torch.distributed.all_reduce(odd, op=torch.distributed.ReduceOp.MAX)
        named = odd.nonzero().view(-1).tolist()
        if named:
            raise Unrecoverable(
                f"after iteration {iteration} the parameters of replica "
                f"{', '.join(map(str, named))} differ from those of the other replicas of "
                f"{session.world.now.replicas}"
            )
        return mine


def fingerprint(parameters: Iterable[torch.Tensor]) -> int:
    """56 bits of a BLAKE2b hash over the bytes of the parameters, in the order given."""
    digest = hashlib.blake2b(digest_size=7)
    for parameter in parameters:
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
