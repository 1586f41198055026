"""The quorum rule as a property, and what counts as proof of a death."""

from __future__ import annotations

import subprocess

from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.membership.quorum import (
    Evidence,
    Place,
    has_quorum,
    parse_place,
    running,
)
from recover_megatron.hosts.folder import HostFolder

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
