"""A piece of the gradient, and the snapshot that is kept beside its reduction.

A reduction that breaks leaves garbage where its result should be. It is done again from what this
replica has computed itself, which therefore must still be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Array = Any  # numpy.ndarray, one-dimensional, contiguous, on the host


def _nothing() -> None: ...


@dataclass(frozen=True)
class Bucket:
    """One piece of the gradient as MPI sees it.

    local:   this replica's own sum, scaled by 1/B, *not* reduced. MPI only reads it, so it is the
             snapshot from which a failed reduction is done again, free of a copy.
    reduced: where the reduction arrives. Garbage until the agreement has said yes.
    ready:   called before `local` is read or `reduced` is written, for a copy still on its way.
    arrived: called when a reduction returned without an error; what it begins may be undone.
    """

    local: Array
    reduced: Array
    ready: Callable[[], None] = _nothing
    arrived: Callable[[], None] = _nothing


class Snapshot:
    """Keeps the local buckets while a replica computes more microbatches into a zeroed buffer, or
    while it withholds them as a spare.

    Needed only after a failure, and by spares. Megatron's gradient buffer cannot simply be added
    to: scaling and reduce-scatter inside the replica are applied to it in place, once per pass, so
    the extra microbatches go into a clean buffer and the snapshot is added back
    (docs/megatron-seams.md, 1.2).
    """

    def __init__(self, buckets: Sequence[Bucket]):
        for bucket in buckets:
            bucket.ready()
        self._kept = [bucket.local.copy() for bucket in buckets]

    @classmethod
    def taken_out(cls, buckets: Sequence[Bucket]) -> Snapshot:
        """The local buckets' content, which are zero afterwards."""
        snapshot = cls(buckets)
        for bucket in buckets:
            bucket.local[:] = 0
        return snapshot

    def add_back(self, buckets: Sequence[Bucket]) -> None:
        """local += kept, for the same buckets in the same order."""
        for bucket, kept in zip(buckets, self._kept, strict=True):
            bucket.ready()
            bucket.local[:] += kept
