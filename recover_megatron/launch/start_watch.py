"""The launcher's eye on a job's start: a rank that dies before the world has begun.

MPI cannot survive that: the others would wait for it for ever, inside MPI_Init. So the launcher
ends the job, with a sentence that names the rank, and starts it once more.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from recover_megatron.console import say
from recover_megatron.record.run_record import RunRecord, TraceTail
from recover_megatron.trace import BEGAN
from recover_megatron.world import ReplicaLayout

Wait = Callable[["subprocess.Popen[bytes]"], int]
_POLL_S = 0.25
# How long the other ranks have to begin without the dead one, as they can if it died late, and how
# long mpirun has to end the job by itself, as for a setting that is wrong.
_OTHERS_S = 6.0
_KILL_S = 5.0  # for mpirun to end its ranks


class StartWatch(threading.Thread):
    """Watches one mpirun until the world has begun: then any rank has traced `started`, or left the
    file BEGAN in the job's temporary folder, and a later death is for the ranks themselves to see.

    `failed` is, once it has ended the job, which rank died, in words.
    """

    def __init__(self, run_dir: Path, layout: ReplicaLayout, job_folder: Path):
        super().__init__(name="recover-start-watch", daemon=True)
        self.failed = ""
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._tail, self._record = TraceTail(run_dir), RunRecord()
        self._layout = layout
        self._began = job_folder / BEGAN
        self._processes: dict[int, psutil.Process] = {}  # of the ranks that mpirun itself started
        self._stop_asked = threading.Event()

    def beside(self, wait: Wait) -> Wait:
        """`wait` for mpirun, watched meanwhile."""

        def wait_watched(mpirun: subprocess.Popen[bytes]) -> int:
            self._mpirun = mpirun
            self.start()
            return wait(mpirun)

        return wait_watched

    def stop(self) -> None:
        self.look_away()
        self.join()

    def look_away(self) -> None:
        """The user ends the job: what dies from here on is meant to. Safe in a signal handler."""
        self._stop_asked.set()

    def run(self) -> None:
        mpirun = self._mpirun
        assert mpirun is not None
        dead: dict[int, str] = {}
        since = 0.0
        while not self._stop_asked.wait(_POLL_S) and mpirun.poll() is None:
            self._look_at_processes(mpirun)
            self._record.feed(self._tail.new_events())
            if self._began.exists() or self._record.started:
                return
            for rank in set(range(self._layout.ranks)) - set(dead):
                if how := self._death(rank):
                    dead[rank] = how
                    since = since or time.monotonic()
            late = dead and time.monotonic() - since > _OTHERS_S
            if late and not self._stop_asked.is_set():
                self._give_up(mpirun, dead)
                return

    def _look_at_processes(self, mpirun: subprocess.Popen[bytes]) -> None:
        try:
            for child in psutil.Process(mpirun.pid).children():
                rank = child.environ().get("OMPI_COMM_WORLD_RANK", "")
                if rank.isdigit():
                    self._processes.setdefault(int(rank), child)
        except psutil.Error:
            return  # it has just ended; the next look tells

    def _death(self, rank: int) -> str:
        place = self._layout.replica_of(rank), self._layout.position_of(rank)
        for event in self._record.deaths:
            if event.place == place:
                return event.reason
        process = self._processes.get(rank)
        if process is not None and not _runs(process):
            return "its process has ended"
        return ""

    def _give_up(self, mpirun: subprocess.Popen[bytes], dead: dict[int, str]) -> None:
        rank = min(dead)
        replica, position = self._layout.replica_of(rank), self._layout.position_of(rank)
        self.failed = (
            f"rank {rank} (replica {replica}, position {position}) died before the job had begun: "
            f"{dead[rank]}"
        )
        mpirun.terminate()
        try:
            mpirun.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            mpirun.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def put_aside(run_dir: Path, number: int) -> None:
    """What the `number`-th start left in the run folder goes into a folder of its own."""
    aside = run_dir / f"start-{number}"
    aside.mkdir(parents=True, exist_ok=True)
    for pattern in ("trace.r*.jsonl", "log.r*.txt"):
        for path in run_dir.glob(pattern):
            path.replace(aside / path.name)
    say(f"what its ranks said is in {aside}")
