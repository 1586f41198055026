"""The watcher thread over a transport that says what it is told to."""

from __future__ import annotations

import threading

import pytest

from recover_megatron.adapters.megatron.session import first_dead
from recover_megatron.collectives.quorum import Place
from recover_megatron.collectives.watcher import Watcher


class Told:
    """A Transport as far as the watcher uses it. `die` is remembered, and ends the watcher."""

    def __init__(self) -> None:
        self.dead: frozenset[int] = frozenset()
        self.polls = threading.Semaphore(0)
        self.left: list[str] = []
        self.leave = threading.Event()  # the watcher's own

    def failed(self) -> frozenset[int]:
        self.polls.release()
        return self.dead

    def die(self, reason: str) -> None:
        self.left.append(reason)
        self.leave.set()


@pytest.fixture
def watched():
    transport, noted = Told(), []
    mates = frozenset({4, 6})  # of rank 5
    watcher = Watcher(transport, mates, 0.001, noted.append, told_s=0.05)
    transport.leave = watcher._stop
    watcher.start()
    yield transport, watcher, noted
    watcher.stop()


def ends(watcher: Watcher) -> bool:
    watcher._thread.join(timeout=30)
    return not watcher._thread.is_alive()


def polled_again(transport: Told) -> None:
    for _ in range(2):  # the second begins after the first has been dealt with
        while transport.polls.acquire(blocking=False):
            pass
        assert transport.polls.acquire(timeout=30)


def test_a_dead_stranger_is_noted_and_nothing_else(watched):
    transport, watcher, noted = watched
    transport.dead = frozenset({1})
    polled_again(transport)
    watcher.stop()
    assert noted == [[1]]
    assert transport.left == []


def test_it_leaves_when_mpi_says_that_a_mate_has_died(watched):
    transport, watcher, noted = watched
    transport.dead = frozenset({1, 6})
    assert ends(watcher)
    assert noted == [[1, 6]]
    assert transport.left == ["rank 6 of its replica has died"]


def test_it_leaves_by_proof_when_mpi_says_nothing(watched):
    transport, watcher, _ = watched
    watcher.proven_dead = lambda: frozenset({4})
    assert ends(watcher)
    assert transport.left == ["rank 4 of its replica has died"]


def test_who_died_first_is_said_of_one_only_if_it_was_seen_alone():
    places = [Place(host, 100) for host in ("a", "a", "b", "b")]
    assert first_dead({2, 3}, [[0], [3], [2]], places) == "rank 3 on b"
    assert first_dead({0, 1}, [[0, 1, 2]], places) == "rank 0 on a, rank 1 on a"
    assert first_dead({1}, [[0]], places) == "nobody"
