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
    """

    positions: tuple[int, ...]
    first: int = 0

    @classmethod
    def after(cls, microbatches: int, replicas: int) -> Streams:
        """Streams that go on behind a number of microbatches that were consumed in order."""
        return cls((0,) * replicas, microbatches)

    def microbatch(self, replica_id: int, offset: int) -> int:
        """The dataset's number of the `offset`-th microbatch that the replica has yet to commit."""
        return self.first + (self.positions[replica_id] + offset) * len(self.positions) + replica_id

    def committed(self, assignment: Assignment) -> Streams:
        """The streams after an iteration that committed `assignment`."""
        positions = list(self.positions)
        for replica, ids in assignment.shares:
            positions[replica] += len(ids)
        return replace(self, positions=tuple(positions))

    def resumed_by(self, replicas: int) -> Streams:
        """The streams of a job that resumes with `replicas` replicas.

        The same number goes on where each stream stood, the lost ones too. Another number starts
        new streams behind all that was committed: nothing comes twice, but what the lost replicas'
        streams had yet to give is skipped.
        """
        if replicas == len(self.positions):
            return self
        ends = [self.microbatch(r, -1) + 1 for r, p in enumerate(self.positions) if p]
        return Streams.after(max([self.first, *ends]), replicas)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def parse_streams(text: str) -> Streams:
    """The inverse of `str(streams)`. Raises ConfigError for other text."""
    try:
        found = json.loads(text)
        return Streams(tuple(map(int, _list(found["positions"]))), int(found["first"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"expected the positions of the sample streams, got {text!r}") from error


def _list(value: object) -> Sequence[int]:
    if not isinstance(value, list) or not value:
        raise ValueError("not a list")
    return value
