"""The flags of the example: Megatron's names and defaults, as far as the script honours them."""

from __future__ import annotations

import argparse
import os

import torch

from recover_megatron.errors import ConfigError


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
    add("--fp16", action="store_true")
    add("--loss-scale", type=float)
    add("--initial-loss-scale", type=float, default=2**32)
    add("--min-loss-scale", type=float, default=1.0)
    add("--loss-scale-window", type=float, default=1000)
    add("--hysteresis", type=int, default=2)
    add("--grad-reduce-in-bf16", action="store_true")
    add("--accumulate-allreduce-grads-in-fp32", action="store_true")
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        add(f"--{name}-parallel-size", type=int, default=1)
    add("--num-layers-per-virtual-pipeline-stage", type=int)
    add("--num-experts", type=int)
    add("--moe-router-topk", type=int, default=2)
    add("--moe-router-load-balancing-type", default="aux_loss")
    add("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax")
    add("--moe-router-enable-expert-bias", action="store_true")
    add("--moe-router-bias-update-rate", type=float, default=1e-3)
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-token-dispatcher-type", choices=("allgather", "alltoall"), default="allgather")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--calculate-per-token-loss", action="store_true")
    _add_training_arguments(parser)
    return parser


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--distributed-backend", choices=("nccl", "gloo"), default="nccl")
    add("--distributed-timeout-minutes", type=int, default=10)
    add("--micro-batch-size", type=int, required=True)
    add("--global-batch-size", type=int, required=True)
    add("--rampup-batch-size", nargs=3, metavar=("START", "INCREMENT", "SAMPLES"))
    add("--train-iters", type=int)
    add("--train-samples", type=int)
    add("--exit-interval", type=int)
    add("--exit-duration-in-mins", type=float)
    add("--lr", type=float, required=True)
    add("--min-lr", type=float, default=0.0)
    add("--lr-decay-style", choices=("constant", "linear", "cosine"), default="linear")
    add("--lr-decay-iters", type=int)
    add("--lr-decay-samples", type=int)
    add("--lr-warmup-iters", type=int, default=0)
    add("--lr-warmup-samples", type=int, default=0)
    # Megatron's spelling: which schedule counts where a checkpoint has another one.
    add("--override-opt_param-scheduler", action="store_true")
    add("--use-checkpoint-opt_param-scheduler", action="store_true")
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
    add("--tensorboard-dir")
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


def validate_args(args: argparse.Namespace) -> None:
    """Fills in what depends on other values. Raises ConfigError where they do not fit."""
    model_parallel = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % model_parallel:
        raise ConfigError(
            f"{world_size} ranks are not a multiple of tensor x pipeline x context "
            f"parallel = {model_parallel}"
        )
    args.data_parallel_size = world_size // model_parallel
    chunk = args.num_layers_per_virtual_pipeline_stage
    stages = args.pipeline_model_parallel_size * (chunk or 1)
    if args.num_layers % stages:
        raise ConfigError(
            f"--num-layers {args.num_layers} does not divide over "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
            + (f" x --num-layers-per-virtual-pipeline-stage {chunk}" if chunk else "")
        )
    args.virtual_pipeline_model_parallel_size = args.num_layers // stages if chunk else None
    if (args.train_iters is None) == (args.train_samples is None):
        raise ConfigError("give one of --train-iters and --train-samples")
    if args.rampup_batch_size and args.train_samples is None:
        raise ConfigError("--rampup-batch-size needs --train-samples")
    _check_schedule(args)
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = 4 * args.hidden_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-(args.vocab_size + 1) // multiple) * multiple  # 1: end of document
    args.params_dtype = torch.float32
    if args.bf16 or args.fp16:
        args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16
    # With a dynamic loss scale an overflow is no error.
    args.check_for_nan_in_loss_and_grad = not args.fp16 or args.loss_scale is not None
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), world_size
    args.iteration = args.consumed_valid_samples = args.curr_iteration = 0
    args.consumed_train_samples = 0


def _check_schedule(args: argparse.Namespace) -> None:
    """Megatron only asserts these, without a word."""
    for unit in ("iters", "samples"):
        warmup, decay = (getattr(args, f"lr_{kind}_{unit}") for kind in ("warmup", "decay"))
        whole, name = decay, f"--lr-decay-{unit}"
        if not decay:
            whole, name = getattr(args, f"train_{unit}"), f"--train-{unit}"
        if warmup and whole is not None and warmup >= whole:
            raise ConfigError(
                f"--lr-warmup-{unit} {warmup} must be less than {name} {whole}: the learning rate "
                "would never reach its maximum"
            )
    if args.min_lr > args.lr:
        raise ConfigError(f"--min-lr {args.min_lr:g} must not be more than --lr {args.lr:g}")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ConfigError(
            "give one of --override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler"
        )
    for name in ("log_interval", "eval_interval", "save_interval", "exit_interval"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    args = add_megatron_arguments(parser).parse_args()
    validate_args(args)
    return args
