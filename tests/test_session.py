"""What every host framework needs: gradients in buckets, feeds, streams, fingerprints, NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recover_megatron.errors import ConfigError, InvariantViolation
from recover_megatron.recovery.bucket import Snapshot
from recover_megatron.session.feeds import EvaluationFeed, EvaluationLoader, MicrobatchFeed
from recover_megatron.session.gradients import GradientBuckets
from recover_megatron.session.iteration import NanRule
from recover_megatron.session.peers import fingerprint, odd_replicas
from recover_megatron.session.streams import load_streams, save_streams, streams_to_start_with
from recover_megatron.workload.assignment import Assignment
from recover_megatron.workload.samples import Streams


class Source:
    """A gradient in one tensor."""

    def __init__(self, grad: torch.Tensor):
        self.grad = grad

    def views(self):
        return [self.grad]

    def zero(self):
        self.grad.zero_()


def test_float32_gradients_on_the_host_are_reduced_from_where_they_are():
    grad = torch.arange(10.0)
    gradients = GradientBuckets(Source(grad), bucket_bytes=16)
    assert [len(b.local) for b in gradients.buckets] == [4, 4, 2]
    grad[5] = 77.0
    assert gradients.buckets[1].local[1] == 77.0  # no copy
    for bucket in gradients.buckets:
        bucket.reduced[:] = 2 * bucket.local
    expected = 2 * grad.clone()
    gradients.stage_out()
    assert torch.equal(grad, expected)


def test_bfloat16_gradients_are_reduced_in_float32_on_the_host():
    grad = torch.arange(6, dtype=torch.bfloat16)
    gradients = GradientBuckets(Source(grad), bucket_bytes=1 << 20)
    gradients.stage_in()
    (bucket,) = gradients.buckets
    bucket.ready()
    assert bucket.local.dtype == np.float32
    bucket.reduced[:] = bucket.local + 1
    bucket.arrived()
    gradients.stage_out()
    assert grad.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_snapshot_outlives_the_zeroed_buffer_and_is_added_back():
    grad = torch.arange(4.0)
    gradients = GradientBuckets(Source(grad), bucket_bytes=1 << 20)
    kept = Snapshot(gradients.buckets)
    grad.zero_()
    grad += 10
    kept.add_back(gradients.buckets)
    assert grad.tolist() == [10, 11, 12, 13]


def test_the_feed_serves_exactly_the_assigned_microbatches():
    feed = MicrobatchFeed(replica_id=1)
    loader = feed.loader(torch.arange(100), micro_batch_size=2, dp=(0, 1))
    feed.supply([3, 0], consumed_samples=20)
    assert [next(loader).tolist(), next(loader).tolist()] == [[26, 27], [20, 21]]
    assert feed.fetched == ((26, 27), (20, 21))
    with pytest.raises(InvariantViolation, match="not assigned"):
        next(loader)
    feed.supply([1], consumed_samples=20)
    with pytest.raises(InvariantViolation, match="never asked for"):
        feed.supply([2], consumed_samples=20)


def test_with_streams_the_feed_goes_on_where_this_replicas_stream_stands():
    feed = MicrobatchFeed(replica_id=1)
    feed.streams = Streams((2, 4, 0), first=1)
    loader = feed.loader(torch.arange(20), micro_batch_size=1, dp=(0, 1))
    for ids in ([7, 8], [3]):  # the ids are places in the batch
        feed.supply(ids, consumed_samples=1000)
        taken = [next(loader).item() for _ in ids]
    assert taken == [(1 + 6 * 3 + 1) % 20]  # the third of the iteration; the dataset begins anew
    feed.committed(Assignment.of({0: [0], 1: [1, 2, 3]}))
    assert feed.streams.positions == (3, 7, 0)
    feed.begin()
    feed.supply([0], consumed_samples=0)
    assert next(loader).item() == (1 + 7 * 3 + 1) % 20
    assert feed.fetched == ((3,),)


def test_stream_positions_are_kept_beside_the_checkpoint(tmp_path):
    streams = Streams((2, 4, 0), first=1)
    save_streams(str(tmp_path), 7, streams)
    assert load_streams(str(tmp_path), 7, 1) == streams
    assert load_streams(str(tmp_path), 8, 1) is None
    assert [p.name for p in (tmp_path / "recover_streams").iterdir()] == ["iter_0000007.json"]


def test_where_they_cannot_be_kept_beside_it_they_are_kept_inside(tmp_path):
    (tmp_path / "recover_streams").write_text("a file where the folder should be")
    streams = Streams((2, 4, 0), first=1)
    save_streams(str(tmp_path), 7, streams)
    assert load_streams(str(tmp_path), 7, 1) == streams


def test_streams_are_honoured_in_samples_or_refused():
    """Two replicas have trained on 32 samples, one at a time; then on 14 and 4 more."""
    even, uneven = Streams((16, 16)), Streams((28, 4))
    assert streams_to_start_with(even, "versatile", 32, 2, 1) == even
    assert streams_to_start_with(even, "versatile", 32, 2, 2) == Streams((0, 0), 16, 2)
    assert streams_to_start_with(even, "versatile", 32, 4, 3) == Streams((0,) * 4, 10, 3, 2)
    assert streams_to_start_with(even, "exact", 32, 2, 1) is None
    assert (uneven.end, uneven.skipped) == (55, 23)
    assert streams_to_start_with(uneven, "versatile", 32, 2, 1) == uneven
    assert streams_to_start_with(uneven, "versatile", 32, 3, 1) == Streams((0, 0, 0), 55)
    with pytest.raises(ConfigError, match="first 55 samples 23 were not trained on"):
        streams_to_start_with(uneven, "exact", 32, 2, 1)
    assert streams_to_start_with(None, "versatile", 32, 2, 4) == Streams((0, 0), 8, 4)
    with pytest.raises(ConfigError, match="exact would go on at sample 16"):
        streams_to_start_with(even, "exact", 16, 2, 1)


def test_the_odd_replica_is_named_by_majority():
    assert odd_replicas({0: 5, 1: 5, 3: 6}) == [3]
    assert odd_replicas({0: 6, 1: 5, 3: 5}) == [0]
    assert odd_replicas({0: 5, 1: 5}) == []
    assert odd_replicas({0: 5, 1: 6}) == [1]  # a tie: the lowest replica's counts


def test_a_fingerprint_sees_a_single_bit():
    model = torch.nn.Linear(4, 4)
    before = fingerprint(model.parameters())
    assert fingerprint(model.parameters()) == before
    model.weight.data.view(torch.int32)[2, 1] ^= 1
    assert fingerprint(model.parameters()) != before


def read_by(loader: EvaluationLoader, count: int) -> list[list[int]]:
    return [next(loader).tolist() for _ in range(count)]


def test_the_evaluation_feed_goes_on_by_whole_batches_whoever_reads_them():
    """Batches of 4 microbatches of 2 samples; this replica reads 0 and 1, then also a lost one's 3,
    then nothing, then the last two."""
    feed = EvaluationFeed()
    loader = EvaluationLoader(feed, torch.arange(100), 2, (0, 1), consumed_samples=10)
    feed.begin(8)
    feed.supply([0, 1])
    assert read_by(loader, 2) == [[10, 11], [12, 13]]
    feed.supply([3])
    assert read_by(loader, 1) == [[16, 17]]
    feed.begin(8)
    feed.supply([2, 3], padding=1)
    assert read_by(loader, 3) == [[22, 23], [24, 25], [24, 25]]
    with pytest.raises(InvariantViolation, match="not assigned"):
        next(loader)


def test_each_data_set_is_moved_on_only_by_batches_that_it_is_asked_for():
    feed = EvaluationFeed()
    valid = EvaluationLoader(feed, torch.arange(100), 1, (0, 1), consumed_samples=0)
    test = EvaluationLoader(feed, torch.arange(100), 1, (0, 1), consumed_samples=0)
    for loader in (valid, test, valid):
        feed.begin(2)
        feed.supply([0, 1])
        read = read_by(loader, 2)
    assert read == [[2], [3]]
    feed.begin(2)
    feed.supply([0])
    assert read_by(test, 1) == [[2]]


def rule(looks: bool = True, same_samples: bool = True) -> NanRule:
    return NanRule(looks, same_samples, any_in_replica=lambda flag: flag)


def test_a_nan_in_a_lost_replicas_samples_poisons_the_whole_jobs_sum():
    assert rule().count(3.0, lambda: True) == 3.0
    assert math.isnan(rule().count(3.0, lambda: False))


def test_a_nan_in_other_samples_is_this_replicas_own_end():
    with pytest.raises(FloatingPointError, match="in a further pass"):
        rule(same_samples=False).count(3.0, lambda: False)


def test_with_a_dynamic_loss_scale_nobody_looks():
    def looked():
        raise AssertionError

    assert rule(looks=False).count(3.0, looked) == 3.0


def test_a_nan_at_one_rank_is_a_nan_of_the_replica():
    anywhere = NanRule(True, True, any_in_replica=lambda flag: True)
    assert math.isnan(anywhere.count(3.0, lambda: True))
