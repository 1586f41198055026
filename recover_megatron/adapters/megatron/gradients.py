"""Megatron's gradient buffers, cut into buckets that MPI can reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recover_megatron.adapters.megatron.staging import CudaDevice, Device, HostDevice, StagedPiece
from recover_megatron.errors import InvariantViolation
from recover_megatron.recovery.snapshot import Bucket


class GradientBuckets:
    """The data-parallel gradients of one rank as host buckets, in the same order at every rank of
    a position group. Made once, when the model is built; the views stay valid for its life.

    Without `--overlap-grad-reduce`, and always on later pipeline stages, Megatron has one bucket
    per buffer, so the buffers are cut here into pieces of at most `bucket_bytes`.

    A float32 view in host memory is its own local bucket (no copy). Any other is staged
    (staging.py).
    """

    def __init__(self, model: Sequence[Any], bucket_bytes: int, device: Device | None = None):
        pieces = max(1, bucket_bytes // 4)
        self._views = [p for view in _reduced_views(model) for p in view.split(pieces)]
        self._in_place: list[tuple[torch.Tensor, Bucket]] = []
        self._staged: list[StagedPiece] = []
        self.buckets: list[Bucket] = []
        for view in self._views:
            if _is_host_float(view) and device is None:
                bucket = Bucket(view.numpy(), torch.empty(view.numel()).numpy())
                self._in_place.append((view, bucket))
            else:
                device = device or (CudaDevice() if view.is_cuda else HostDevice())
                piece = StagedPiece(view, device)
                bucket = Bucket(piece.local, piece.reduced, piece.ready, piece.arrived)
                self._staged.append(piece)
            self.buckets.append(bucket)

    def make_nan(self) -> None:
        """Fault injection: one value of the local gradient becomes NaN."""
        self._views[0][0] = torch.nan

    def before_compute(self) -> None:
        """Before anything computes on the gradient's memory."""
        for piece in self._staged:
            piece.before_compute()

    def stage_in(self) -> None:
        """After a backward pass, before a reduction."""
        for piece in self._staged:
            piece.stage_in()

    def stage_out(self) -> None:
        """The reduced buckets are in Megatron's buffers afterwards. After the agreement only."""
        self.before_compute()
        for view, bucket in self._in_place:
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
