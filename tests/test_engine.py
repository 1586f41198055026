"""The engine thread over operations that do what they are told."""

from __future__ import annotations

import threading

import pytest

from recover_megatron.collectives.membership.engine import Engine
from recover_megatron.errors import InvariantViolation, ReplicaLost

POLL_S = 0.001


class Looks:
    """Counts the looks for failures; raises if asked."""

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[str] = set()
        self.error: BaseException | None = None

    def __call__(self) -> None:
        self.count += 1
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error


@pytest.fixture
def engine():
    looks = Looks()
    yield Engine(looks, POLL_S, crowded=True), looks
    looks.error = SystemExit()  # ends the thread


def returning(value):
    yield
    return value


def test_an_operation_returns_its_value_to_who_waits(engine):
    assert engine[0].run(returning(7)) == 7


def test_operations_run_in_the_order_in_which_they_were_handed_over(engine):
    done = []

    def note(number):
        yield
        done.append((number, threading.current_thread().name))

    for request in [engine[0].submit(note(k)) for k in range(20)]:
        request.wait()
    assert done == [(k, "recover-engine") for k in range(20)]


def test_what_an_operation_raises_is_raised_where_it_is_waited_for_and_ends_nothing_else(engine):
    def losing():
        yield
        raise ReplicaLost("gone")

    with pytest.raises(ReplicaLost, match="gone"):
        engine[0].run(losing())
    assert engine[0].run(returning(1)) == 1


def test_failures_are_looked_for_while_an_operation_waits_and_while_there_is_none(engine):
    started, looks = threading.Event(), engine[1]

    def until_looked_at_ten_times():
        before = looks.count
        while looks.count < before + 10:
            yield
        return looks.count

    assert engine[0].run(until_looked_at_ten_times()) >= 10
    before = looks.count
    while looks.count < before + 10:  # nothing is submitted
        started.wait(POLL_S)
    assert looks.threads == {"recover-engine"}


def test_a_look_that_fails_is_our_bug_and_nobody_waits_on(engine):
    def for_ever():
        while True:
            yield

    request = engine[0].submit(for_ever())
    engine[1].error = ZeroDivisionError("as any bug would")
    with pytest.raises((InvariantViolation, ZeroDivisionError)) as found:
        request.wait()
    causes = (found.value, found.value.__cause__)
    assert any(isinstance(cause, ZeroDivisionError) for cause in causes)
    with pytest.raises(InvariantViolation, match="has ended"):
        engine[0].run(returning(1))


def test_it_gives_signs_of_life_but_none_while_it_may_block_without_a_limit():
    signs = []

    class Signs:
        def engine_runs(self, times=1):
            signs.append(times)

        def engine_rests(self):
            signs.append(0)

    looks = Looks()
    engine = Engine(looks, 3600.0, crowded=False, signs=Signs())  # looks once

    def blocking():
        with engine.blocking():
            signs.append("shrink")
        with engine.blocking(limited=False):
            signs.append("share")
        yield

    engine.run(blocking())
    assert signs == [1, 2, "shrink", 1, 0, "share", 1]
