"""Replicas die whole: a rank whose mate has died ends itself, and so does one whose host is lost.

The rest of a replica has no use, and its peers must not wait for it. Nobody waits for a time-out of
NCCL or gloo. A rank learns of a mate's death

* from MPI: the engine tells `Mates.heard`;
* by proof, that is, the mate's process is gone: `ProvenMates`, asked all the time by a `Watcher`.
  Over hosts, MPI may tell the last replica's ranks only after its heartbeat's time-out, or stand in
  a call that waits for peers. MPI comes first, so that others see who died first: it tells all of
  one death before the next one happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import NoReturn

TOLD_S = 1.0  # how long MPI has to tell of a death that is proven


class Mates:
    """What MPI says of the other ranks of this rank's replica.

    Args:
        mates: Their ranks.
        die: Ends this rank.
        note: Told of all ranks that have newly failed, mates or not.
    """

    def __init__(
        self,
        mates: frozenset[int],
        die: Callable[[str], NoReturn],
        note: Callable[[list[int]], None],
    ):
        self._mates, self._die, self._note = mates, die, note
        self._leaving = False

    def heard(self, failed: Set[int]) -> None:
        """In the engine's thread: these ranks have newly failed."""
        if self._leaving:
            return
        self._note(sorted(failed))
        if lost := self._mates & failed:
            self._die(f"rank {min(lost)} of its replica has died")

    def leave(self) -> None:
        """From here on a mate that has exited is not a failure: the whole job ends."""
        self._leaving = True


class ProvenMates:
    """A reason to leave once a mate has been proven dead for TOLD_S seconds; None until then."""

    def __init__(self, proven_dead: Callable[[], Set[int]], told_s: float = TOLD_S):
        self._proven_dead, self._told_s = proven_dead, told_s
        self._since: float | None = None

    def __call__(self) -> str | None:
        if dead := self._proven_dead():
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since >= self._told_s:
                return f"rank {min(dead)} of its replica has died"
        return None


class Watcher:
    """A daemon thread that makes no call of MPI. It asks each of `looks` every `poll_s` seconds for
    a reason to leave, and leaves if there is one."""

    def __init__(
        self,
        looks: Sequence[Callable[[], str | None]],
        die: Callable[[str], NoReturn],
        poll_s: float,
    ):
        self._looks, self._die, self._poll_s = looks, die, poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Before leaving."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            for look in self._looks:
                if reason := look():
                    self._die(reason)
