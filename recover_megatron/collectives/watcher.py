"""The watcher thread: replicas die whole, hung ranks die, and MPI makes progress meanwhile."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable

from recover_megatron.collectives.transport import Transport


class Watcher:
    """One daemon thread per rank, started right after MPI and before torch is imported.

    * It polls `transport.failed()`, which drives MPI's progress: without it nothing is seen while
      the training thread computes (ulfm.md, rule 4).
    * When a mate of this rank's replica has died, it ends this process: the rest of a replica has
      no use, and its peers must not wait for it. No NCCL or gloo time-out is waited for.
    * From a `beat()` to the next `rest()` the training thread computes. If no further beat comes
      for `hang_timeout_s` it counts as hung: its stack is printed and the process ended. Waiting
      for peers is not computing.
    """

    def __init__(
        self,
        transport: Transport,
        mates: frozenset[int],
        poll_s: float,
        hang_timeout_s: float,
        on_failed: Callable[[list[int]], None],
    ):
        self._transport = transport
        self._mates = mates
        self._poll_s = poll_s
        self._hang_timeout_s = hang_timeout_s
        self._on_failed = on_failed
        self._last_beat: float | None = None  # None: not computing
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Before leaving: from here on a mate that has exited is not a failure."""
        self._stop.set()
        self._thread.join()

    def beat(self) -> None:
        """The training thread made progress (a microbatch began); starts the watch if needed."""
        self._last_beat = time.monotonic()

    def rest(self) -> None:
        """The training thread stops computing: it waits for peers, saves, or is done."""
        self._last_beat = None

    def _run(self) -> None:
        known: frozenset[int] = frozenset()
        while not self._stop.wait(self._poll_s):
            failed = self._transport.failed()
            if failed != known:
                self._on_failed(sorted(failed - known))
                known = failed
            if failed & self._mates:
                mate = min(failed & self._mates)
                self._transport.die(f"rank {mate} of its replica has died")
            self._check_for_hang()

    def _check_for_hang(self) -> None:
        beat = self._last_beat
        if beat is None or not self._hang_timeout_s:
            return
        if time.monotonic() - beat > self._hang_timeout_s:
            faulthandler.dump_traceback(all_threads=True)
            self._transport.die(f"no progress for {self._hang_timeout_s:g} s while computing")
