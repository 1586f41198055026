"""Which versions and settings of Megatron --recover can do right, and which it refuses, and why."""

from __future__ import annotations

import argparse
from typing import Any

from recover_megatron.errors import ConfigError
from recover_megatron.world import ReplicaLayout

# Minor versions of Megatron on which scripts/try_megatron.sh passed (patches/README.md).
TRIED_MEGATRON = ("0.15", "0.16", "0.17", "0.18", "0.19")


def check_version(version: str, allow_untested: bool) -> None:
    """Raises ConfigError for a Megatron that the hooks were not tried on."""
    if not allow_untested and version.split(".")[:2] not in [t.split(".") for t in TRIED_MEGATRON]:
        raise ConfigError(
            f"Megatron {version} was not tried with --recover (tried: {', '.join(TRIED_MEGATRON)});"
            " try it with scripts/try_megatron.sh, or add --recover-allow-untested-megatron"
        )


# What would silently diverge or hang: (attribute of Megatron's args, allowed values, reason), see
# docs/megatron-seams.md, 1.3. An attribute that this Megatron does not have is not set either.
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("dataloader_type", ("single", None), "samples must be a function of iteration and microbatch"),
    ("qk_clip", (False,), "it edits weights by a maximum taken inside one replica"),
    ("use_torch_fsdp2", (False,), "it does not use Megatron's gradient buffers"),
    ("use_megatron_fsdp", (False,), "it does not use Megatron's gradient buffers"),
    ("data_parallel_random_init", (False,), "all replicas must start from the same weights"),
    ("phase_transition_iterations", (None, []), "samples of a phase do not count from its start"),
    ("hybrid_context_parallel", (False,), "it regroups samples across the batch"),
    ("inprocess_restart", (False,), "two things would restart the job"),
    ("enable_ft_package", (False,), "two things would restart the job"),
    ("non_persistent_ckpt_type", ("global", None), "local checkpoints are spread over all ranks"),
    ("yaml_cfg", (None,), "the job's shape is read from the command line"),
    ("reuse_grad_buf_for_mxfp8_param_ag", (False,), "parameters share the gradient buffer"),
    ("save_wgrads_interval", (None,), "gradients are not there where it looks for them"),
    (
        "ddp_param_name_patterns_for_fp32_local_accumulation",
        ([], (), None),
        "it keeps the gradient outside of Megatron's gradient buffers",
    ),
    ("step_batch_size_schedule", (None,), "the smallest batch must be known at the start"),
    ("fim_data", (False,), "what it draws depends on the order in which samples are read"),
    ("perform_rl_step", (False,), "its roll-outs are one replica's own"),
    ("adlr_autoresume", (False,), "it ends one replica without the others"),
    ("log_straggler", (False,), "all replicas of a host would listen on the same port"),
    ("ckpt_convert_format", (None,), "every replica would write the same files"),
    ("moe_use_upcycling", (False,), "every replica would write the same files"),
    ("save_dgrads_interval", (None,), "every replica would write the same files"),
    ("save_activations_interval", (None,), "every replica would write the same files"),
    ("save_params_interval", (None,), "every replica would write the same files"),
    ("save_tokens_per_expert_interval", (None,), "every replica would write the same files"),
    ("moe_routing_trace_path", (None,), "every replica would write the same files"),
    ("logits_save_dir", (None,), "every replica would write the same files"),
    ("logits_load_dir", (None,), "logits are not kept by microbatch"),
    ("fake_process_group", (False,), "nothing would be reduced inside a replica"),
)


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Raises ConfigError, after Megatron's own validation, for what --recover cannot do right."""
    for name, allowed, reason in _UNSUPPORTED:
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} is not supported with --recover: {reason}")
    balancing = getattr(args, "moe_router_load_balancing_type", None) or []
    for name in ("global_aux_loss", "quantile_balancing"):
        if name in balancing:
            raise ConfigError(
                f"--moe-router-load-balancing-type {name} is not supported with --recover: it is "
                "computed from the tokens that one replica has seen"
            )
    if getattr(args, "virtual_pipeline_model_parallel_size", None):
        for name in ("num_experts", "mtp_num_layers"):
            if getattr(args, name, None):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is not supported with --recover in an interleaved "
                    "pipeline: its own loss cannot be taken out of the microbatches that pad a "
                    "share; drop --num-layers-per-virtual-pipeline-stage"
                )
    drops = [n for n in ("hidden_dropout", "attention_dropout") if getattr(args, n, 0)]
    if drops and getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise ConfigError(
            f"--{drops[0].replace('_', '-')} is not supported with --recover and "
            "--overlap-moe-expert-parallel-comm: two microbatches share a pass there, so dropout "
            "cannot be drawn by microbatch; drop one of the two"
        )
    scope = [str(s) for s in getattr(args, "cuda_graph_scope", None) or []]
    if any("full_iteration" in s for s in scope):
        raise ConfigError("--cuda-graph-scope full_iteration would freeze the recovery hooks")


def own_faults(args: argparse.Namespace, layout: ReplicaLayout, replica_id: int) -> None:
    """Megatron's own fault injector (--fault-injector-*, from core_v0.18 on) knows the ranks of one
    replica only, so its faults would strike every replica alike. Ranks that are named are taken for
    the job's; a number of random ones strikes the last replica. Raises ConfigError for ranks that
    the job does not have."""
    named = getattr(args, "fault_injector_ranks", None)
    if named is not None:
        try:
            ranks = [int(rank) for rank in str(named).split(",")]
        except ValueError:
            raise ConfigError(
                f"--fault-injector-ranks {named}: expected numbers with commas between them"
            ) from None
        if outside := [rank for rank in ranks if not 0 <= rank < layout.ranks]:
            raise ConfigError(
                f"--fault-injector-ranks {named}: rank {outside[0]} is not in 0..{layout.ranks - 1}"
            )
        own = [layout.position_of(r) for r in ranks if layout.replica_of(r) == replica_id]
        args.fault_injector_ranks = ",".join(map(str, own)) or None
    if replica_id != layout.replicas - 1 and hasattr(args, "fault_injector_num_ranks"):
        args.fault_injector_num_ranks = None
