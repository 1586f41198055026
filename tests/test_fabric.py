"""The ring: its plan, carried out by all ranks in lockstep, is right, and gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.fabric import plan
from recover_megatron.collectives.fabric.interface import check_pair


def run(inputs: list[np.ndarray], combine) -> list[np.ndarray]:
    """What every rank holds after its steps, by rank."""
    ranks, count = len(inputs), inputs[0].size
    outputs = [np.full_like(array, 77) for array in inputs]
    if ranks == 1:
        return [inputs[0].copy()]
    plans = [plan.ring(rank, ranks, count) for rank in range(ranks)]
    for steps in zip(*plans, strict=True):
        sent = [
            (inputs[rank] if step.local else outputs[rank])[slice(*step.out)].copy()
            for rank, step in enumerate(steps)
        ]
        for rank, step in enumerate(steps):
            came, into = sent[(rank - 1) % ranks], outputs[rank][slice(*step.into)]
            assert came.size == into.size
            into[:] = combine(came, inputs[rank][slice(*step.into)]) if step.combine else came
    return outputs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("size", [0, 1, 5, 16, 1000])
def test_the_sum_is_right_and_bitwise_equal_everywhere(ranks, size):
    draw = np.random.default_rng(size * 100 + ranks)
    inputs = [draw.standard_normal(size).astype(np.float32) for _ in range(ranks)]
    outputs = run(inputs, np.add)
    exact = np.sum(np.array(inputs, dtype=np.float64), axis=0)
    for output in outputs:
        np.testing.assert_array_equal(output, outputs[0])
        np.testing.assert_allclose(output, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("combine", [np.minimum, np.maximum])
def test_other_operations_and_integers(combine):
    inputs = [np.array([3, -7, 2**40, k], dtype=np.int64) * (-1) ** k for k in range(5)]
    for output in run(inputs, combine):
        np.testing.assert_array_equal(output, combine.reduce(inputs))


@given(st.integers(0, 10**7), st.integers(1, 20), st.sampled_from([4, 8]))
def test_the_pieces_are_all_of_it_and_no_message_is_too_long(count, size, itemsize):
    pieces = plan.pieces(count, size, itemsize)
    assert [first for first, _ in pieces] == [0, *(end for _, end in pieces)][: len(pieces)]
    assert (pieces[-1][1] if pieces else 0) == count
    for first, end in pieces:
        assert plan.longest_chunk(end - first, size) * itemsize <= plan.EAGER_BYTES


def test_a_plan_prints():
    assert [str(step) for step in plan.ring(0, 3, 9)] == [
        "send own 0:3, combine 6:9",
        "send reduced 6:9, combine 3:6",
        "send reduced 3:6, store 0:3",
        "send reduced 0:3, store 6:9",
    ]


def test_arrays_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="equal shapes and dtypes"):
        check_pair(np.zeros(3, np.float32), np.zeros(3, np.float64))
