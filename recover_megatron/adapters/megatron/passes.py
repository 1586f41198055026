"""A pass of Megatron's schedule over some microbatches, as the hooks inside the schedule see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FinalizeCall:
    """The schedule's call of finalize_model_grads, at its end. It is only noted: what follows the
    gradient sync must wait for the commit."""

    stock: Callable[..., None]
    num_tokens: Any  # int32 tensor of one element; None without --calculate-per-token-loss
    args: tuple[Any, ...]
    more: dict[str, Any]

    @property
    def tokens(self) -> float:
        """Of this pass."""
        return 0.0 if self.num_tokens is None else float(self.num_tokens)

    def carry_out(self, model: list[Any], tokens: int) -> None:
        """Stock finalize_model_grads on the committed gradient: all but the grad sync (done), and
        with the whole job's number of tokens."""
        num_tokens = self.num_tokens
        if num_tokens is not None:
            num_tokens = torch.full_like(num_tokens, tokens)
        for chunk in model:
            chunk.finish_grad_sync = lambda *args, **more: None
        try:
            self.stock(model, num_tokens, *self.args, **self.more)
        finally:
            for chunk in model:
                del chunk.finish_grad_sync


class Pass:
    """One pass: which microbatch comes next, and whether it counts.

    Args:
        numbers: Of the microbatches, in the order in which the schedule takes them; padding stands
            at the end.
        count: How many of them weigh; the rest is padding.
    """

    def __init__(self, numbers: Sequence[int], count: int):
        self._numbers, self._count = numbers, count
        self._forwards: Counter[int] = Counter()  # by model chunk
        self._losses = 0
        self.finalize: FinalizeCall | None = None

    def next_number(self, chunk: int) -> int:
        """Of the microbatch that goes through model chunk `chunk` now."""
        number = self._numbers[self._forwards[chunk]]
        self._forwards[chunk] += 1
        return number

    def next_loss_counts(self) -> bool:
        """Where losses are computed: whether this one is no padding's."""
        self._losses += 1
        return self._losses <= self._count


def padding(model: Sequence[Any], count: int) -> int:
    """How many microbatches of weight zero the stock schedule needs beside `count`."""
    if len(model) == 1:
        return 0
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    group = get_model_config(model[0]).microbatch_group_size_per_vp_stage
    return interleaved_padding(count, stages, group)


def interleaved_padding(count: int, stages: int, group: int) -> int:
    """The least number to add so that the interleaved schedule takes `count` microbatches: at least
    one group, and a last group that is whole or no smaller than the number of stages (schedules.py,
    forward_backward_pipelining_with_interleaving)."""
    padded = max(count, group)
    rest = padded % group
    if 0 < rest < stages:
        padded += stages - rest
    return padded - count
