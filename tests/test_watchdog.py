"""The watchdog process over a real process that stops making one kind of progress."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

CODE = """
import sys, time
from recover_megatron.collectives import watchdog
watchdog.MPI_LIMIT_S = 0.5
dog = watchdog.Watchdog(0.5, 0.5, 60.0, sys.argv[1])
for _ in range(10):
    dog.beat(); dog.watcher_runs(); dog.calls_mpi(); dog.called_mpi()
    time.sleep(0.1)
dog.rest(); dog.watcher_ends()
time.sleep(1)
{then}
time.sleep({rest})
print("alive")
"""


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("dog.beat()", "no progress of its own"),
        ("dog.between()", "no progress of its own"),
        ("dog.watcher_runs()", "its watcher thread does not run"),
        ("dog.calls_mpi()", "its training thread is stuck in a call of Open MPI"),
    ],
)
def test_who_stops_is_ended_with_the_reason_in_its_trace(tmp_path, then, reason):
    trace = tmp_path / "trace.r3.p1.jsonl"
    words = [sys.executable, "-c", CODE.format(then=then, rest=60), str(trace)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGKILL
    assert "alive" not in done.stdout
    (event,) = map(json.loads, trace.read_text().splitlines())
    assert (event["event"], event["replica"], event["position"]) == ("died", 3, 1)
    assert event["reason"].startswith(reason)
    assert "File" in done.stderr  # its stack


def test_who_waits_for_peers_may_wait(tmp_path):
    words = [sys.executable, "-c", CODE.format(then="dog.rest()", rest=2), str(tmp_path / "t")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "alive\n")
