"""Which dataset indices a microbatch holds: pure functions of agreed facts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from recover_megatron.errors import ConfigError
from recover_megatron.workload.assignment import Assignment


def sample_ids(
    consumed_samples: int,
    microbatch: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> range:
    """Dataset indices of microbatch `microbatch` of the iteration that starts after
    `consumed_samples` samples.

    `dp_rank` of `dp_size` is the place among the data-parallel ranks *inside* the replica. Equals
    Megatron's own MegatronPretrainingSampler (training/datasets/data_samplers.py) for a job whose
    data-parallel ranks all take the same number of microbatches.
    """
    first = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


@dataclass(frozen=True)
class Streams:
    """Each replica's own endless stream of microbatches, under the policy `versatile`.

    Stream r of R holds the microbatches `first` + r, `first` + r + R, ... of the dataset, so that
    without failures, and with B a multiple of R, every iteration takes the samples that `exact`
    takes. `positions[r]` is how many of stream r have been committed; all ranks know all positions,
    since they follow from the agreed assignments. What was computed but not committed comes again.

    Microbatch m holds the `size` samples from `offset` + m * `size` on.
    """

    positions: tuple[int, ...]
    first: int = 0
    size: int = 1
    offset: int = 0

    @classmethod
    def after(cls, samples: int, replicas: int, size: int = 1) -> Streams:
        """Streams that go on behind a number of samples that were consumed in order; a microbatch
        holds `size` samples."""
        first, offset = divmod(samples, size)
        return cls((0,) * replicas, first, size, offset)

    def microbatch(self, replica_id: int, offset: int) -> int:
        """The dataset's number of the `offset`-th microbatch that the replica has yet to commit."""
        return self.first + (self.positions[replica_id] + offset) * len(self.positions) + replica_id

    def committed(self, assignment: Assignment) -> Streams:
        """The streams after an iteration that committed `assignment`."""
        positions = list(self.positions)
        for replica, ids in assignment.shares:
            positions[replica] += len(ids)
        return replace(self, positions=tuple(positions))

    @property
    def end(self) -> int:
        """The first sample behind all that was committed."""
        ends = [self.microbatch(r, -1) + 1 for r, p in enumerate(self.positions) if p]
        return max([self.first, *ends]) * self.size + self.offset

    @property
    def skipped(self) -> int:
        """How many samples before `end` were not committed: what the streams of lost replicas had
        yet to give."""
        committed = (self.first + sum(self.positions)) * self.size + self.offset
        return self.end - committed

    def resumed_by(self, replicas: int, size: int | None = None) -> Streams:
        """The streams of a job that resumes with `replicas` replicas and microbatches of `size`
        samples (None: as they are).

        The same numbers go on where each stream stood, the lost ones too. Others start new streams
        behind all that was committed: nothing comes twice, but the `skipped` samples are left out.
        """
        if replicas == len(self.positions) and size in (None, self.size):
            return self
        return Streams.after(self.end, replicas, size or self.size)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def parse_streams(text: str, size: int = 1) -> Streams:
    """The inverse of `str(streams)`. Raises ConfigError for other text. `size` is that of a file
    which does not say it, as before version 0.2."""
    try:
        found = json.loads(text)
        positions, first = tuple(map(int, _list(found["positions"]))), int(found["first"])
        size, offset = int(found.get("size", size)), int(found.get("offset", 0))
        if min(*positions, first, offset) < 0 or size < 1:
            raise ValueError("negative")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"expected the positions of the sample streams, got {text!r}") from error
    return Streams(positions, first, size, offset)


def _list(value: object) -> Sequence[int]:
    if not isinstance(value, list) or not value:
        raise ValueError("not a list")
    return value
