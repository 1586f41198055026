"""The writer that stands in for TensorBoard's and W&B's."""

from __future__ import annotations

from types import SimpleNamespace

from recover_megatron.adapters.megatron.logs import Logs
from recover_megatron.config import RecoveryConfig
from recover_megatron.session.writers import LeadersWriter
from recover_megatron.testing.lone import lone_session
from recover_megatron.world import ReplicaLayout, World


def never(error: Exception) -> None:
    raise AssertionError(error)


def logged(writer: LeadersWriter, iteration: int) -> None:
    writer.begin_log()
    writer.add_scalar("loss", 10 - iteration, iteration)
    writer.end_log()


class Real:
    """A writer that notes what is called, also on its attribute `config`."""

    def __init__(self):
        self.calls: list[tuple] = []
        self.config = SimpleNamespace(update=lambda values: self.calls.append(("update", values)))

    def add_scalar(self, name, value, iteration):
        self.calls.append((name, value, iteration))

    def flush(self):
        self.calls.append(("flush",))


def test_the_leader_writes_through_and_flushes():
    real = Real()
    writer = LeadersWriter(lambda: real, never)
    writer.lead()
    logged(writer, 1)
    assert real.calls == [("flush",), ("loss", 9, 1), ("flush",)]


def test_the_next_leader_writes_what_the_last_one_may_not_have_written():
    real = Real()
    writer = LeadersWriter(lambda: real, never)
    for iteration in (1, 2, 3):
        logged(writer, iteration)
    assert real.calls == []
    writer.lead()
    logged(writer, 4)
    assert [call[2] for call in real.calls if call[0] == "loss"] == [2, 3, 4]


def test_attributes_of_the_writer_can_be_called():
    real = Real()
    writer = LeadersWriter(lambda: real, never)
    writer.config.update({"job": 1})
    writer.lead()
    assert ("update", {"job": 1}) in real.calls


def test_a_writer_that_could_not_be_opened_is_silent():
    writer = LeadersWriter(lambda: None, never)
    writer.lead()
    logged(writer, 1)


class Board:
    """A writer whose disk is full for a while."""

    def __init__(self):
        self.full = False
        self.written: dict[int, float] = {}

    def add_scalar(self, name, value, iteration):
        if self.full:
            raise OSError(28, "No space left on device")
        self.written[iteration] = value

    def flush(self):
        if self.full:
            raise OSError(28, "No space left on device")


def test_a_writer_that_fails_is_said_and_goes_on_where_it_stopped():
    board, failures = Board(), []
    writer = LeadersWriter(lambda: board, failures.append)
    writer.lead()
    for iteration in range(1, 40):
        board.full = 5 <= iteration < 10
        logged(writer, iteration)
    assert all(isinstance(error, OSError) for error in failures)
    assert failures
    assert board.written == {i: 10 - i for i in range(1, 40)}


def test_a_writer_that_cannot_be_opened_is_opened_later():
    board, tries = Board(), []

    def make():
        tries.append(1)
        if len(tries) < 3:
            raise NotADirectoryError(20, "Not a directory")
        return board

    failures: list[Exception] = []
    writer = LeadersWriter(make, failures.append)
    writer.lead()
    for iteration in range(1, 20):
        logged(writer, iteration)
    assert len(failures) == 2
    assert sorted(board.written) == list(range(1, 20))


def test_wandb_is_opened_by_each_leader_in_turn_for_the_same_run(monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.delenv("WANDB_RESUME", raising=False)
    opened = []

    def replica(number: int):
        config = RecoveryConfig(trace_dir="runs/a b")
        session = lone_session(layout=ReplicaLayout(2, 1), rank=number, config=config)
        writers = SimpleNamespace(_GLOBAL_WANDB_WRITER=None)

        def stock(args):
            import os

            opened.append((number, os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]))
            writers._GLOBAL_WANDB_WRITER = Real()

        logs = Logs(session, SimpleNamespace(writers=writers))
        logs.set_wandb_writer(stock, SimpleNamespace(wandb_project="p", rank=0, world_size=1))
        return session, writers

    replica(0)
    session, writers = replica(1)
    assert opened == [(0, "a-b", "allow")]
    assert isinstance(writers._GLOBAL_WANDB_WRITER, LeadersWriter)
    session.world.become(World(1, (1,)))
    session.world.tell()
    assert opened == [(0, "a-b", "allow"), (1, "a-b", "allow")]
    assert isinstance(writers._GLOBAL_WANDB_WRITER, LeadersWriter)
