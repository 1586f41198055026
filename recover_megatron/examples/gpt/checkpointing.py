"""Checkpoints in Megatron's torch_dist format, from any number of replicas to any other."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.utils import unwrap_model

from recover_megatron.examples.gpt.global_vars import get_args
from recover_megatron.examples.gpt.initialize import settings
from recover_megatron.tracker import RELEASE, TRACKER, checkpoint_folder


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _sharded_weights(model: list[Any]) -> dict[str, Any]:
    return {
        name: unwrap_model(chunk).sharded_state_dict(metadata=_metadata())
        for name, chunk in _named(model)
    }


def _sharded_state(
    model: list[Any], optimizer: Any, scheduler: Any, is_loading: bool = False
) -> dict[str, Any]:
    state = _sharded_weights(model)
    state["optimizer"] = optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=_metadata()
    )
    state["opt_param_scheduler"] = scheduler.state_dict()
    return state


def _named(model: list[Any]) -> list[tuple[str, Any]]:
    """Megatron's keys of the model chunks in a checkpoint."""
    if len(model) == 1:
        return [("model", model[0])]
    return [(f"model{k}", chunk) for k, chunk in enumerate(model)]


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    return os.path.join(checkpoints_path, TRACKER)


def save_checkpoint(
    iteration: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """torch_dist format under `--save`; the tracker file last."""
    root = Path(get_args().save)
    folder = root / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _sharded_state(model, optimizer, opt_param_scheduler)
    state["iteration"] = iteration
    state["consumed_train_samples"] = get_args().consumed_train_samples
    state["consumed_valid_samples"] = get_args().consumed_valid_samples
    dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        Path(get_checkpoint_tracker_filename(get_args().save)).write_text(str(iteration))
        print(f"  saved checkpoint of iteration {iteration} to {root}", flush=True)


def load_checkpoint(
    args: argparse.Namespace, model: list[Any], optimizer: Any, scheduler: Any
) -> None:
    """From `--load`, if it holds a checkpoint; any number of replicas may have saved it."""
    tracker = Path(get_checkpoint_tracker_filename(args.load))
    if not tracker.is_file():
        print(f"pretrain.py: no checkpoint in {args.load}; starting from scratch", flush=True)
        return
    folder = checkpoint_folder(args.load)
    if torch.distributed.get_rank() == 0:
        print(f"  loading checkpoint {folder}", flush=True)
    release = folder.name == RELEASE  # weights only: a training begins
    wanted = _sharded_weights(model)
    if not release:
        wanted = _sharded_state(model, optimizer, scheduler, is_loading=True)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for name, chunk in _named(model):
        unwrap_model(chunk).load_state_dict(loaded[name])
    if release:
        optimizer.reload_model_params()
        return
    optimizer.load_state_dict(loaded["optimizer"])
    with settings(
        f"the schedule of {folder} is another one; take it with "
        "--use-checkpoint-opt_param-scheduler, or this command's with "
        "--override-opt_param-scheduler"
    ):
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
    common = dist_checkpointing.load_common_state_dict(str(folder))
    args.iteration = common["iteration"]
    args.consumed_train_samples = common["consumed_train_samples"]
    args.consumed_valid_samples = common.get("consumed_valid_samples", 0)
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)
    if torch.distributed.get_rank() == 0:
        print(f"  loaded checkpoint of iteration {args.iteration}", flush=True)
