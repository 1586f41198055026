"""The training data by microbatch id: the next id comes from the assignment, not a counter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import default_collate

from recover_megatron.errors import InvariantViolation
from recover_megatron.workload.samples import sample_ids


class MicrobatchFeed:
    """Hands the same microbatch ids to every data iterator of this rank (one per model chunk)."""

    def __init__(self) -> None:
        self._loaders: list[MicrobatchLoader] = []
        self.fetched: dict[int, list[int]] = {}  # microbatch id -> dataset indices read for it

    def loader(self, dataset: Any, micro_batch_size: int, dp: tuple[int, int]) -> MicrobatchLoader:
        """`dp` is (rank, size) among the data-parallel ranks inside the replica."""
        self._loaders.append(MicrobatchLoader(self, dataset, micro_batch_size, dp))
        return self._loaders[-1]

    def supply(self, microbatches: Iterable[int], consumed_samples: int) -> None:
        """The ids that the coming pass through the schedule will ask for, in order."""
        ids = list(microbatches)
        self.fetched = {}
        for loader in self._loaders:
            loader.supply(ids, consumed_samples)


class MicrobatchLoader:
    """An endless iterator over collated microbatches; stands in for Megatron's train DataLoader.

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
        ids = sample_ids(
            self._consumed_samples,
            microbatch,
            self._micro_batch_size,
            self._dp_rank,
            self._dp_size,
        )
        self._feed.fetched[microbatch] = list(ids)
        return default_collate([self._dataset[i] for i in ids])
