"""A save that ends in an exception: a warning if every rank of the replica met it, else the end of
this one (the others may wait for it)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException

from recover_megatron.adapters.megatron import checkpoints
from recover_megatron.adapters.megatron.checkpoints import Checkpoints
from recover_megatron.events import SaveFailed
from recover_megatron.session.feeds import MicrobatchFeed
from recover_megatron.session.streams import load_streams
from recover_megatron.testing.lone import lone_session
from recover_megatron.trace import read_traces
from recover_megatron.workload.samples import Streams


class Training:
    """Notes what Megatron's own function is asked to save."""

    def __init__(self):
        self.saved: list[int] = []

    def save_checkpoint_and_time(self, iteration, *facts, train_data_iterator):
        self.saved.append(iteration)


@pytest.fixture
def keeper(tmp_path, monkeypatch):
    """Checkpoints of a leading replica of one rank, whose store is a real one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(checkpoints, "any_in_replica", bool)
    monkeypatch.setattr(checkpoints, "_OTHERS_FAIL_S", 0.3)
    monkeypatch.setattr(Checkpoints, "_no_room", lambda self, model: None)
    args = SimpleNamespace(save=str(tmp_path), train_iters=9, data_parallel_size=1)
    host = SimpleNamespace(args=args, training=Training())
    feed = MicrobatchFeed(replica_id=0)
    yield Checkpoints(lone_session(tmp_path / "run"), host, feed), feed, host.training
    torch.distributed.destroy_process_group()


def save(iteration, model, optimizer=None):
    raise CheckpointException("of me", {})


def test_an_error_that_all_ranks_met_is_a_warning(keeper, tmp_path):
    checkpoints_of, _, _ = keeper
    broken = tmp_path / "iter_0000002"
    broken.mkdir()
    for iteration in (1, 2):
        checkpoints_of.save_checkpoint(save, iteration, [])
    assert checkpoints_of.saved is None
    told = list(read_traces(tmp_path / "run"))
    assert [(type(event), event.iteration) for event in told] == [(SaveFailed, 1), (SaveFailed, 2)]


def test_an_error_of_this_rank_alone_ends_it(keeper, monkeypatch):
    checkpoints_of, _, _ = keeper
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(CheckpointException):
        checkpoints_of.save_checkpoint(save, 1, [])


def test_what_the_last_replica_rescues_has_its_streams(keeper, tmp_path):
    """Or a resume under `versatile` would read samples twice."""
    checkpoints_of, feed, training = keeper
    feed.streams = streams = Streams((5, 3))
    names = "model optimizer opt_param_scheduler num_floating_point_operations_so_far"
    more = ("checkpointing_context", "train_data_iterator")
    checkpoints_of.rescue(dict.fromkeys((*names.split(), *more)) | {"iteration": 7})
    assert training.saved == [7]
    assert load_streams(str(tmp_path), 7, 1) == streams
