"""The fault grammar and the injector."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.errors import ConfigError
from recover_megatron.faults import PHASES, Fault, parse_faults
from recover_megatron.inject import Injector
from recover_megatron.world import ReplicaLayout

LAYOUT = ReplicaLayout(4, 2)


def test_a_spec_names_replica_position_iteration_phase_and_bucket():
    assert parse_faults("1.0@3:sync.2, hang:2.1@5:forward", LAYOUT) == (
        Fault("kill", 1, 0, 3, "sync", 2),
        Fault("hang", 2, 1, 5, "forward", 0),
    )


@given(
    st.builds(
        Fault,
        st.just("kill"),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(1, 99),
        st.sampled_from(PHASES),
    )
)
def test_faults_print_and_parse_back(fault):
    assert parse_faults(str(fault), LAYOUT) == (fault,)


def test_a_random_schedule_replays_and_loses_one_replica_an_interval():
    spec = "random:seed=7:every=5:count=3"
    faults = parse_faults(spec, LAYOUT)
    assert faults == parse_faults(spec, LAYOUT)
    assert [(f.iteration - 1) // 5 for f in faults] == [0, 1, 2]
    assert len({f.replica for f in faults}) == 3
    schedules = {parse_faults(f"random:seed={s}:every=5:count=3", LAYOUT) for s in range(20)}
    assert len(schedules) == 20
    drawn = {(f.iteration - 1) % 5 for faults in schedules for f in faults}
    assert drawn == set(range(5))  # the iteration inside the interval is really drawn


def test_every_fault_of_a_random_schedule_strikes(monkeypatch):
    """Whatever index is drawn, and however few microbatches and buckets the victim has."""
    fired = []
    monkeypatch.setattr(Injector, "_fire", lambda self, fault: fired.append(fault))
    for seed in range(50):
        (fault,) = parse_faults(f"random:seed={seed}:every=1:count=1", LAYOUT)
        injector = Injector([fault], lambda *a, **k: None)
        injector.begin(1)
        for phase in ("forward", "backward", "sync"):
            injector.expect(phase, 1)
        for phase in ("forward", "backward", "sync", "commit", "optimizer"):
            injector.enter(phase)
            injector.leave(phase)
        assert fault in fired, fault


def test_a_random_schedule_can_be_held_to_one_phase():
    faults = parse_faults("random:seed=1:count=3:phase=sync", LAYOUT)
    assert {f.phase for f in faults} == {"sync"}


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("nonsense", "nonsense"),
        ("1.0@3:sync.2,9.0@3:sync", r"9\.0@3:sync.*replica 9 is not in 0\.\.3"),
        ("1.7@3:sync", r"position 7 is not in 0\.\.1"),
        ("1.0@0:sync", "iterations count from 1"),
        ("1.0@3:lunch", "phase 'lunch' is not one of forward"),
        ("melt:1.0@3:sync", "kind 'melt'"),
        ("1.0@3:commit.4", "takes no index"),
        ("hang:1.0@3:commit", "a hang in 'commit' would not be found"),
        ("nan:1.0@3:sync.1", "only a gradient can become nan"),
        ("stop:1.0@3:sync.1", "a stop in 'sync' would not be found"),
        ("random:seed=x", "field 'seed=x'"),
        ("random:phase=lunch", "lunch"),
        ("random:count=4", "must leave one of 4 replicas alive"),
        ("0.0@1:sync,1.0@1:sync,2.0@1:sync,3.0@1:sync", "would lose all 4 replicas"),
    ],
)
def test_a_wrong_spec_says_which_part_is_wrong(spec, part):
    with pytest.raises(ConfigError, match=part):
        parse_faults(spec, LAYOUT)


def test_the_injector_fires_at_its_point_only(monkeypatch):
    fired = []
    monkeypatch.setattr(Injector, "_fire", lambda self, fault: fired.append(str(fault)))
    injector = Injector(parse_faults("1.0@3:forward.1,1.0@4:commit", LAYOUT), lambda *a, **k: None)
    injector.expect("forward", 3)
    for iteration in (1, 2, 3, 4):
        injector.begin(iteration)
        for index in range(3):
            injector.enter("forward", index)
        injector.enter("commit")
    assert fired == ["kill:1.0@3:forward.1", "kill:1.0@4:commit"]


def test_a_sync_fault_past_the_last_bucket_means_the_last_one(monkeypatch):
    armed = []
    monkeypatch.setattr(Injector, "_arm", lambda self, fault, phase, index: armed.append(index))
    injector = Injector(parse_faults("1.0@1:sync.9", LAYOUT), lambda *a, **k: None)
    injector.begin(1)
    injector.expect("sync", 3)
    for index in range(3):
        injector.enter("sync", index)
        injector.leave("sync", index)
    assert armed == [2]
