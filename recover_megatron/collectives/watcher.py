"""The watcher thread: replicas die whole, and MPI makes progress meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set

from recover_megatron.collectives.transport import Transport
from recover_megatron.collectives.watchdog import Watchdog


class Watcher:
    """One daemon thread per rank, started right after MPI and before torch is imported.

    * It polls `transport.failed()`, which drives MPI's progress: without it nothing is seen while
      the training thread computes (ulfm.md, rule 4).
    * When a mate of this rank's replica has died, it ends this process: the rest of a replica has
      no use, and its peers must not wait for it. No NCCL or gloo time-out is waited for. It knows
      of a death from MPI, or, `told_s` seconds later, by proof (`proven_dead`, once the ranks'
      places are known): over hosts, MPI may tell the last replica's ranks only after its
      heartbeat's time-out. MPI comes first, so that others see who died first: it tells all of one
      death before the next one happens.
    * It calls `look` each time, and leaves if that gives a reason (hosts/rank.py).
    * It tells the watchdog that it runs.
    """

    def __init__(
        self,
        transport: Transport,
        mates: frozenset[int],
        poll_s: float,
        on_failed: Callable[[list[int]], None],
        watchdog: Watchdog | None = None,
        look: Callable[[], str | None] = lambda: None,
        told_s: float = 1.0,
    ):
        self._transport = transport
        self._mates = mates
        self._poll_s = poll_s
        self._on_failed = on_failed
        self._look = look
        self._watchdog = watchdog
        self._told_s = told_s
        self.proven_dead: Callable[[], Set[int]] = frozenset
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Before leaving: from here on a mate that has exited is not a failure."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        known: frozenset[int] = frozenset()
        proven_since: float | None = None
        while not self._stop.wait(self._poll_s):
            failed = self._transport.failed()
            if self._watchdog is not None:
                self._watchdog.watcher_runs()
            if failed != known:
                self._on_failed(sorted(failed - known))
                known = failed
            lost = self._mates & failed
            if proven := self._mates & self.proven_dead():
                proven_since = proven_since or time.monotonic()
                if time.monotonic() - proven_since >= self._told_s:
                    lost |= proven
            if lost:
                self._transport.die(f"rank {min(lost)} of its replica has died")
            if reason := self._look():
                self._transport.die(reason)
        if self._watchdog is not None:
            self._watchdog.watcher_ends()
