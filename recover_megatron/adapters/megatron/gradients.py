"""Megatron's gradient buffers, cut into buckets that MPI can reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recover_megatron.errors import InvariantViolation
from recover_megatron.recovery.snapshot import Bucket


class GradientBuckets:
    """The data-parallel gradients of one rank as host buckets, in the same order at every rank of
    a position group. Made once, when the model is built; the views stay valid for its life.

    Without `--overlap-grad-reduce`, and always on later pipeline stages, Megatron has one bucket
    per buffer, so the buffers are cut here into pieces of at most `bucket_bytes`.

    A float32 view in host memory is its own local bucket (no copy). Any other (CUDA, bf16) has a
    float32 host copy, pinned for CUDA; the device keeps nothing extra. That path has not been run
    on a GPU.
    """

    def __init__(self, model: Sequence[Any], bucket_bytes: int):
        pieces = max(1, bucket_bytes // 4)
        self._views = [p for view in _reduced_views(model) for p in view.split(pieces)]
        self._hosts = [None if _is_host_float(view) else _host_copy(view) for view in self._views]
        self.buckets: list[Bucket] = []
        for view, host in zip(self._views, self._hosts, strict=True):
            local = (view if host is None else host).numpy()
            self.buckets.append(Bucket(local, torch.empty(view.numel()).numpy()))

    def make_nan(self) -> None:
        """Fault injection: one value of the local gradient becomes NaN."""
        self._views[0][0] = torch.nan

    def stage_in(self) -> None:
        """Device to host: after a backward pass, before a reduction."""
        for view, host in zip(self._views, self._hosts, strict=True):
            if host is not None:
                host.copy_(view)

    def stage_out(self) -> None:
        """Reduced buckets into Megatron's buffers. After the agreement only."""
        for view, bucket in zip(self._views, self.buckets, strict=True):
            view.copy_(torch.from_numpy(bucket.reduced))


def _reduced_views(model: Sequence[Any]) -> Iterator[torch.Tensor]:
    """What stock Megatron all-reduces over data parallel ranks: whole buckets, or with the
    distributed optimizer this rank's shard (param_and_grad_buffer.py, start_grad_sync)."""
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                if not group.ddp_config.use_distributed_optimizer:
                    yield bucket.grad_data.view(-1)
                    continue
                size = group.intra_distributed_optimizer_instance_size
                if bucket.grad_data.numel() % size:
                    raise InvariantViolation(
                        f"a gradient bucket of {bucket.grad_data.numel()} does not split by {size}"
                    )
                shards = bucket.grad_data.view(-1).chunk(size)
                yield shards[group.intra_distributed_optimizer_instance_rank]


def _is_host_float(view: torch.Tensor) -> bool:
    return view.device.type == "cpu" and view.dtype == torch.float32


def _host_copy(view: torch.Tensor) -> torch.Tensor:
    pinned = view.device.type == "cuda"
    return torch.empty(view.numel(), dtype=torch.float32, pin_memory=pinned)
