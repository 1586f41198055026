"""Who sends what to whom in an all-reduce, as data that prints. Pure: knows no network.

A ring of three ranks; each array is cut into three chunks a, b, c. In two steps the partial sums go
round, after which each rank holds the sum of one chunk; in two more the sums go round:

         0 --a-->  1              step 1   rank 0 sends its a, rank 1 its b, rank 2 its c
         ^         |b             step 2   rank 0 sends the sum of c so far, ...
        c|         v                       now rank 1 has all of c, rank 2 of a, rank 0 of b
         '---- 2 <-'              step 3   each sends the chunk that it has all of
                                  step 4   each sends on the one that it has just got

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

# Messages up to this size Open MPI sends at once, and longer ones by rendezvous (the receiver has
# to ask for them), which can hang a survivor over TCP (docs/log.md). launch/mpirun.py tells it so.
EAGER_BYTES = 4 << 20


@dataclass(frozen=True)
class Step:
    """One exchange: a chunk goes to the next rank while another comes from the one before.

    `out` and `into` are (first, end) in elements. `local`: what goes out is this rank's own
    contribution, else what was reduced so far. `combine`: what comes is combined with this rank's
    own contribution, else it is a finished sum and takes its place.
    """

    out: tuple[int, int]
    into: tuple[int, int]
    local: bool
    combine: bool

    def __str__(self) -> str:
        source = "own" if self.local else "reduced"
        verb = "combine" if self.combine else "store"
        return f"send {source} {self.out[0]}:{self.out[1]}, {verb} {self.into[0]}:{self.into[1]}"


def ring(rank: int, size: int, count: int) -> list[Step]:
    """The steps of `rank` of `size` in an all-reduce of `count` elements; none if it is alone."""

    def chunk(number: int) -> tuple[int, int]:
        k = number % size
        return k * count // size, (k + 1) * count // size

    reducing = [
        Step(chunk(rank - k), chunk(rank - k - 1), local=k == 0, combine=True)
        for k in range(size - 1)
    ]
    handing_round = [
        Step(chunk(rank + 1 - k), chunk(rank - k), local=False, combine=False)
        for k in range(size - 1)
    ]
    return reducing + handing_round


def longest_chunk(count: int, size: int) -> int:
    """Elements, of `count` over `size` ranks."""
    return -(-count // size)


def pieces(count: int, size: int, itemsize: int) -> list[tuple[int, int]]:
    """(first, end) of the parts of an array of `count` elements, each of which goes round the ring
    of `size` ranks by itself, so that no message is longer than EAGER_BYTES."""
    longest = size * max(1, EAGER_BYTES // itemsize)
    return [(first, min(first + longest, count)) for first in range(0, count, longest)]
