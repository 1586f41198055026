"""The watchdog process over a real process that stops making one kind of progress."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recover_megatron.collectives.membership.quorum import running

pytestmark = pytest.mark.timed
CODE = """
import sys, time
from recover_megatron.collectives.membership import watchdog
watchdog.MPI_LIMIT_S = 0.5
dog = watchdog.Watchdog(0.5, 0.5, 60.0, sys.argv[1])
for _ in range(10):
    dog.beat(); dog.engine_runs()
    time.sleep(0.1)
dog.rest(); dog.engine_rests()
time.sleep(1)
{then}
time.sleep({rest})
print("alive")
dog.leaves(0)
"""


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("dog.beat()", "no progress of its own"),
        ("dog.between()", "no progress of its own"),
        ("dog.engine_runs()", "its engine thread does not run: stuck in a call of Open MPI"),
        ("dog.engine_runs(2)", "its engine thread does not run: stuck in a call of Open MPI"),
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


def test_before_the_first_iteration_a_long_import_is_no_hang(tmp_path):
    code = (
        CODE[: CODE.index("for _")]
        + "dog.engine_runs(); time.sleep(2); print('alive'); dog.leaves(0)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "t")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "alive\n")


HELPER = """
import subprocess, sys, time, os
from recover_megatron.collectives.membership import watchdog
watchdog.POLL_S = 0.05
dog = watchdog.Watchdog(0, 0, 60.0, None)
shell = ["sh", "-c", "sleep 600 & echo $! && wait"]
helper = subprocess.Popen(shell, stdout=subprocess.PIPE, text=True)
print(helper.pid, helper.stdout.readline(), flush=True)
time.sleep(2.5)
{end}
"""


@pytest.mark.parametrize("end", ["dog.leaves(0); os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_what_a_rank_has_started_ends_with_it(end):
    words = [sys.executable, "-c", HELPER.format(end=end)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=50)
    started = [int(word) for word in done.stdout.split()]
    assert len(started) == 2
    limit = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < limit, "a helper is left"
        time.sleep(0.05)


ENDS = {
    "dog.leaves(5); os._exit(5)": (5, None),
    "os._exit(0)": (-signal.SIGKILL, "its process ended by itself, with code 0"),
    "sys.exit(1)": (-signal.SIGKILL, "its process ended by itself, with code 1"),
    "os.abort()": (-signal.SIGKILL, "killed by SIGABRT"),
    "ctypes.string_at(0)": (-signal.SIGKILL, "killed by SIGSEGV"),
    "os.kill(os.getpid(), 15)": (-signal.SIGKILL, "killed by SIGTERM"),
    "os.kill(os.getppid(), 15); time.sleep(60)": (-signal.SIGKILL, "killed by SIGTERM"),
    "os.kill(os.getpid(), 9)": (-signal.SIGKILL, "killed by SIGKILL"),
    "dog.last_words(); os.kill(os.getpid(), 9)": (-signal.SIGKILL, None),
    "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(60)": (
        -signal.SIGKILL,
        "its process ended by itself, with code 0",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_but_an_orderly_one_is_a_death_by_sigkill(tmp_path, end):
    """Which is the one that Open MPI tells the others of."""
    code, reason = ENDS[end]
    trace = tmp_path / "trace.r3.p1.jsonl"
    program = (
        "import ctypes, os, sys, threading, time\n"
        "from recover_megatron.collectives.membership import watchdog\n"
        f"dog = watchdog.Watchdog(0, 0, 60.0, {str(trace)!r})\n{end}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50)
    assert done.returncode == code
    said = [json.loads(line)["reason"] for line in trace.open()] if trace.exists() else []
    assert said == ([] if reason is None else [reason])


def test_a_rank_dies_with_its_watchdog(tmp_path):
    program = (
        "import os, time\n"
        "from recover_megatron.collectives.membership import watchdog\n"
        "dog = watchdog.Watchdog(0, 0, 60.0, None)\n"
        "print(os.getpid(), flush=True); os.kill(os.getppid(), 9); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50)
    assert done.returncode == -signal.SIGKILL
    limit = time.monotonic() + 20
    while running(int(done.stdout)):
        assert time.monotonic() < limit
        time.sleep(0.02)
