"""Who may go on after a partition (I5), and what counts as proof of a death. Standard library only.

ULFM says only that a rank has failed: it may be dead, or out of reach and alive. A dead one is no
danger. One that is out of reach thinks the same of us, and both sides would train on apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def has_quorum(before: Iterable[int], survivors: Iterable[int], dead: Iterable[int]) -> bool:
    """True if `survivors` may go on without the rest of `before`, the last agreed world's ranks.

    Whoever is proven dead is not counted. Of the others the survivors must be more than half, or
    half with the lowest rank among them. At most one side of a partition can be that, whatever
    deaths each side has proof of: the sides count each other, and neither can be proven dead.
    """
    side = set(survivors)
    contenders = (set(before) - set(dead)) | side
    twice = 2 * len(side)
    return twice > len(contenders) or (twice == len(contenders) and min(contenders) in side)


@dataclass(frozen=True)
class Place:
    """Where a rank lives. Prints as `host pid started namespace`.

    Numbers of processes are used again, so the moment at which the process started belongs to it;
    and containers have numbers of their own, which mean nothing in another `namespace`.
    """

    host: str
    pid: int
    started: str = "?"  # in the kernel's ticks
    namespace: str = "?"

    @property
    def name(self) -> str:
        """As a witness names it."""
        return f"{self.host} {self.pid}"

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.started} {self.namespace}"


def own_place(host: str) -> Place:
    return Place(host, os.getpid(), started(os.getpid()) or "?", _namespace())


def parse_place(text: str) -> Place:
    host, pid, began, namespace = text.split()
    return Place(host, int(pid), began, namespace)


def gather_places(transport: Any, host: str) -> list[Place]:
    """Of all ranks, by rank. Every rank calls it, at start-up, with its host's name."""
    return [
        parse_place(place.decode())
        for place in transport.share(str(own_place(host)).encode(), range(transport.size))
    ]


class Evidence:
    """Which ranks are proven dead, as far as this rank can tell.

    Ranks on this host: their process is gone. Ranks elsewhere: what this host's witness has written
    by now (hosts/witness.py) and `told` reads, a line `host` for a host and `host pid` for a
    process. On one host there is no other source.
    """

    def __init__(
        self, places: Sequence[Place], host: str, told: Callable[[], frozenset[str]] = frozenset
    ):
        self._places = places
        self._here = host
        self._told = told
        self._namespace = _namespace()

    def __call__(self, among: Iterable[int] | None = None) -> frozenset[int]:
        """Of the ranks `among`, or of all."""
        told = self._told()
        ranks = range(len(self._places)) if among is None else among
        return frozenset(rank for rank in ranks if self._is_dead(self._places[rank], told))

    def _is_dead(self, place: Place, told: frozenset[str]) -> bool:
        if place.host in told or place.name in told:
            return True
        here = place.host == self._here and place.namespace in ("?", self._namespace)
        return here and not running(place.pid, place.started)


def running(pid: int, began: str = "?") -> bool:
    """False if the process is gone, or has ended and waits for its parent (a zombie), or if its
    number is another one's now, that did not start when `began` says."""
    found = started(pid)
    return found is not None and began in ("?", found)


def started(pid: int) -> str | None:
    """When a process started, in ticks since its host did; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = status.rpartition(")")[2].split()
    return None if not fields or fields[0] in ("Z", "X") else fields[19]


def _namespace() -> str:
    """In which process numbers mean the same."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "?"
