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
import dataclasses
import os
import random
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,  # noqa: F401  a hooked global
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model
from torch.utils.data import default_collate

from recover_megatron.workload.samples import sample_ids

TRACKER = "latest_checkpointed_iteration.txt"


# --- arguments -----------------------------------------------------------------------------------


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's names and defaults, as far as this script honours them."""
    add = parser.add_argument
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length"):
        add(f"--{name}", type=int, required=True)
    add("--max-position-embeddings", type=int, required=True)
    add("--ffn-hidden-size", type=int)
    add("--group-query-attention", action="store_true")
    add("--num-query-groups", type=int, default=1)
    add("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    add("--norm-epsilon", type=float, default=1e-5)
    add("--swiglu", action="store_true")
    add("--position-embedding-type", choices=("learned_absolute", "rope"), default="rope")
    add("--rotary-base", type=int, default=10000)
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--init-method-std", type=float, default=0.02)
    add("--transformer-impl", choices=("local",), default="local")
    add("--bf16", action="store_true")
    for name in ("tensor-model", "pipeline-model", "context"):
        add(f"--{name}-parallel-size", type=int, default=1)
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--calculate-per-token-loss", action="store_true")
    add("--distributed-backend", choices=("nccl", "gloo"), default="nccl")
    add("--distributed-timeout-minutes", type=int, default=10)
    add("--micro-batch-size", type=int, required=True)
    add("--global-batch-size", type=int, required=True)
    add("--train-iters", type=int, required=True)
    add("--lr", type=float, required=True)
    add("--min-lr", type=float, default=0.0)
    add("--lr-decay-style", choices=("constant", "linear", "cosine"), default="linear")
    add("--lr-decay-iters", type=int)
    add("--lr-warmup-iters", type=int, default=0)
    add("--weight-decay", type=float, default=0.01)
    add("--clip-grad", type=float, default=1.0)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--adam-eps", type=float, default=1e-8)
    add("--seed", type=int, default=1234)
    add("--data-path", nargs="*", required=True)
    add("--data-cache-path")
    add("--split", default="969,30,1")
    add("--tokenizer-type", choices=("NullTokenizer",), default="NullTokenizer")
    add("--vocab-size", type=int, required=True)
    add("--make-vocab-size-divisible-by", type=int, default=128)
    add("--log-interval", type=int, default=1)
    add("--eval-interval", type=int, default=1000)
    add("--eval-iters", type=int, default=0)
    add("--save")
    add("--save-interval", type=int)
    add("--load")
    add("--num-workers", type=int, choices=(0,), default=0)
    # megatron-core without transformer-engine or apex never fuses; accepted for the same command.
    for name in (
        "gradient-accumulation-fusion",
        "masked-softmax-fusion",
        "persist-layer-norm",
        "rope-fusion",
        "bias-swiglu-fusion",
        "bias-dropout-fusion",
    ):
        add(f"--no-{name}", action="store_true")
    return parser


def validate_args(args: argparse.Namespace) -> None:
    """Fills in what depends on other values; exits with one sentence where they do not fit."""
    model_parallel = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % model_parallel:
        raise SystemExit(
            f"pretrain.py: {world_size} ranks are not a multiple of tensor x pipeline x context "
            f"parallel = {model_parallel}"
        )
    args.data_parallel_size = world_size // model_parallel
    if args.num_layers % args.pipeline_model_parallel_size:
        raise SystemExit(
            f"pretrain.py: --num-layers {args.num_layers} does not divide over "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = 4 * args.hidden_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-(args.vocab_size + 1) // multiple) * multiple  # 1: end of document
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.iteration = args.consumed_train_samples = 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    args = add_megatron_arguments(parser).parse_args()
    validate_args(args)
    return args


# --- set-up --------------------------------------------------------------------------------------


def initialize(args: argparse.Namespace) -> None:
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group(
        backend=args.distributed_backend,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        None,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )


def _config_from(kind: type, args: argparse.Namespace, **values: Any) -> Any:
    """A megatron-core config dataclass from the arguments of the same names."""
    names = {f.name for f in dataclasses.fields(kind) if f.init}
    return kind(**{k: v for k, v in vars(args).items() if k in names} | values)


def build_model(args: argparse.Namespace) -> list[Any]:
    activation = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    config = _config_from(
        TransformerConfig,
        args,
        layernorm_epsilon=args.norm_epsilon,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        pipeline_dtype=args.params_dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        deallocate_pipeline_outputs=True,
        **(activation if args.swiglu else {}),
    )
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.cuda(torch.cuda.current_device())
    if args.bf16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    return [DistributedDataParallel(config, ddp_config, model)]


def build_optimizer(args: argparse.Namespace, model: list[Any]) -> tuple[Any, Any]:
    optimizer = get_megatron_optimizer(_config_from(OptimizerConfig, args), model)
    decay_steps = (args.lr_decay_iters or args.train_iters) * args.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


# --- data ----------------------------------------------------------------------------------------


def _reads_data() -> bool:
    on_edge = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    return on_edge and parallel_state.get_tensor_model_parallel_rank() == 0


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
            yield default_collate([dataset[i] for i in ids])
            microbatch += 1

    return microbatches()


def build_train_valid_test_data_loaders(args: argparse.Namespace) -> Iterator[Any] | None:
    """The training data only. Rank 0 builds the index files; the others then read them."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    samples = [args.train_iters * args.global_batch_size, 0, 0]
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, samples, _reads_data, config).build()
    return build_pretraining_data_loader(datasets[0], args.consumed_train_samples)


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
    edge = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    if not edge:
        return model(None, None, None, labels=None), None
    batch = _batch_on_this_tp_rank(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(_loss, batch["loss_mask"])


# --- checkpoints ---------------------------------------------------------------------------------


def _sharded_state(
    model: list[Any], optimizer: Any, scheduler: Any, is_loading: bool = False
) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group}
    state = {"model": unwrap_model(model[0]).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    state["opt_param_scheduler"] = scheduler.state_dict()
    return state


def save_checkpoint(
    iteration: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """torch_dist format under `--save`; the tracker file last and atomically."""
    root = Path(_ARGS.save)
    folder = root / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _sharded_state(model, optimizer, opt_param_scheduler)
    state["iteration"] = iteration
    state["consumed_train_samples"] = _ARGS.consumed_train_samples
    dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        partial_file = root / (TRACKER + ".partial")
        partial_file.write_text(str(iteration))
        partial_file.replace(root / TRACKER)
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
    tracker = Path(args.load) / TRACKER
    if not tracker.is_file():
        print(f"pretrain.py: no checkpoint in {args.load}; starting from scratch", flush=True)
        return
    folder = Path(args.load) / f"iter_{int(tracker.read_text()):07d}"
    wanted = _sharded_state(model, optimizer, scheduler, is_loading=True)
    loaded = dist_checkpointing.load(wanted, str(folder))
    unwrap_model(model[0]).load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    common = dist_checkpointing.load_common_state_dict(str(folder))
    args.iteration = common["iteration"]
    args.consumed_train_samples = common["consumed_train_samples"]


def checkpoint_and_decide_exit(
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    iteration: int,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    train_data_iterator: Any,
) -> bool:
    """After every iteration: a save that is due. Never asks to exit."""
    args = _ARGS
    if args.save and args.save_interval and iteration % args.save_interval == 0:
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    return False


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
        scheduler.step(increment=args.global_batch_size)
    reduced: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for key in losses[0]:
            total = torch.vstack([loss[key].view(-1) for loss in losses]).sum(dim=0)
            torch.distributed.all_reduce(total, group=group)
            reduced[key] = (total[0] / total[1]).item()
    return reduced, None if grad_norm is None else float(grad_norm)


def training_log(
    args: argparse.Namespace,
    iteration: int,
    seconds: float,
    losses: dict[str, float],
    grad_norm: float | None,
    learning_rate: float,
) -> None:
    """Megatron's line, from its last rank."""
    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration:8d}/{args.train_iters:8d}",
        f" consumed samples: {args.consumed_train_samples:12d}",
        f" elapsed time per iteration (ms): {seconds * 1000:.1f}",
        f" learning rate: {learning_rate:.6E}",
        f" global batch size: {args.global_batch_size:5d}",
        *(f" {key}: {value:.6E}" for key, value in losses.items()),
    ]
    if grad_norm is not None:
        parts.append(f" grad norm: {grad_norm:.3f}")
    print(" |".join(parts) + " |", flush=True)


def train(
    args: argparse.Namespace, data_iterator: Any, model: list[Any], optimizer: Any, scheduler: Any
) -> None:
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    for chunk in model:
        chunk.train()
    schedule = get_forward_backward_func()
    while args.iteration < args.train_iters:
        started = time.perf_counter()
        args.curr_iteration = args.iteration
        losses, grad_norm = train_step(args, schedule, data_iterator, model, optimizer, scheduler)
        args.iteration += 1
        args.consumed_train_samples += args.global_batch_size
        seconds = time.perf_counter() - started
        if args.iteration % args.log_interval == 0:
            rate = optimizer.param_groups[0]["lr"]
            training_log(args, args.iteration, seconds, losses, grad_norm, rate)
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
    data_iterator = build_train_valid_test_data_loaders(args)
    train(args, data_iterator, model, optimizer, scheduler)
    torch.distributed.barrier()


if __name__ == "__main__":
    # The hooks replace names of the imported module, not of this copy that runs as __main__.
    from recover_megatron import pretrain

    pretrain.main()
