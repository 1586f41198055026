"""Replicas die whole: by what MPI says of a mate, and by proof."""

from __future__ import annotations

import threading

import pytest

from recover_megatron.collectives.membership.quorum import Place
from recover_megatron.collectives.membership.watcher import Mates, ProvenMates, Watcher
from recover_megatron.session.losses import first_dead


class Left(Exception):
    """Stands for the end of this process."""


@pytest.fixture
def mates():
    """Of rank 5, and what they noted."""
    noted: list[list[int]] = []

    def die(reason: str):
        raise Left(reason)

    return Mates(frozenset({4, 6}), die, noted.append), noted


def test_a_dead_stranger_is_noted_and_nothing_else(mates):
    mates[0].heard({1})
    assert mates[1] == [[1]]


def test_it_leaves_when_mpi_says_that_a_mate_has_died(mates):
    with pytest.raises(Left, match="rank 6 of its replica has died"):
        mates[0].heard({1, 6})
    assert mates[1] == [[1, 6]]  # first it says what it saw


def test_a_mate_that_exits_at_the_end_of_the_job_is_no_failure(mates):
    mates[0].leave()
    mates[0].heard({4})
    assert mates[1] == []


def test_a_proven_death_counts_once_mpi_has_had_its_time():
    assert ProvenMates(lambda: frozenset({4}), told_s=3600.0)() is None
    assert ProvenMates(frozenset)() is None
    assert ProvenMates(lambda: frozenset({4}), told_s=0.0)() == "rank 4 of its replica has died"


def test_the_watcher_leaves_for_the_first_reason_that_any_look_gives():
    reasons: list[str] = []
    told = threading.Event()

    def die(reason: str):
        reasons.append(reason)
        told.set()
        raise SystemExit  # of its thread

    watcher = Watcher([lambda: None, lambda: "its host's witness has ended"], die, 0.001)
    assert told.wait(30)
    watcher.stop()
    assert reasons == ["its host's witness has ended"]


def test_who_died_first_is_said_of_one_only_if_it_was_seen_alone():
    places = [Place(host, 100) for host in ("a", "a", "b", "b")]
    assert first_dead({2, 3}, [[0], [3], [2]], places) == "rank 3 on b"
    assert first_dead({0, 1}, [[0, 1, 2]], places) == "rank 0 on a, rank 1 on a"
    assert first_dead({1}, [[0]], places) == "nobody"
