"""Each rank's raw output goes to its own file; the lowest live replica's is echoed to the console.

The file is written by the kernel as the process writes, so the last words of a dead rank are kept.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path


class Console:
    """Redirects file descriptors 1 and 2 of this process to `directory/log.rR.pP.txt`.

    While leading, what is new in the file is copied to the former standard output: by a thread, and
    before each iteration. So when an iteration has been committed, all that the leader had written
    before it began is on the console. A replica that comes to lead starts with its own output from
    there: no line is lost, some may come twice.
    """

    def __init__(self, directory: str, replica_id: int, position: int):
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.path = log_path(directory, replica_id, position)
        self._terminal = os.dup(1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
        file = os.open(self.path, flags, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._reader = open(self.path, "rb")  # noqa: SIM115  lives as long as the process
        self._begun = self._mark = 0  # file offsets
        self._leading = False
        self._echoing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-console", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """An iteration begins."""
        self._begun = os.fstat(self._reader.fileno()).st_size
        self._echo()

    def committed(self) -> None:
        """The iteration that began last has been committed by the whole job."""
        self._mark = self._begun

    def lead(self) -> None:
        """From now on this rank's output is the job's."""
        if not self._leading:
            self._reader.seek(self._mark)
            self._leading = True

    def close(self) -> None:
        """Echo the rest. The process is about to leave."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(0.1)
            self._echo()

    def _echo(self) -> None:
        with self._echoing:
            if self._leading and (text := self._reader.read()):
                with contextlib.suppress(OSError):  # the console may be gone; the file is not
                    os.write(self._terminal, text)


def log_path(directory: str | Path, replica_id: int, position: int) -> Path:
    return Path(directory) / f"log.r{replica_id}.p{position}.txt"
