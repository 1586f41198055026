"""Pre-train a GPT on megatron-core alone: the demo's, the tests' and CI's training script.

    torchrun --nproc-per-node 4 -m recover_megatron recover_megatron/pretrain.py <Megatron flags>
    recover-megatron launch --replicas 4 -- recover_megatron/pretrain.py <Megatron flags> --recover

megatron.training is not on PyPI. This is its training loop reduced to what a LLaMA-style GPT needs,
with Megatron's flag names, its function names and its log line, so that the same hooks, flags and
tools serve both. It knows nothing of recovery: the functions below are module globals that
`adapters/megatron/hooks.py` replaces, just as it replaces those of megatron.training.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,  # noqa: F401  a hooked global
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import track_moe_metrics
from megatron.core.utils import get_model_config, unwrap_model
from torch.utils.data import default_collate

from recover_megatron.errors import ConfigError
from recover_megatron.pretrain_arguments import parse_args
from recover_megatron.tracker import RELEASE, TRACKER, checkpoint_folder
from recover_megatron.workload.samples import sample_ids

_STARTED = time.monotonic()


# --- set-up --------------------------------------------------------------------------------------


def initialize(args: argparse.Namespace) -> None:
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    # Several replicas may share a GPU (scripts/gpu_check.sh).
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.distributed.init_process_group(
        backend=args.distributed_backend,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    with _settings("the batch size"):
        init_num_microbatches_calculator(
            torch.distributed.get_rank(),
            args.rampup_batch_size,
            args.global_batch_size,
            args.micro_batch_size,
            args.data_parallel_size,
        )
    if args.train_iters is None:
        args.train_iters = _iterations(args)
    if args.train_iters < 1:
        raise ConfigError("--train-iters, or --train-samples, must be at least one iteration")
    _set_tensorboard_writer(args)


@contextlib.contextmanager
def _settings(what: str) -> Iterator[None]:
    """What Megatron asserts of the user's settings is a sentence for the user."""
    try:
        yield
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(f"{what}: {str(error).strip('; ') or line}") from error


def _iterations(args: argparse.Namespace) -> int:
    """How many iterations `--train-samples` are; a last part of a batch is left out."""
    iterations = consumed = 0
    while consumed + get_current_global_batch_size() <= args.train_samples:
        consumed += get_current_global_batch_size()
        iterations += 1
        update_num_microbatches(consumed, consistency_check=False)
    update_num_microbatches(0, consistency_check=False)
    return iterations


_GLOBAL_TENSORBOARD_WRITER: Any = None


def _set_tensorboard_writer(args: argparse.Namespace) -> None:
    global _GLOBAL_TENSORBOARD_WRITER
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        from torch.utils.tensorboard import SummaryWriter

        _GLOBAL_TENSORBOARD_WRITER = SummaryWriter(log_dir=args.tensorboard_dir)


def _config_from(kind: type, args: argparse.Namespace, **values: Any) -> Any:
    """A megatron-core config dataclass from the arguments of the same names."""
    names = {f.name for f in dataclasses.fields(kind) if f.init}
    return kind(**{k: v for k, v in vars(args).items() if k in names} | values)


def build_model(args: argparse.Namespace) -> list[Any]:
    """One chunk per virtual pipeline stage."""
    if args.virtual_pipeline_model_parallel_size is None:
        return [_build_chunk(args, None)]
    return [_build_chunk(args, stage) for stage in range(args.virtual_pipeline_model_parallel_size)]


def _edges(stage: int | None) -> tuple[bool, bool]:
    """Whether this model chunk is the first, and the last, of the whole pipeline."""
    where = {"ignore_virtual": False, "vp_stage": stage}
    first = parallel_state.is_pipeline_first_stage(**where)
    return first, parallel_state.is_pipeline_last_stage(**where)


def _build_chunk(args: argparse.Namespace, stage: int | None) -> Any:
    activation = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    config = _config_from(
        TransformerConfig,
        args,
        layernorm_epsilon=args.norm_epsilon,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        num_moe_experts=args.num_experts,
        pipeline_dtype=args.params_dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        deallocate_pipeline_outputs=True,
        # Two stages would otherwise mix up what they send each other in both directions.
        overlap_p2p_comm=stage is not None,
        batch_p2p_comm=stage is None,
        **(activation if args.swiglu else {}),
    )
    first, last = _edges(stage)
    layer = get_gpt_layer_local_spec(args.num_experts, normalization=args.normalization)
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        vp_stage=stage,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.cuda(torch.cuda.current_device())
    if args.bf16 or args.fp16:
        model = Float16Module(config, model)
    in_float32 = not args.fp16 and not args.grad_reduce_in_bf16
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_float32 or args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
    )
    chunk: Any = DistributedDataParallel(config, ddp_config, model, disable_bucketing=bool(stage))
    chunk.vp_stage = stage
    return chunk


def build_optimizer(args: argparse.Namespace, model: list[Any]) -> tuple[Any, Any]:
    optimizer = get_megatron_optimizer(_config_from(OptimizerConfig, args), model)
    decay_steps = (args.lr_decay_iters or args.train_iters) * args.global_batch_size
    if args.train_samples is not None:
        decay_steps = args.lr_decay_samples or args.train_samples
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_samples or args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=decay_steps,  # constant: of no effect, but compared with a checkpoint's
        wd_incr_style="constant",
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
    )
    return optimizer, scheduler


# --- data ----------------------------------------------------------------------------------------


def _reads_data(stage: int | None) -> bool:
    return any(_edges(stage)) and parallel_state.get_tensor_model_parallel_rank() == 0


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Iterator[Any] | None:
    """Microbatches in Megatron's order: the data-parallel ranks take turns."""
    if dataset is None:
        return None
    args = _ARGS
    dp_rank = parallel_state.get_data_parallel_rank()

    def microbatches() -> Iterator[Any]:
        microbatch = 0
        while True:
            ids = sample_ids(
                consumed_samples,
                microbatch,
                args.micro_batch_size,
                dp_rank,
                args.data_parallel_size,
            )
            # Several prefixes without weights are one epoch, unlike a single one: go round.
            yield default_collate([dataset[i % len(dataset)] for i in ids])
            microbatch += 1

    return microbatches()


def build_train_valid_test_data_loaders(args: argparse.Namespace, stage: int | None) -> list[Any]:
    """Training and validation data for one model chunk, None where it reads none. Rank 0 builds the
    index files; the others then read them."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    evaluations = args.train_iters // args.eval_interval * args.eval_iters
    _check_documents(config, wanted=(True, evaluations > 0, False))
    samples = [
        args.train_samples or args.train_iters * args.global_batch_size,
        evaluations * args.global_batch_size,
        0,
    ]
    reads = partial(_reads_data, stage)
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, samples, reads, config).build()
    return [
        build_pretraining_data_loader(datasets[0], args.consumed_train_samples),
        build_pretraining_data_loader(datasets[1], args.consumed_valid_samples),
    ]


_PARTS = ("training", "validation", "test")


def _check_documents(config: GPTDatasetConfig, wanted: Sequence[bool]) -> None:
    """Leaves out parts of --split that nobody reads. Raises ConfigError where a prefix has no
    document for one that is read: Megatron would loop for ever, or assert without a word."""
    matrix = config.split_matrix
    for part, name in enumerate(_PARTS):
        if not wanted[part]:
            matrix[part] = None
        if matrix[part] is None:
            continue
        for prefix in config.blend[0]:
            documents = len(IndexedDataset(prefix).document_indices) - 1
            first, behind = (round(edge * float(documents)) for edge in matrix[part])
            if first >= behind:
                raise ConfigError(
                    f"--split {config.split} leaves no document of --data-path {prefix} for "
                    f"{name}: it has {documents}; give it more, or that part a larger share"
                )


def _batch_on_this_tp_rank(data_iterator: Iterator[Any] | None) -> dict[str, torch.Tensor]:
    """tokens, labels, position_ids int64 and loss_mask float32, each [micro_batch, seq]; tensor
    parallel rank 0 reads them and tells its peers (as Megatron's get_batch_on_this_tp_rank)."""
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    device = torch.cuda.current_device()
    read = None if data_iterator is None else next(data_iterator)
    shape = (_ARGS.micro_batch_size, _ARGS.seq_length)
    batch = {}
    for name in ("tokens", "labels", "position_ids", "loss_mask"):
        dtype = torch.float32 if name == "loss_mask" else torch.int64
        if read is not None:
            batch[name] = read[name].to(device=device, dtype=dtype)
        else:
            batch[name] = torch.empty(shape, dtype=dtype, device=device)
        torch.distributed.broadcast(batch[name], source, group=group)
    if read is not None:
        mask = read["attention_mask"].to(device)
    else:
        mask = torch.ones((1, 1, shape[1], shape[1]), dtype=torch.bool, device=device).triu(1)
    batch["attention_mask"] = mask
    return batch


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    report = torch.stack([loss.detach().clone(), tokens.float()])
    return loss, tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    if not any(_edges(model.vp_stage)):
        return model(None, None, None, labels=None), None
    batch = _batch_on_this_tp_rank(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(_loss, batch["loss_mask"])


# --- checkpoints ---------------------------------------------------------------------------------


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
    root = Path(_ARGS.save)
    folder = root / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _sharded_state(model, optimizer, opt_param_scheduler)
    state["iteration"] = iteration
    state["consumed_train_samples"] = _ARGS.consumed_train_samples
    state["consumed_valid_samples"] = _ARGS.consumed_valid_samples
    dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        Path(get_checkpoint_tracker_filename(_ARGS.save)).write_text(str(iteration))
        print(f"  saved checkpoint of iteration {iteration} to {root}", flush=True)


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
    with _settings(
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
    args = _ARGS
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


# --- training ------------------------------------------------------------------------------------


def train_step(
    args: argparse.Namespace,
    schedule: Any,
    data_iterator: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> tuple[dict[str, float], float | None]:
    """One iteration; returns the losses (last pipeline stage only) and the gradient norm."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = schedule(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    successful, grad_norm, _ = optimizer.step()
    if successful:
        scheduler.step(increment=get_current_global_batch_size())
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
    args: argparse.Namespace, schedule: Any, data_iterator: Any, model: list[Any], iteration: int
) -> None:
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
    args: argparse.Namespace,
    iteration: int,
    seconds: float,
    losses: dict[str, float],
    grad_norm: float | None,
    learning_rate: float,
    batch_size: int,
) -> None:
    """Megatron's line, from its last rank, and TensorBoard's scalars."""
    totals: dict[str, torch.Tensor] = {}
    if args.num_experts is not None:
        scale = 1 / get_num_microbatches()
        kinds = {"num_layers": args.num_layers, "force_initialize": True}
        if "aux_loss" in args.moe_router_load_balancing_type:
            kinds["track_names"] = ["load_balancing_loss"]
        track_moe_metrics(scale, iteration, total_loss_dict=totals, **kinds)
    losses = losses | {key: float(value) for key, value in totals.items()}
    if _GLOBAL_TENSORBOARD_WRITER is not None:
        for key, value in losses.items():
            _GLOBAL_TENSORBOARD_WRITER.add_scalar(key, value, iteration)
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration:8d}/{args.train_iters:8d}",
        f" consumed samples: {args.consumed_train_samples:12d}",
        f" elapsed time per iteration (ms): {seconds * 1000:.1f}",
        f" learning rate: {learning_rate:.6E}",
        f" global batch size: {batch_size:5d}",
        *(f" {key}: {value:.6E}" for key, value in losses.items()),
    ]
    if grad_norm is not None:
        parts.append(f" grad norm: {grad_norm:.3f}")
    print_rank_last(" |".join(parts) + " |")


def print_rank_last(message: str) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)


def train(
    args: argparse.Namespace,
    data_iterator: Any,
    valid_iterator: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> None:
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
        losses, grad_norm = train_step(args, schedule, data_iterator, model, optimizer, scheduler)
        args.iteration += 1
        args.consumed_train_samples += batch_size
        seconds = time.perf_counter() - started
        if args.iteration % args.log_interval == 0:
            rate = optimizer.param_groups[0]["lr"]
            training_log(args, args.iteration, seconds, losses, grad_norm, rate, batch_size)
        if args.eval_iters and args.iteration % args.eval_interval == 0:
            evaluate_and_print_results(args, schedule, valid_iterator, model, args.iteration)
        if checkpoint_and_decide_exit(
            model, optimizer, scheduler, args.iteration, 0.0, None, data_iterator
        ):
            break


_ARGS: argparse.Namespace  # set by main; Megatron's get_args()


def main() -> None:
    global _ARGS
    _ARGS = args = parse_args()
    initialize(args)
    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    if args.load:
        load_checkpoint(args, model, optimizer, scheduler)
    chunks = [build_train_valid_test_data_loaders(args, chunk.vp_stage) for chunk in model]
    train_data, valid_data = chunks[0] if len(model) == 1 else map(list, zip(*chunks, strict=True))
    _check_validation(args, chunks)
    train(args, train_data, valid_data, model, optimizer, scheduler)
    if torch.cuda.is_available():
        print_rank_last(f"peak device memory: {torch.cuda.max_memory_allocated()} bytes")
    torch.distributed.barrier()


if __name__ == "__main__":
    # The hooks replace names of the imported module, not of this copy that runs as __main__.
    from recover_megatron import pretrain

    pretrain.main()
