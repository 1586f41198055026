"""Staging against a device that performs its copies late: whoever looks too early sees NaN, and
whoever writes too early is told so."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.recovery.bucket import Snapshot
from recover_megatron.session.gradients import GradientBuckets
from recover_megatron.session.staging import StagedPiece


class LateDevice:
    """Copies end when somebody waits for them, or at a moment that the seed chooses. Until then
    their target is NaN; that neither side was written meanwhile is checked at the end."""

    def __init__(self, seed: int):
        self._draw = random.Random(seed)
        self._pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.allocated = 0  # bytes of host memory

    def host_buffer(self, count, dtype):
        self.allocated += count * dtype.itemsize
        return torch.full((count,), torch.nan, dtype=dtype)

    def copy(self, target, source):
        assert target.dtype == source.dtype  # a conversion would need memory on the device
        for pending in list(self._pending):
            if overlap(target, pending[0]) or overlap(target, pending[1]):
                raise AssertionError("a copy into memory that another one still uses")
        handle = (target, source, source.clone())
        target.fill_(torch.nan)
        self._pending.append(handle)
        if self._draw.random() < 0.3:
            self.wait(self._pending[self._draw.randrange(len(self._pending))])
        return handle

    def wait(self, handle):
        if not any(handle is pending for pending in self._pending):
            return  # it has ended
        target, source, before = handle
        assert torch.equal(source, before), "the source was written before its copy had ended"
        assert target.isnan().all(), "the target was written before its copy had ended"
        target.copy_(source)
        self._pending = [pending for pending in self._pending if pending is not handle]

    before_compute = wait


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    a, b = one.storage_offset(), other.storage_offset()
    return a < b + other.numel() and b < a + one.numel()


class Source:
    """A gradient on the device."""

    def __init__(self, gradient: torch.Tensor):
        self._gradient = gradient

    def views(self):
        return [self._gradient]

    def zero(self):
        raise AssertionError("the test zeroes it")


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 40),
    piece=st.integers(1, 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    failures=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=3),
    steps=st.integers(1, 3),
)
def test_what_is_committed_is_the_sum_whenever_the_copies_end(
    seed, size, piece, dtype, failures, steps
):
    """Reductions double the local bucket. A failure comes after so many buckets, with or without
    more microbatches for this replica."""
    device = LateDevice(seed)
    gradient = torch.zeros(size, dtype=dtype)
    gradients = GradientBuckets(Source(gradient), 4 * piece, device)
    for step in range(steps):
        total = 0

        def compute(value: int) -> None:
            gradients.before_compute()
            gradient.zero_()
            gradient.add_(value)
            gradients.stage_in()

        compute(step + 1)
        total += step + 1
        for after, more in failures if step == 0 else []:
            reduce(gradients, after)
            if more:
                kept = Snapshot(gradients.buckets)
                compute(8)
                kept.add_back(gradients.buckets)
                total += 8
        reduce(gradients, len(gradients.buckets))
        gradients.stage_out()
        assert gradient.tolist() == [2 * total] * size  # small integers are exact in bf16


def reduce(gradients: GradientBuckets, count: int) -> None:
    for bucket in gradients.buckets[:count]:
        bucket.ready()
        bucket.reduced[:] = 2 * bucket.local
        bucket.arrived()


def test_reading_before_ready_sees_garbage_on_this_device():
    piece = StagedPiece(torch.ones(4), late := LateDevice(seed=1))
    late._draw.random = lambda: 1.0
    piece.stage_in()
    assert torch.tensor(piece.local).isnan().all()
    piece.ready()
    assert piece.local.tolist() == [1, 1, 1, 1]


def test_computing_before_the_copies_have_ended_is_found_on_this_device():
    view = torch.ones(4)
    piece = StagedPiece(view, late := LateDevice(seed=1))
    late._draw.random = lambda: 1.0
    piece.stage_in()
    view.zero_()
    with pytest.raises(AssertionError, match="source was written"):
        piece.ready()


@pytest.mark.parametrize(("dtype", "per_number"), [(torch.float32, 8), (torch.bfloat16, 10)])
def test_the_host_holds_two_float32_copies_and_one_of_another_type(dtype, per_number):
    device = LateDevice(seed=0)
    GradientBuckets(Source(torch.zeros(100, dtype=dtype)), 64, device)
    assert device.allocated == 100 * per_number
