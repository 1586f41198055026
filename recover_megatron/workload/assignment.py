"""An assignment: which replica computes which microbatch ids of one iteration. Data that prints.

    r0: 0-3, 9
    r2: 4-8
    r3: withheld 1+3

is an assignment of ten microbatches to replicas 0 and 2, while replica 3 is a spare that computes
four more and withholds their gradient; `parse(str(a)) == a`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from recover_megatron.errors import InvariantViolation
from recover_megatron.world import World


@dataclass(frozen=True)
class Assignment:
    """Microbatch ids by replica; `shares` is ascending in replica id, ids in order of computing.

    `withheld` gives, for replicas that compute beyond what is due, the sizes of those parts. Each
    is a gradient of its own that can be promoted: it then stands for that many due ids.
    """

    shares: tuple[tuple[int, tuple[int, ...]], ...]
    withheld: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(
        cls,
        shares: Mapping[int, Iterable[int]],
        withheld: Mapping[int, Iterable[int]] | None = None,
    ) -> Assignment:
        parts = ((replica, tuple(sizes)) for replica, sizes in sorted((withheld or {}).items()))
        return cls(
            tuple((replica, tuple(shares[replica])) for replica in sorted(shares)),
            tuple((replica, sizes) for replica, sizes in parts if sizes),
        )

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(replica for replica, _ in self.shares)

    def share(self, replica_id: int) -> tuple[int, ...]:
        """The ids of one replica; empty for a replica that is not in the assignment."""
        return _of(self.shares, replica_id)

    def parts(self, replica_id: int) -> tuple[int, ...]:
        """The sizes of what one replica withholds."""
        return _of(self.withheld, replica_id)

    @property
    def committed(self) -> int:
        """How many microbatches the iteration commits if this assignment is carried out."""
        return sum(len(ids) for _, ids in self.shares)

    def __str__(self) -> str:
        lines = []
        for replica, ids in self.shares:
            parts = "+".join(map(str, self.parts(replica)))
            words = (f"r{replica}:", _ranges(ids), f"withheld {parts}" if parts else "")
            lines.append(" ".join(filter(None, words)))
        return "\n".join(lines)


def parse(text: str) -> Assignment:
    """The inverse of `str(assignment)`. Raises ValueError for other text."""
    shares: dict[int, tuple[int, ...]] = {}
    withheld: dict[int, list[int]] = {}
    for line in text.splitlines():
        head, _, tail = line.partition(":")
        if not head.startswith("r"):
            raise ValueError(f"expected 'rN: ids', got {line!r}")
        replica = int(head[1:])
        tail, _, parts = tail.partition("withheld")
        withheld[replica] = [int(size) for size in parts.split("+") if size.strip()]
        ids: list[int] = []
        for part in filter(None, (p.strip() for p in tail.split(","))):
            first, dash, last = part.partition("-")
            ids.extend(range(int(first), int(last) + 1) if dash else [int(first)])
        shares[replica] = tuple(ids)
    return Assignment.of(shares, withheld)


def validate(assignment: Assignment, world: World, microbatches: int) -> None:
    """Raises InvariantViolation, printing the grid, unless ids 0..microbatches-1 are each assigned
    exactly once and only live replicas hold or withhold any (I1)."""
    ids = sorted(i for _, share in assignment.shares for i in share)
    live = set(world.replicas)
    holders = [r for r, share in (*assignment.shares, *assignment.withheld) if share]
    dead = [r for r in holders if r not in live]
    if ids != list(range(microbatches)) or dead:
        raise InvariantViolation(
            f"expected each of {microbatches} microbatches once, on live replicas "
            f"{world.replicas} (world epoch {world.world_epoch}); got\n{assignment}"
        )


def _of(pairs: tuple[tuple[int, tuple[int, ...]], ...], replica_id: int) -> tuple[int, ...]:
    """One replica's entry of pairs that are ascending in replica id: there may be thousands."""
    at = bisect_left(pairs, replica_id, key=lambda pair: pair[0])
    found = at < len(pairs) and pairs[at][0] == replica_id
    return pairs[at][1] if found else ()


def _ranges(ids: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for i in ids:
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)
