"""The ring all-reduce over threads and queues: right, and the same bits at every rank."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from recover_megatron.collectives import ring


class Lost(Exception):
    """What an exchange raises when its peer has died."""


def run(ranks: int, inputs: list[np.ndarray], combine, dies: tuple[int, int] | None = None):
    """The outputs, by rank; None at a rank whose exchange raised. `dies`: (rank, exchange)."""
    queues: list[queue.Queue] = [queue.Queue() for _ in range(ranks)]
    outputs: list[np.ndarray | None] = [None] * ranks

    def work(rank: int) -> None:
        calls = 0

        def exchange(outgoing: np.ndarray, incoming: np.ndarray) -> None:
            nonlocal calls
            calls += 1
            if dies == (rank, calls):
                raise Lost
            queues[(rank + 1) % ranks].put(outgoing.copy())
            came = queues[rank].get()
            if came is None:
                raise Lost
            incoming[:] = came

        send, receive = inputs[rank], np.full_like(inputs[rank], 77)
        scratch = np.empty(ring.longest_chunk(send.size, ranks), send.dtype)
        try:
            ring.all_reduce(rank, ranks, send, receive, scratch, combine, exchange)
            outputs[rank] = receive
        except Lost:
            queues[(rank + 1) % ranks].put(None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("size", [0, 1, 5, 16, 1000])
def test_the_sum_is_right_and_bitwise_equal_everywhere(ranks, size):
    draw = np.random.default_rng(size * 100 + ranks)
    inputs = [draw.standard_normal(size).astype(np.float32) for _ in range(ranks)]
    kept = [array.copy() for array in inputs]
    outputs = run(ranks, inputs, np.add)
    exact = np.sum(np.array(inputs, dtype=np.float64), axis=0)
    for output in outputs:
        np.testing.assert_array_equal(output, outputs[0])
        np.testing.assert_allclose(output, exact, rtol=1e-5, atol=1e-5)
    for before, after in zip(kept, inputs, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("combine", [np.minimum, np.maximum])
def test_other_operations_and_integers(combine):
    inputs = [np.array([3, -7, 2**40, k], dtype=np.int64) * (-1) ** k for k in range(5)]
    for output in run(5, inputs, combine):
        np.testing.assert_array_equal(output, combine.reduce(inputs))


@pytest.mark.parametrize("at", range(1, 7))
def test_a_lost_member_changes_no_input(at):
    """Exchange 1-3 of four ranks gathers sums, 4-6 hands them round. Some rank always notices."""
    inputs = [np.full(12, rank + 1.0) for rank in range(4)]
    outputs = run(4, inputs, np.add, dies=(2, at))
    assert outputs[2] is None
    assert outputs[3] is None  # it waits for what rank 2 did not send
    for rank, array in enumerate(inputs):
        assert (array == rank + 1.0).all()
