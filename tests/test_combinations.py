"""A replica is killed in the middle of an all-reduce under each of Megatron's settings: losses,
gradient norms, samples, and at the end all weights and optimizer states, against plain Megatron.

`scripts/support_table.py` runs this file and writes the table from its results.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log
from recover_megatron.testing.combinations import COMBINATIONS, Combination
from recover_megatron.testing.rehearsal import SCRIPT

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
OPTIONS = ("--recover-bucket-mb", "0.05", "--recover-check-replicas-interval", "1")


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: c.id)
def test_killed_in_the_all_reduce(
    run, tmp_path, data_prefix, script, combination: Combination, record_property
):
    if combination.stock_only and script == SCRIPT:
        pytest.skip("only the stock script knows these flags")

    def job(name: str):
        save = ("--save", str(tmp_path / name), "--save-interval", "1000")
        iterations = ("--exit-interval", "6")
        return combination.job(data_prefix, script, *save, *iterations)

    command = job("plain").plain()
    if combination.draws:
        command = job("plain").recover(combination.replicas, tmp_path / "reference", *OPTIONS)
    code, output = run(command, "plain")
    if code and script != SCRIPT:
        errors = re.findall(r"^\[rank\d+\]: (\w+Error.*)", output, re.MULTILINE)
        pytest.skip(f"plain Megatron itself fails here: {errors[-1] if errors else output[-200:]}")
    assert code == 0, output
    plain = Log(output)
    fault = f"{combination.victim}@3:sync.1"
    words = (*OPTIONS, "--recover-inject", fault)
    command = job("recover").recover(combination.replicas, tmp_path / "run", *words)
    code, output = run(command, "recover")
    assert code == 0, output
    log, record = Log(output), AuditedRun(tmp_path / "run")

    victim = int(combination.victim[0])
    assert [r.replicas_lost for r in record.recoveries] == [[victim]]
    assert record.survivors == [r for r in range(combination.replicas) if r != victim]
    assert record.parameters_bitwise_equal
    batches = {i: e.microbatches for i, e in record.commits.items()}
    assert record.violations(len(plain.rates), batches) == [], output
    samples = [i for ids in record.samples.values() for i in ids]
    assert samples == list(range(len(samples)))  # each once, in the failure-free order
    assert log.batches == plain.batches
    assert log.rates == plain.rates

    # The stock script logs no loss of an iteration that the loss scaler skips.
    assert log.losses.keys() == plain.losses.keys()
    difference = max(abs(log.losses[i] - plain.losses[i]) for i in plain.losses)
    record_property("loss_difference", difference)
    assert difference <= combination.loss
    norms = max(abs(log.grad_norms[i] / plain.grad_norms[i] - 1) for i in plain.grad_norms)
    assert norms <= max(1e-3, 30 * combination.loss)
    weights = difference_of_checkpoints(tmp_path / "recover", tmp_path / "plain")
    record_property("weight_difference", weights)
    assert weights <= combination.weights
    assert log.balance == pytest.approx(plain.balance, rel=1e-5)


def difference_of_checkpoints(one: Path, other: Path) -> float:
    """The largest difference of any number in two checkpoints: weights and optimizer state."""
    mine, theirs = load(one), load(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[k].double() - theirs[k].double()).abs().max()) for k in mine)


def load(save: Path) -> dict[str, torch.Tensor]:
    number = int((save / "latest_checkpointed_iteration.txt").read_text())
    reader = dcp.FileSystemReader(str(save / f"iter_{number:07d}"))
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and "rng" not in name
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
