"""Traces and consoles survive SIGKILL; a new leader repeats rather than loses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from recover_megatron.console import log_path
from recover_megatron.events import FaultInjected
from recover_megatron.trace import Trace, read_traces, trace_path

RANK = """
import os, signal, sys
from recover_megatron.console import Console
console = Console(sys.argv[1], int(sys.argv[2]), 0)
def step(number):
    console.begin()
    console.committed()
    print("line", number)
if sys.argv[2] == "0":
    console.lead()
for number in (1, 2, 3):
    step(number)
console.begin()   # iteration 4 begins and is never committed
if sys.argv[2] == "0":
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)
console.lead()
console.committed()
print("line 4")
console.close()
"""


def start(folder, replica: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", RANK, str(folder), str(replica)]
    return subprocess.run(command, capture_output=True, text=True)


def test_no_line_is_lost_when_the_leader_is_killed(tmp_path):
    """The leader's console has lines 1 to 3, since it echoes before an iteration; its successor
    starts with what it wrote since the last committed iteration began."""
    leader = start(tmp_path, 0)
    assert leader.returncode == -signal.SIGKILL
    assert leader.stdout.startswith("line 1\nline 2\nline 3\n")
    assert log_path(tmp_path, 0, 0).read_text().endswith("last words\n")
    assert start(tmp_path, 1).stdout == "line 3\nline 4\n"


def test_what_was_traced_before_a_kill_is_read_back(tmp_path):
    child = os.fork()
    if not child:
        trace = Trace(str(tmp_path), 2, 1)
        trace.emit(FaultInjected(iteration=3))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with trace_path(tmp_path, 2, 1).open("a") as half:
        half.write('{"event": "cut sho')
    (event,) = read_traces(tmp_path)
    assert (event.KIND, event.replica, event.position) == ("fault", 2, 1)


def test_without_a_folder_nothing_is_traced():
    Trace(None, 0, 0).emit(FaultInjected(iteration=0))
