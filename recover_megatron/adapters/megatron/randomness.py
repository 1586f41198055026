"""What a microbatch draws at random (dropout) is a function of the microbatch, not of its history.

Megatron's generators run on from draw to draw, so a microbatch's dropout would depend on all that
the same rank computed before it: on who computes it, and on a resume. Here every generator is set
before each microbatch, from

    its own state right after Megatron has seeded it   (the seed; equal where tensor-parallel ranks
                                                        must draw the same, different elsewhere)
    the iteration, the microbatch's number, the rank among the data-parallel ranks of the replica
    the model chunk

and before the optimizer step from the same without a microbatch. So a lost replica's microbatch is
computed again with the same dropout, by any other replica, and after a resume. Recomputation of
activations needs nothing more: Megatron keeps the states that a microbatch began with.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

BETWEEN = -1  # in the place of a microbatch: what follows an iteration


class Randomness:
    """One per process. `seeded` must be called when Megatron has just seeded its generators."""

    def __init__(self) -> None:
        self._cpu = self._device = b""
        self._tracked: dict[str, bytes] = {}

    def seeded(self) -> None:
        self._cpu = str(torch.initial_seed()).encode()
        self._device = str(torch.cuda.initial_seed()).encode()
        self._tracked = {name: _bytes_of(state) for name, state in _tracker().get_states().items()}

    def set(self, iteration: int, microbatch: int, dp_rank: int, chunk: int) -> None:
        """All generators of this rank, for what is drawn next."""
        place = f"{iteration} {microbatch} {dp_rank} {chunk}".encode()
        tracker = _tracker()
        states = tracker.get_states()
        for name, state in states.items():
            own = _seed(self._tracked.get(name, name.encode()), place)
            if isinstance(state, torch.Generator):  # captured CUDA graphs hold it
                state.manual_seed(own)
            else:
                torch.cuda.manual_seed(own)
                states[name] = torch.cuda.get_rng_state()
        if states:
            tracker.set_states(states)
        torch.cuda.manual_seed(_seed(self._device, b"device", place))
        common = _seed(self._cpu, place)
        torch.default_generator.manual_seed(common)
        # What a data set or a model may use beside torch.
        random.seed(common)
        np.random.seed(common % 2**32)


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _bytes_of(state: Any) -> bytes:
    if isinstance(state, torch.Generator):
        state = state.get_state()
    return bytes(state.cpu().numpy().tobytes())


def _seed(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big") >> 1
