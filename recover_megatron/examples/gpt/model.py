"""The model, one chunk per virtual pipeline stage, its optimizer and schedule."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module


def build_model(args: argparse.Namespace) -> list[Any]:
    """One chunk per virtual pipeline stage."""
    if args.virtual_pipeline_model_parallel_size is None:
        return [_build_chunk(args, None)]
    return [_build_chunk(args, stage) for stage in range(args.virtual_pipeline_model_parallel_size)]


def edges(stage: int | None) -> tuple[bool, bool]:
    """Whether this model chunk is the first, and the last, of the whole pipeline."""
    where = {"ignore_virtual": False, "vp_stage": stage}
    first = parallel_state.is_pipeline_first_stage(**where)
    return first, parallel_state.is_pipeline_last_stage(**where)


def _config_from(kind: type, args: argparse.Namespace, **values: Any) -> Any:
    """A megatron-core config dataclass from the arguments of the same names."""
    names = {f.name for f in dataclasses.fields(kind) if f.init}
    return kind(**{k: v for k, v in vars(args).items() if k in names} | values)


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
    first, last = edges(stage)
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
