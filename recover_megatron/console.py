"""Each rank's raw output goes to its own file; the lowest live replica's is echoed to the console.

The file is written by the kernel as the process writes, so the last words of a dead rank are kept.
A file that cannot be written ends nothing: what the job must say then goes to the console.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def say(text: str, who: str = "recover") -> None:
    """A line on standard error, which may be gone: the launcher's way to speak."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{who}: {text}", file=sys.stderr, flush=True)


class Terminal:
    """The job's console, as this process found it at its start. Never raises: it may be gone."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        self._warned: set[str] = set()

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, data)

    def say(self, text: str) -> None:
        self.write(f"recover: {text}\n".encode(errors="replace"))

    def warn(self, subject: str, text: str) -> None:
        """One line for each subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            self.say(f"warning: {text}")


class Console:
    """Redirects file descriptors 1 and 2 of this process to `directory/log.rR.pP.txt`.

    While leading, what is new in the file is copied to the terminal: by a thread, and before each
    iteration. So when an iteration has been committed, all that the leader had written before it
    began is on the console. A replica that comes to lead starts with its own output from there: no
    line is lost, some may come twice.

    sys.stdout and sys.stderr never raise for a file that cannot be written. Its text then goes to
    the terminal, if this rank leads or has last words to say; when it can be written again, it is.
    """

    def __init__(
        self, directory: str, replica_id: int, position: int, terminal: Terminal | None = None
    ):
        self.path = log_path(directory, replica_id, position)
        self._terminal = terminal = terminal or Terminal()
        self._begun = self._mark = 0  # file offsets
        self._leading = self._speaks_up = False
        self._reader: io.BufferedReader | None = None
        self._echoing = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-console", daemon=True)
        try:
            self._redirect()
        except OSError as error:
            terminal.warn("log", f"{self.path} cannot be written ({error}): training goes on")
        sys.stdout = self._stream(1)
        sys.stderr = self._stream(2)
        self._thread.start()

    def _redirect(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
        file = os.open(self.path, flags, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        self._reader = open(self.path, "rb")  # noqa: SIM115  lives as long as the process

    def _stream(self, fd: int) -> io.TextIOWrapper:
        raw = io.BufferedWriter(_Unfailing(fd, self._not_written))
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)

    def _not_written(self, text: bytes, error: OSError) -> None:
        self._terminal.warn("log", f"{self.path} cannot be written ({error}): training goes on")
        if self._leading or self._speaks_up:
            with self._echoing:
                self._echo()
                self._terminal.write(text)

    def speak_up(self) -> None:
        """These are last words: from now on, what the file cannot take goes to the terminal."""
        self._speaks_up = True

    def begin(self) -> None:
        """An iteration begins."""
        if self._reader is not None:
            self._begun = os.fstat(self._reader.fileno()).st_size
        self._echo()

    def committed(self) -> None:
        """The iteration that began last has been committed by the whole job."""
        self._mark = self._begun

    def lead(self) -> None:
        """From now on this rank's output is the job's."""
        with self._echoing:
            if not self._leading and self._reader is not None:
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
            if self._leading and self._reader is not None:
                with contextlib.suppress(OSError):
                    self._terminal.write(self._reader.read())


class _Unfailing(io.RawIOBase):
    """Writes to a file descriptor; what cannot be written is handed to `not_written`."""

    def __init__(self, fd: int, not_written: Callable[[bytes, OSError], None]):
        self._fd = fd
        self._not_written = not_written

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        rest = bytes(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._not_written(rest, error)
        return len(data)


def log_path(directory: str | Path, replica_id: int, position: int) -> Path:
    return Path(directory) / f"log.r{replica_id}.p{position}.txt"
