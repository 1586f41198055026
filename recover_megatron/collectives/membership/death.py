"""How a rank dies: last words, then SIGKILL to itself, the one end that peers notice at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from recover_megatron.collectives.membership.watchdog import Watchdog
from recover_megatron.events import Died, Event


class Death:
    """One per rank, made before MPI is started. Any thread may call it.

    Args:
        rank: Of the initial world.
        watchdog: Told that this rank has had its last words, so that it adds none.
        emit: Traces an event.
    """

    def __init__(
        self,
        rank: int,
        watchdog: Watchdog | None = None,
        emit: Callable[[Event], None] = lambda event: None,
    ):
        self._rank, self._watchdog, self._emit = rank, watchdog, emit

    def __call__(self, reason: str) -> NoReturn:
        try:
            if self._watchdog is not None:
                self._watchdog.last_words()
            self._emit(Died(reason=reason))
            print(f"recover: rank {self._rank} leaves: {reason}", file=sys.stderr, flush=True)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")
