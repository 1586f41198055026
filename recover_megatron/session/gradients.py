"""A framework's gradient, cut into buckets in host memory that a fabric can reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from recover_megatron.recovery.bucket import Bucket
from recover_megatron.session.staging import CudaDevice, Device, HostDevice, StagedPiece


class GradientSource(Protocol):
    """Where a host framework keeps the gradient of one rank."""

    def views(self) -> Sequence[torch.Tensor]:
        """What must be summed over the replicas: one-dimensional views, in the same order at every
        rank of a position group, valid for the model's life."""

    def zero(self) -> None:
        """Sets the whole gradient to zero, as before the first microbatch of an iteration."""


class GradientBuckets:
    """The data-parallel gradients of one rank as host buckets, in the same order at every rank of
    a position group. Made once, when the model is built; the views stay valid for its life.

    A view may be as large as the model, so views are cut into pieces of at most `bucket_bytes`. A
    float32 view in host memory is its own local bucket (no copy). Any other is staged (staging.py).
    """

    def __init__(self, source: GradientSource, bucket_bytes: int, device: Device | None = None):
        pieces = max(1, bucket_bytes // 4)
        self.zero = source.zero
        self._views = [p for view in source.views() for p in view.split(pieces)]
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
        """After the agreement only: the framework's buffers hold the reduced buckets now."""
        self.before_compute()
        for view, bucket in self._in_place:
            view.copy_(torch.from_numpy(bucket.reduced))


def _is_host_float(view: torch.Tensor) -> bool:
    return view.device.type == "cpu" and view.dtype == torch.float32
