"""The data by microbatch: the next one comes from the assignment, not from a counter.

A framework asks its data loader for "the next microbatch". Which one that is depends on who is
alive: before each pass over microbatches the feed is told which ones this replica computes, and its
loaders then hand out exactly those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate

from recover_megatron.errors import InvariantViolation
from recover_megatron.workload.assignment import Assignment
from recover_megatron.workload.samples import Streams, sample_ids


class MicrobatchFeed:
    """Hands the same microbatches to every data iterator of this rank (one per model chunk).

    Without `streams` (policy `exact`) an id is a place in the iteration's batch; with them
    (`versatile`) this replica's own stream goes on, whatever the id.
    """

    def __init__(self, replica_id: int) -> None:
        self.streams: Streams | None = None
        self._replica_id = replica_id
        self._loaders: list[MicrobatchLoader] = []
        self._offset = 0  # microbatches of the stream that this iteration has taken
        self._fetched: dict[int, list[int]] = {}  # microbatch -> dataset indices read for it

    def loader(self, dataset: Any, micro_batch_size: int, dp: tuple[int, int]) -> MicrobatchLoader:
        """`dp` is (rank, size) among the data-parallel ranks inside the replica."""
        self._loaders.append(MicrobatchLoader(self, dataset, micro_batch_size, dp))
        return self._loaders[-1]

    def begin(self) -> None:
        """An iteration begins."""
        self._offset = 0

    def committed(self, assignment: Assignment) -> None:
        """The iteration is committed: every rank moves all streams on."""
        if self.streams is not None:
            self.streams = self.streams.committed(assignment)

    def supply(
        self, microbatches: Sequence[int], consumed_samples: int, padding: int = 0
    ) -> list[int]:
        """The ids that the coming pass through the schedule will ask for, in order. `padding` more
        are the last one again. Returns their numbers: the ids, or, with streams, the dataset's."""
        numbers = list(microbatches)
        if self.streams is not None:
            offsets = range(self._offset, self._offset + len(numbers))
            numbers = [self.streams.microbatch(self._replica_id, k) for k in offsets]
            self._offset, consumed_samples = offsets.stop, self.streams.offset
        self._fetched = {number: [] for number in numbers}
        numbers += numbers[-1:] * padding
        for loader in self._loaders:
            loader.supply(numbers, consumed_samples)
        return numbers

    def note(self, microbatch: int, samples: list[int]) -> None:
        self._fetched[microbatch] = samples

    @property
    def fetched(self) -> tuple[tuple[int, ...] | None, ...]:
        """The dataset indices read in the last pass, by microbatch in order; None where this rank
        reads no data."""
        return tuple(tuple(samples) or None for samples in self._fetched.values())


class MicrobatchLoader:
    """An endless iterator over collated microbatches; stands in for a framework's DataLoader.

    Shapes and dtypes are the dataset's own with a leading dimension micro_batch_size.
    """

    def __init__(
        self, feed: MicrobatchFeed, dataset: Any, micro_batch_size: int, dp: tuple[int, int]
    ):
        self._feed = feed
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp
        self._queue: deque[int] = deque()
        self._consumed_samples = 0

    def supply(self, microbatches: list[int], consumed_samples: int) -> None:
        if self._queue:
            raise InvariantViolation(f"microbatches {list(self._queue)} were never asked for")
        self._queue.extend(microbatches)
        self._consumed_samples = consumed_samples

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._queue:
            raise InvariantViolation("the schedule asked for a microbatch that is not assigned")
        microbatch = self._queue.popleft()
        place = (self._micro_batch_size, self._dp_rank, self._dp_size)
        ids = list(sample_ids(self._consumed_samples, microbatch, *place))
        # Streams are endless; and several prefixes without weights are one epoch, unlike a single
        # one, which the framework makes as long as it has to be.
        ids = [i % len(self._dataset) for i in ids]
        self._feed.note(microbatch, ids)
        return default_collate([self._dataset[i] for i in ids])


class EvaluationFeed:
    """Hands each replica its share of every evaluation batch. Which dataset is read, validation or
    test, only the loader that is asked knows."""

    def __init__(self) -> None:
        self.batch = 0  # how many batches have begun
        self.samples = 0  # of the present batch
        self.passes = 0
        self.microbatches: list[int] = []  # of the present pass

    def begin(self, samples: int) -> None:
        """A batch of `samples` begins."""
        self.batch += 1
        self.samples = samples

    def supply(self, microbatches: Sequence[int], padding: int = 0) -> None:
        """As MicrobatchFeed.supply."""
        self.passes += 1
        self.microbatches = [*microbatches, *list(microbatches[-1:]) * padding]


class EvaluationLoader:
    """Stands in for the DataLoader of a validation or test dataset, `consumed_samples` of which
    have been read. A batch that it is asked for moves it on by the whole batch."""

    def __init__(
        self,
        feed: EvaluationFeed,
        dataset: Any,
        micro_batch_size: int,
        dp: tuple[int, int],
        consumed_samples: int,
    ):
        self._feed = feed
        self._dataset = dataset
        self._place = (micro_batch_size, *dp)
        self._first = consumed_samples  # of the present batch
        self._batch = self._pass = self._samples = 0
        self._queue: deque[int] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        feed = self._feed
        if self._batch != feed.batch:
            self._first += self._samples
            self._batch, self._samples = feed.batch, feed.samples
        if self._pass != feed.passes:
            self._pass, self._queue = feed.passes, deque(feed.microbatches)
        if not self._queue:
            raise InvariantViolation("the schedule asked for a microbatch that is not assigned")
        ids = sample_ids(self._first, self._queue.popleft(), *self._place)
        return default_collate([self._dataset[i % len(self._dataset)] for i in ids])
