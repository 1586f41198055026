"""The training loop. Its global names are those that the recovery hooks replace."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import track_moe_metrics
from megatron.core.utils import get_model_config

from recover_megatron.examples.gpt.arguments import parse_args
from recover_megatron.examples.gpt.checkpointing import load_checkpoint, save_checkpoint
from recover_megatron.examples.gpt.data import build_datasets, build_pretraining_data_loader
from recover_megatron.examples.gpt.global_vars import get_args, get_tensorboard_writer
from recover_megatron.examples.gpt.initialize import initialize_megatron
from recover_megatron.examples.gpt.model import build_model, build_optimizer

_STARTED = time.monotonic()
ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Any]]


def build_train_valid_test_data_loaders(args: argparse.Namespace, stage: int | None) -> list[Any]:
    """Microbatches for training and validation of one model chunk, None where it reads none."""
    train, valid = build_datasets(args, stage)
    return [
        build_pretraining_data_loader(train, args.consumed_train_samples),
        build_pretraining_data_loader(valid, args.consumed_valid_samples),
    ]


def save_checkpoint_and_time(
    iteration: int,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    train_data_iterator: Any = None,
) -> None:
    """Megatron's signature; the hooks call it."""
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler)


def checkpoint_and_decide_exit(
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    iteration: int,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    train_data_iterator: Any,
) -> bool:
    """After every iteration: a save that is due, and whether the time for an exit has come."""
    args = get_args()
    leaving = bool(args.exit_interval) and iteration % args.exit_interval == 0
    if args.exit_duration_in_mins:
        minutes = (time.monotonic() - _STARTED) / 60
        late = torch.tensor([minutes > args.exit_duration_in_mins], dtype=torch.int32)
        late = late.to(torch.cuda.current_device())
        torch.distributed.all_reduce(late, op=torch.distributed.ReduceOp.MAX)
        leaving = leaving or bool(late.item())
    due = bool(args.save_interval) and iteration % args.save_interval == 0
    due = due or iteration == args.train_iters
    if args.save and (due or leaving):
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    if leaving and torch.distributed.get_rank() == 0:
        print(f"exiting program at iteration {iteration}", flush=True)
    return leaving


@dataclass(frozen=True)
class Trained:
    """What is trained, one model chunk per virtual pipeline stage, and what trains it."""

    model: list[Any]
    optimizer: Any
    scheduler: Any


def train_step(
    forward_step: ForwardStep, schedule: Any, data_iterator: Any, trained: Trained
) -> tuple[dict[str, float], float | None]:
    """One iteration; returns the losses (last pipeline stage only) and the gradient norm."""
    args = get_args()
    for chunk in trained.model:
        chunk.zero_grad_buffer()
    trained.optimizer.zero_grad()
    losses = schedule(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=trained.model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    successful, grad_norm, _ = trained.optimizer.step()
    if successful:
        trained.scheduler.step(increment=get_current_global_batch_size())
    totals = {key: (total[0] / total[1]).item() for key, total in _reduced(losses).items()}
    return totals, None if grad_norm is None else float(grad_norm)


def _reduced(losses: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """[sum, tokens] by loss over all data-parallel ranks; empty but on the last pipeline stage."""
    if not parallel_state.is_pipeline_last_stage():
        return {}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    totals = {}
    for key in losses[0]:
        totals[key] = torch.vstack([loss[key].view(-1) for loss in losses]).sum(dim=0)
        torch.distributed.all_reduce(totals[key], group=group)
    return totals


def evaluate_and_print_results(
    forward_step: ForwardStep,
    schedule: Any,
    data_iterator: Any,
    model: list[Any],
    iteration: int,
) -> None:
    args = get_args()
    for chunk in model:
        chunk.eval()
    totals: dict[str, torch.Tensor] = {}
    batch = args.micro_batch_size * args.data_parallel_size
    with torch.no_grad():
        for _ in range(args.eval_iters):
            losses = schedule(
                forward_step_func=forward_step,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=args.global_batch_size // batch,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=True,
            )
            for key, total in _reduced(losses).items():
                totals[key] = total + totals.get(key, torch.zeros_like(total))
            args.consumed_valid_samples += args.global_batch_size
    for chunk in model:
        chunk.train()
    line = f" validation loss at iteration {iteration} | "
    for key, total in totals.items():
        line += f"{key} value: {(total[0] / total[1]).item():.6E} | "
    print_rank_last(line)


def _check_validation(args: argparse.Namespace, chunks: Sequence[Sequence[Any]]) -> None:
    """Without validation data there is no evaluation. Most ranks read none in any case."""
    found = torch.tensor([any(valid is not None for _, valid in chunks)], dtype=torch.int32)
    found = found.to(torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    if args.eval_iters and args.train_iters >= args.eval_interval and not found.item():
        print_rank_last(
            f"pretrain.py: --split {args.split} has no part for validation: there is no evaluation"
        )
        args.eval_iters = 0


def training_log(
    iteration: int,
    seconds: float,
    losses: dict[str, float],
    grad_norm: float | None,
    learning_rate: float,
) -> None:
    """Megatron's line, from its last rank, and TensorBoard's scalars."""
    args = get_args()
    totals: dict[str, torch.Tensor] = {}
    if args.num_experts is not None:
        scale = 1 / get_num_microbatches()
        kinds = {"num_layers": args.num_layers, "force_initialize": True}
        if "aux_loss" in args.moe_router_load_balancing_type:
            kinds["track_names"] = ["load_balancing_loss"]
        track_moe_metrics(scale, iteration, total_loss_dict=totals, **kinds)
    losses = losses | {key: float(value) for key, value in totals.items()}
    if (writer := get_tensorboard_writer()) is not None:
        for key, value in losses.items():
            writer.add_scalar(key, value, iteration)
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration:8d}/{args.train_iters:8d}",
        f" consumed samples: {args.consumed_train_samples:12d}",
        f" elapsed time per iteration (ms): {seconds * 1000:.1f}",
        f" learning rate: {learning_rate:.6E}",
        f" global batch size: {get_current_global_batch_size():5d}",
        *(f" {key}: {value:.6E}" for key, value in losses.items()),
    ]
    if grad_norm is not None:
        parts.append(f" grad norm: {grad_norm:.3f}")
    print_rank_last(" |".join(parts) + " |")


def print_rank_last(message: str) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)


def train(
    forward_step: ForwardStep, data_iterator: Any, valid_iterator: Any, trained: Trained
) -> None:
    args, model, optimizer = get_args(), trained.model, trained.optimizer
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync[0] if len(model) == 1 else no_sync
    for chunk in model:
        chunk.train()
    schedule = get_forward_backward_func()
    while args.iteration < args.train_iters:
        started = time.perf_counter()
        args.curr_iteration = args.iteration
        update_num_microbatches(args.consumed_train_samples)
        batch_size = get_current_global_batch_size()
        losses, grad_norm = train_step(forward_step, schedule, data_iterator, trained)
        args.iteration += 1
        args.consumed_train_samples += batch_size
        seconds = time.perf_counter() - started
        if args.iteration % args.log_interval == 0:
            rate = optimizer.param_groups[0]["lr"]
            training_log(args.iteration, seconds, losses, grad_norm, rate)
        if args.eval_iters and args.iteration % args.eval_interval == 0:
            evaluate_and_print_results(
                forward_step, schedule, valid_iterator, model, args.iteration
            )
        if checkpoint_and_decide_exit(
            model, optimizer, trained.scheduler, args.iteration, 0.0, None, data_iterator
        ):
            break


def pretrain(forward_step: ForwardStep) -> None:
    """Sets up and trains; `forward_step(data_iterator, model)` returns (output, loss function)."""
    args = parse_args()
    initialize_megatron(args)
    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    if args.load:
        load_checkpoint(args, model, optimizer, scheduler)
    chunks = [build_train_valid_test_data_loaders(args, chunk.vp_stage) for chunk in model]
    train_data, valid_data = chunks[0] if len(model) == 1 else map(list, zip(*chunks, strict=True))
    _check_validation(args, chunks)
    train(forward_step, train_data, valid_data, Trained(model, optimizer, scheduler))
    if torch.cuda.is_available():
        print_rank_last(f"peak device memory: {torch.cuda.max_memory_allocated()} bytes")
    torch.distributed.barrier()
