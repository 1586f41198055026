"""A ring all-reduce out of sends and receives that this project owns. Knows no MPI.

Open MPI's own non-blocking all-reduce frees its pending sends when a member dies; one that fails
after that is fatal to the rank, and its abort to the job (docs/log.md). Here whoever exchanges
keeps what is pending until it has ended.
"""

from __future__ import annotations

from collections.abc import Callable

from recover_megatron.collectives.transport import Array

# (outgoing, incoming): sends the one to the next rank and fills the other with what the rank before
# this one sends; returns when both have ended.
Exchange = Callable[[Array, Array], None]


def all_reduce(
    rank: int,
    size: int,
    send: Array,
    receive: Array,
    scratch: Array,
    combine: Callable[..., Array],
    exchange: Exchange,
) -> None:
    """`receive` = element-wise `combine` (a numpy ufunc) of all ranks' `send`, the same bits at
    every rank. One-dimensional, contiguous, not overlapping; every rank of the ring calls it.
    `scratch` has room for `longest_chunk` elements.

    Chunk by chunk: N - 1 steps after which each rank has the sum of one chunk, and N - 1 that hand
    the sums round (Patarasuk and Yuan 2009). An exchange that raises ends it; `receive` is garbage
    then. `send` is never written.
    """
    bounds = [k * send.size // size for k in range(size + 1)]

    def chunk(array: Array, number: int) -> Array:
        k = number % size
        return array[bounds[k] : bounds[k + 1]]

    if size == 1:
        receive[:] = send
    for step in range(size - 1):
        partial = send if step == 0 else receive
        own, total = chunk(send, rank - step - 1), chunk(receive, rank - step - 1)
        came = scratch[: own.size]
        exchange(chunk(partial, rank - step), came)
        combine(came, own, out=total)
    for step in range(size - 1):
        exchange(chunk(receive, rank + 1 - step), chunk(receive, rank - step))


def longest_chunk(count: int, size: int) -> int:
    """Elements, of `count` over `size` ranks."""
    return -(-count // size)
