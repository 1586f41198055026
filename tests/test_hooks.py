"""The hooks replace Megatron's names and restore them; what Megatron reduces is found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.adapters.megatron.gradient_source import MegatronGradients
from recover_megatron.adapters.megatron.passes import Pass, interleaved_padding
from recover_megatron.errors import ConfigError
from recover_megatron.testing.lone import lone_session


def test_install_replaces_every_name_and_uninstall_restores_it():
    from recover_megatron.adapters.megatron.hooks import Hooks
    from recover_megatron.adapters.megatron.modules import MegatronModules
    from recover_megatron.examples.gpt import arguments, checkpointing, global_vars, training

    modules = (training, arguments, global_vars, checkpointing)
    before = [dict(vars(module)) for module in modules]
    host = MegatronModules(training, arguments, (arguments,), global_vars, checkpointing)
    hooks = Hooks(lone_session(), host)
    hooks.install()
    for module, names in zip(modules, before, strict=True):
        changed = {name for name, value in vars(module).items() if value is not names.get(name)}
        assert changed, module.__name__
    hooks.uninstall()
    assert [dict(vars(module)) for module in modules] == before


def test_a_megatron_without_a_hooked_name_is_refused_with_the_name():
    from recover_megatron.adapters.megatron.hooks import Hooks
    from recover_megatron.adapters.megatron.modules import MegatronModules

    module = SimpleNamespace(__name__="megatron.training.training")
    with pytest.raises(ConfigError, match="has no get_forward_backward_func"):
        Hooks(lone_session(), MegatronModules(module, module, (), module, module)).install()


def fake_model(grad: torch.Tensor, shards: int = 1):
    config = SimpleNamespace(use_distributed_optimizer=shards > 1)
    group = SimpleNamespace(
        buckets=[SimpleNamespace(grad_data=grad)],
        ddp_config=config,
        intra_distributed_optimizer_instance_size=shards,
        intra_distributed_optimizer_instance_rank=1 if shards > 1 else 0,
    )
    return [SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])]


def test_with_the_distributed_optimizer_only_this_ranks_shard_is_reduced():
    gradients = MegatronGradients(fake_model(torch.arange(8.0), shards=2))
    assert gradients.views()[0].tolist() == [4, 5, 6, 7]


def test_a_pass_tells_each_microbatch_by_model_chunk_and_padding_does_not_count():
    one = Pass([5, 7, 7, 7], count=2)
    assert [one.next_number(0), one.next_number(1), one.next_number(0)] == [5, 5, 7]
    assert [one.next_loss_counts() for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("count", "stages", "group", "padding"),
    [
        (1, 2, 2, 1),  # one group at least
        (2, 2, 2, 0),
        (3, 2, 2, 1),  # a last group of one is less than two stages
        (5, 2, 4, 1),
        (6, 2, 4, 0),  # of two is enough
        (7, 4, 4, 1),
        (9, 4, 8, 3),
    ],
)
def test_a_share_is_padded_to_what_the_interleaved_schedule_takes(count, stages, group, padding):
    assert interleaved_padding(count, stages, group) == padding


@given(st.integers(1, 40), st.integers(2, 8), st.integers(0, 8))
def test_padding_is_the_least_that_fits(count, stages, more):
    group = stages + more  # at least as many as there are stages

    def fits(total: int) -> bool:
        rest = total % group
        return total >= group and (rest == 0 or rest >= stages)

    padding = interleaved_padding(count, stages, group)
    assert [fits(count + k) for k in range(padding + 1)] == [False] * padding + [True]
