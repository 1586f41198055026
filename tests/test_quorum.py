"""Who may go on: the quorum rule as a property, proof of a death, waiting for it, and settling."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.guard import GuardedCommunicator
from recover_megatron.collectives.membership.quorum import (
    Evidence,
    Place,
    has_quorum,
    parse_place,
    running,
)
from recover_megatron.collectives.membership.settling import Settling
from recover_megatron.config import RecoveryConfig
from recover_megatron.errors import NoQuorum, ReplicaLost
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.world import ReplicaLayout

RANKS = st.integers(0, 9)


@given(st.sets(RANKS, min_size=1), st.data())
def test_at_most_one_side_has_a_quorum(before, data):
    """Whatever each side can prove of those that are dead. One side may have agreed on a smaller
    world, without some of the dead, before they lost each other."""
    order = data.draw(st.permutations(sorted(before)))
    first, second = sorted(data.draw(st.integers(0, len(order))) for _ in range(2))
    one, other, dead = order[:first], order[first:second], order[second:]
    some = st.sets(st.sampled_from(dead)) if dead else st.just(set())
    smaller = before - data.draw(some)
    goes_on = bool(one) and has_quorum(smaller, one, data.draw(some))
    assert not (goes_on and other and has_quorum(before, other, data.draw(some)))


@given(st.sets(RANKS, min_size=2), st.data())
def test_with_proof_of_all_deaths_any_survivors_go_on(before, data):
    survivors = data.draw(st.sets(st.sampled_from(sorted(before)), min_size=1))
    assert has_quorum(before, survivors, before - survivors)


def test_a_majority_needs_no_proof_and_of_two_halves_the_one_with_the_lowest_rank_goes_on():
    assert has_quorum(range(4), [1, 2, 3], [])
    assert not has_quorum(range(4), [0], [])
    assert has_quorum(range(4), [0, 3], [])
    assert not has_quorum(range(4), [1, 2], [])
    assert has_quorum(range(4), [1, 2], [0])


def test_proof_is_a_process_that_is_gone_or_the_witness_saying_so(tmp_path):
    here = "h0"
    with subprocess.Popen(["sleep", "60"]) as alive:
        ended = subprocess.Popen(["true"])
        while running(ended.pid):  # until it is a zombie
            pass
        folder = HostFolder(tmp_path)
        places = [Place(here, alive.pid), Place(here, ended.pid)]
        places += [Place("h1", 7), Place("h1", 8), Place("h2", 7)]
        evidence = Evidence(places, here, lambda: folder.lines("dead"))
        assert evidence() == {1}
        folder.write("dead", "h1 8\n")
        assert evidence() == {1, 3}
        folder.write("dead", "h1 8\nh2\n")
        assert evidence() == {1, 3, 4}
        assert Evidence(places, here)() == {1}
        alive.kill()
        ended.wait()
    assert evidence() == {0, 1, 3, 4}


def test_places_print_and_parse_back():
    assert parse_place(str(Place("node-7", 123))) == Place("node-7", 123)


# --- rounds of a repair that wait for proof -------------------------------------------------------

QUICK = RecoveryConfig(settle_s=1e-9, settle_limit_s=1e-9, proof_poll_s=1e-9, proof_polls=5)
FOUR = ReplicaLayout(4, 1)


class Survivor:
    """Membership of rank 0, whose only live peer, rank 1, votes as it does. `proofs` are what rank
    1 has proof of, at each survey in turn; None means that it dies in it."""

    rank = 0

    def __init__(self, proofs: list[set[int] | None]):
        self._proofs = proofs
        self.surveys = 0

    def agree(self, flags: int) -> int:
        return flags

    def survey(self, marks):
        proof = self._proofs[min(self.surveys, len(self._proofs) - 1)]
        self.surveys += 1
        if proof is None:
            raise ReplicaLost("survey")
        marks = marks.copy()
        marks[list(proof)] = True
        return marks

    def revoke(self) -> None: ...


class NoFabric:
    def abort(self) -> None: ...


def waits_for_proof(proofs: list[set[int] | None]) -> tuple[bool, int]:
    """Whether ranks 0 and 1 of four may go on, and after how many surveys. Rank 0 itself has proof
    of nothing."""
    survivor = Survivor(proofs)
    guard = GuardedCommunicator(survivor, NoFabric(), FOUR, QUICK, frozenset)
    return guard._has_quorum({0, 1, 2, 3}, (0, 1), ready=True), survivor.surveys


def test_half_with_the_lowest_rank_go_on_at_once():
    assert waits_for_proof([set()]) == (True, 1)


def test_a_minority_waits_for_proof_and_goes_on_when_any_rank_has_it():
    survivor = Survivor([set(), set(), {3}, {3, 4, 5}])
    six = ReplicaLayout(6, 1)
    guard = GuardedCommunicator(survivor, NoFabric(), six, QUICK, frozenset)
    assert guard._has_quorum(set(range(6)), (0, 1), ready=True)
    assert survivor.surveys == 4


def test_without_proof_it_gives_up_after_so_many_surveys():
    survivor = Survivor([{3}])
    guard = GuardedCommunicator(survivor, NoFabric(), ReplicaLayout(6, 1), QUICK, frozenset)
    with pytest.raises(NoQuorum, match="the 2 ranks here are no majority of 6"):
        guard._has_quorum(set(range(6)), (0, 1), ready=True)
    assert survivor.surveys == QUICK.proof_polls


def test_a_peer_lost_in_a_survey_means_another_round():
    assert waits_for_proof([None]) == (False, 1)


def test_ranks_that_could_not_connect_ask_for_no_proof():
    survivor = Survivor([set()])
    guard = GuardedCommunicator(survivor, NoFabric(), FOUR, QUICK, frozenset)
    assert not guard._has_quorum({0, 1, 2, 3}, (0, 1), ready=False)
    assert survivor.surveys == 0


# --- settling ------------------------------------------------------------------------------------


def settling(dead: set[int]) -> Settling:
    """Three replicas of two ranks; from second 100 on, 1 s quiet, at most 10."""
    return Settling(ReplicaLayout(3, 2), 1.0, 10.0, dead=frozenset(dead), now=100.0)


def test_it_is_over_when_whole_replicas_have_been_dead_for_so_long():
    wait = settling({2, 3})
    assert not wait.over(frozenset({2, 3}), 100.9)
    assert wait.over(frozenset({2, 3}), 101.0)


def test_another_death_begins_it_anew():
    wait = settling({2})
    assert not wait.over(frozenset({2, 3}), 100.9)
    assert not wait.over(frozenset({2, 3}), 101.8)
    assert wait.over(frozenset({2, 3}), 101.9)


def test_half_a_replica_is_waited_for_up_to_the_limit():
    wait = settling({2})
    assert not wait.over(frozenset({2}), 109.9)
    assert wait.over(frozenset({2}), 110.0)
