"""The writer that stands in for TensorBoard's and W&B's."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock, call

from recover_megatron.adapters.megatron.logs import Logs
from recover_megatron.recovery.present import PresentWorld
from recover_megatron.session.writers import LeadersWriter
from recover_megatron.world import World


def never(error: Exception) -> None:
    raise AssertionError(error)


def logged(writer: LeadersWriter, iteration: int) -> None:
    writer.begin_log()
    writer.add_scalar("loss", 10 - iteration, iteration)
    writer.end_log()


def test_the_leader_writes_through_and_flushes():
    real = MagicMock()
    writer = LeadersWriter(lambda: real, never)
    writer.lead()
    logged(writer, 1)
    assert real.mock_calls == [call.flush(), call.add_scalar("loss", 9, 1), call.flush()]


def test_the_next_leader_writes_what_the_last_one_may_not_have_written():
    real = MagicMock()
    writer = LeadersWriter(lambda: real, never)
    for iteration in (1, 2, 3):
        logged(writer, iteration)
    assert real.mock_calls == []
    writer.lead()
    logged(writer, 4)
    assert [c.args[2] for c in real.add_scalar.mock_calls] == [2, 3, 4]


def test_attributes_of_the_writer_can_be_called():
    real = MagicMock()
    writer = LeadersWriter(lambda: real, never)
    writer.config.update({"job": 1})
    writer.lead()
    real.config.update.assert_called_once_with({"job": 1})


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

    def replica(number: int, leading: bool):
        session = SimpleNamespace(
            world=PresentWorld(World(0, (0, 1))),
            leading=leading,
            config=SimpleNamespace(trace_dir="runs/a b"),
        )
        writers = SimpleNamespace(_GLOBAL_WANDB_WRITER=None)

        def stock(args):
            import os

            opened.append((number, os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]))
            writers._GLOBAL_WANDB_WRITER = MagicMock()

        logs = Logs(session, SimpleNamespace(writers=writers))
        logs.set_wandb_writer(stock, SimpleNamespace(wandb_project="p", rank=0, world_size=1))
        return session, writers

    replica(0, leading=True)
    session, writers = replica(1, leading=False)
    assert opened == [(0, "a-b", "allow")]
    assert isinstance(writers._GLOBAL_WANDB_WRITER, LeadersWriter)
    session.leading = True
    session.world.tell()
    assert opened == [(0, "a-b", "allow"), (1, "a-b", "allow")]
    assert isinstance(writers._GLOBAL_WANDB_WRITER, LeadersWriter)
