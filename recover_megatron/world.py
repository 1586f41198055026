"""Who belongs to which replica, and who is alive: plain values that every rank computes alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from recover_megatron.errors import InvariantViolation


@dataclass(frozen=True)
class ReplicaLayout:
    """How the job's initial ranks form replicas: rank = replica_id * ranks_per_replica + position.

    A rank's number here is its rank in the initial MPI world and is kept for life, whatever the
    communicators shrink to.
    """

    replicas: int
    ranks_per_replica: int

    @property
    def ranks(self) -> int:
        return self.replicas * self.ranks_per_replica

    def replica_of(self, rank: int) -> int:
        return rank // self.ranks_per_replica

    def position_of(self, rank: int) -> int:
        return rank % self.ranks_per_replica

    def ranks_of(self, replica_id: int) -> range:
        first = replica_id * self.ranks_per_replica
        return range(first, first + self.ranks_per_replica)

    def ranks_in(self, replicas: Iterable[int]) -> set[int]:
        """All ranks of these replicas."""
        return {rank for replica in replicas for rank in self.ranks_of(replica)}

    def whole_replicas(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The replicas, ascending, all of whose ranks are among `ranks`."""
        count = Counter(self.replica_of(rank) for rank in ranks)
        return tuple(sorted(r for r, n in count.items() if n == self.ranks_per_replica))

    def only_whole(self, ranks: Iterable[int]) -> bool:
        """True if no replica is there in part."""
        count = Counter(self.replica_of(rank) for rank in ranks)
        return all(n == self.ranks_per_replica for n in count.values())


@dataclass(frozen=True)
class World:
    """The live replicas, ascending, and the counter that grows with every membership change."""

    world_epoch: int
    replicas: tuple[int, ...]

    @classmethod
    def initial(cls, layout: ReplicaLayout) -> World:
        return cls(0, tuple(range(layout.replicas)))

    @property
    def leader(self) -> int:
        """The lowest live replica: it logs and saves; it has no other privilege (I7)."""
        return self.replicas[0]

    def shrunk_to(self, replicas: Iterable[int]) -> World:
        """The next world epoch. Raises InvariantViolation if a dead replica came back."""
        survivors = tuple(sorted(replicas))
        if not survivors or not set(survivors) <= set(self.replicas):
            raise InvariantViolation(
                f"world epoch {self.world_epoch} of replicas {self.replicas} cannot shrink "
                f"to {survivors}"
            )
        return World(self.world_epoch + 1, survivors)
