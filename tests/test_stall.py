"""Who is waited for, by the traces that a standing job has left."""

from __future__ import annotations

import time

import pytest

from recover_megatron.events import Committed, Computed, Died, PeerFailed, Started
from recover_megatron.launch.stall import StallReport, waited_for
from recover_megatron.record.run_record import RunRecord
from recover_megatron.trace import Trace
from recover_megatron.world import ReplicaLayout

LAYOUT = ReplicaLayout(3, 2)


def trace_of(folder, rank: int) -> Trace:
    trace = Trace(str(folder), LAYOUT.replica_of(rank), LAYOUT.position_of(rank))
    trace.emit(Started(host=f"h{rank // 2}"))
    return trace


def test_the_rank_that_is_furthest_behind_is_named_with_its_host(tmp_path):
    for rank in range(LAYOUT.ranks):
        trace = trace_of(tmp_path, rank)
        trace.emit(Committed(iteration=6, assignment="r0: 0"))
        if rank != 3:
            trace.emit(Computed(iteration=7))
        trace.emit(PeerFailed())
    named = waited_for(RunRecord.read(tmp_path), LAYOUT)
    assert named.startswith("replica 1, position 1 (rank 3 on h1): last seen at ")
    assert named.endswith(", committed iteration 6")


def test_ranks_that_have_not_started_are_named_first_and_dead_ones_never(tmp_path):
    for rank in range(LAYOUT.ranks - 1):
        trace_of(tmp_path, rank).emit(Died(reason="") if rank == 0 else Computed(iteration=1))
    assert (
        waited_for(RunRecord.read(tmp_path), LAYOUT)
        == "replica 2, position 1 (rank 5): has not started"
    )


def test_where_all_are_equally_far_that_is_said(tmp_path):
    for rank in range(LAYOUT.ranks):
        trace_of(tmp_path, rank).emit(Computed(iteration=1))
    assert waited_for(RunRecord.read(tmp_path), LAYOUT).startswith(
        "all 6 ranks, which have come equally far"
    )


@pytest.mark.timed
def test_a_quiet_job_is_reported_once_and_a_busy_one_never(tmp_path, capsys):
    trace = trace_of(tmp_path, 0)
    report = StallReport(tmp_path, ReplicaLayout(1, 1), quiet_s=1.0)
    report.start()
    for _ in range(30):
        trace.emit(Computed(iteration=1))
        time.sleep(0.05)  # traced while it runs: not quiet
    assert capsys.readouterr().err == ""
    said = ""
    limit = time.monotonic() + 10
    while "waiting for" not in said and time.monotonic() < limit:
        said += capsys.readouterr().err
        time.sleep(0.05)
    assert "waiting for replica 0, position 0 (rank 0 on h0): last seen at" in said
    time.sleep(1.5)
    report.stop()
    assert "waiting for" not in capsys.readouterr().err
