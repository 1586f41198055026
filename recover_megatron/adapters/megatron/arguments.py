"""Megatron's command line: the `--recover*` flags, the job's shape, what is refused at start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn

from recover_megatron.config import RecoveryConfig, flag_fields, flag_name
from recover_megatron.errors import ConfigError
from recover_megatron.faults import parse_faults
from recover_megatron.tracker import TRACKER, checkpoint_folder
from recover_megatron.world import ReplicaLayout


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing a usage page and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_recovery_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Append the `--recover*` group (called by Megatron's own add_megatron_arguments)."""
    group = parser.add_argument_group("recover_megatron")
    group.add_argument("--recover", action="store_true", help="survive the loss of model replicas")
    for field in flag_fields():
        names = (flag_name(field.name),)
        where = {"dest": f"recover_{field.name}", "help": field.metadata["help"]}
        if field.default is False:
            group.add_argument(*names, action="store_true", **where)
            continue
        plain = str if field.default is None else type(field.default)
        group.add_argument(
            *names,
            **where,
            type=field.metadata.get("type", plain),
            default=field.default if field.default is not MISSING else None,
            choices=field.metadata.get("choices"),
        )
    return parser


def recovery_flags() -> list[str]:
    """All `--recover*` flags."""
    return ["--recover", *(flag_name(field.name) for field in flag_fields())]


def recovery_config(args: argparse.Namespace) -> RecoveryConfig:
    """Raises ConfigError if a value is out of range."""
    values = {field.name: getattr(args, f"recover_{field.name}") for field in flag_fields()}
    return RecoveryConfig(**values)


@dataclass(frozen=True)
class Job:
    """What the command line says of the job, read before Megatron or MPI is started."""

    config: RecoveryConfig
    ranks_per_replica: int
    global_batch_size: int
    micro_batch_size: int
    first_batch_size: int  # of the batch-size ramp-up; else the global batch
    warning: str = ""  # what is allowed, and may not be meant

    @property
    def microbatches(self) -> int:
        """B: what every iteration commits, counted per replica (after a batch-size ramp-up)."""
        return self.global_batch_size // self.samples_per_microbatch

    @property
    def samples_per_microbatch(self) -> int:
        return self.micro_batch_size * self.config.intra_replica_dp

    def layout(self, ranks: int) -> ReplicaLayout:
        """Raises ConfigError unless `ranks` are whole replicas, each with work to do."""
        if ranks % self.ranks_per_replica:
            raise ConfigError(
                f"{ranks} ranks are not a whole number of replicas of {self.ranks_per_replica} "
                "ranks (tensor x pipeline x context parallel x --recover-intra-replica-dp); "
                f"start a multiple of {self.ranks_per_replica}"
            )
        layout = ReplicaLayout(ranks // self.ranks_per_replica, self.ranks_per_replica)
        fewest = self.first_batch_size // self.samples_per_microbatch
        if fewest < layout.replicas:
            ramp = self.first_batch_size < self.global_batch_size
            flag = "--rampup-batch-size" if ramp else "--global-batch-size"
            raise ConfigError(
                f"{fewest} microbatches an iteration ({flag} {self.first_batch_size} / "
                f"{self.samples_per_microbatch} samples) are fewer than {layout.replicas} "
                f"replicas; raise {flag} or start fewer replicas"
            )
        if self.config.min_replicas > layout.replicas:
            raise ConfigError(
                f"--recover-min-replicas {self.config.min_replicas} is more than the "
                f"{layout.replicas} replicas of this job"
            )
        parse_faults(self.config.inject, layout)
        return layout


def wants_recovery(argv: Sequence[str]) -> bool:
    return "--recover" in argv


def take_flag(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of `flag`, given as `--flag value` or `--flag=value`, the last one if there are
    several, None if there is none; and the other words. Raises ConfigError if it has no value."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    found, rest = parser.parse_known_args(list(words))
    return found.value, rest


def read_job(argv: Sequence[str]) -> Job:
    """The job of a Megatron command line (without the script's name).

    Raises ConfigError for whatever is wrong before anything is started; flags that are not ours to
    judge are left to Megatron's parser.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_recovery_arguments(parser)
    for flag in ("tensor-model", "pipeline-model", "context"):
        parser.add_argument(f"--{flag}-parallel-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--num-distributed-optimizer-instances", type=int, default=1)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--data-path", nargs="*", default=[])
    parser.add_argument("--rampup-batch-size", nargs="*")
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--pretrained-checkpoint")
    parser.add_argument("--non-persistent-ckpt-type")
    parser.add_argument("--ckpt-step", type=int)
    parser.add_argument("--distributed-timeout-minutes", type=float, default=10)
    args, _ = parser.parse_known_args(list(argv))
    config = recovery_config(args)
    _check_optimizer(args, config)
    _check_data(args.data_path)
    _check_load(args)
    for name in ("micro_batch_size", "global_batch_size"):
        if getattr(args, name) is None or getattr(args, name) < 1:
            raise ConfigError(
                f"--recover needs --{name.replace('_', '-')} with a value of at least 1: the batch "
                "must not depend on how many replicas are alive"
            )
    job = Job(
        config,
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
        * config.intra_replica_dp,
        args.global_batch_size,
        args.micro_batch_size,
        _first_batch_size(args),
        _overwrites(args),
    )
    if args.global_batch_size % job.samples_per_microbatch:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of "
            f"{job.samples_per_microbatch} (--micro-batch-size {args.micro_batch_size} x "
            f"--recover-intra-replica-dp {config.intra_replica_dp})"
        )
    own_timeout_s = 60 * args.distributed_timeout_minutes
    if (config.hang_timeout_s or 0) > own_timeout_s:
        raise ConfigError(
            f"--recover-hang-timeout {config.hang_timeout_s:g} is longer than the "
            f"{own_timeout_s:g} s after which a replica's own collectives give up, so that a hung "
            "rank would never be named; lower it, or raise --distributed-timeout-minutes"
        )
    if config.min_replicas > 1 and not args.save:
        raise ConfigError(
            "--recover-min-replicas stops the job with a checkpoint, so it needs --save FOLDER"
        )
    return job


def _first_batch_size(args: argparse.Namespace) -> int:
    if not args.rampup_batch_size:
        return int(args.global_batch_size)
    try:
        return min(int(args.rampup_batch_size[0]), args.global_batch_size)
    except ValueError:
        raise ConfigError(
            "--rampup-batch-size must begin with the number of samples of the first batch, got "
            f"{args.rampup_batch_size[0]!r}"
        ) from None


def _check_optimizer(args: argparse.Namespace, config: RecoveryConfig) -> None:
    shared = args.num_distributed_optimizer_instances > 1
    alone = args.use_distributed_optimizer and config.intra_replica_dp == 1
    if shared or alone:
        raise ConfigError(
            "the distributed optimizer must not be spread across replicas, since a replica has to "
            "hold its whole optimizer state to be able to lose the others; drop "
            + (
                "--num-distributed-optimizer-instances"
                if shared
                else "--use-distributed-optimizer, or give each replica data-parallel ranks of its "
                "own with --recover-intra-replica-dp N"
            )
        )


def _check_data(data_path: Sequence[str]) -> None:
    for prefix in data_path:
        if "://" in prefix or _is_number(prefix):
            continue
        for suffix in (".bin", ".idx"):
            path = prefix + suffix
            if not os.path.isfile(path):
                raise ConfigError(
                    f"--data-path {prefix}: there is no file {path}; make it with "
                    "`recover-megatron prepare-data`"
                )
            if os.path.getsize(path) == 0:
                raise ConfigError(f"--data-path {prefix}: the file {path} is empty")


def _check_load(args: argparse.Namespace) -> None:
    """A --load that is mistyped would start from scratch, and overwrite the checkpoints of --save.
    With the same folder for both, a first start is meant."""
    if not args.load or "://" in args.load or args.non_persistent_ckpt_type:
        return
    if not (Path(args.load) / TRACKER).is_file():
        if _resumes_itself(args):
            return
        if args.pretrained_checkpoint:
            return
        raise ConfigError(
            f"--load {args.load} holds no checkpoint (no file {TRACKER}); mend the path, leave it "
            "out to start from scratch, or make it the same as --save to start from scratch once "
            "and resume later"
        )
    if args.ckpt_step is None:
        checkpoint_folder(args.load)


def _resumes_itself(args: argparse.Namespace) -> bool:
    return bool(args.load and args.save) and (
        os.path.abspath(args.load) == os.path.abspath(args.save)
    )


def _overwrites(args: argparse.Namespace) -> str:
    """Of a job that starts from scratch, or from elsewhere, into a used folder."""
    if not args.save or "://" in args.save or not (Path(args.save) / TRACKER).is_file():
        return ""
    if _resumes_itself(args):
        return ""
    return (
        f"--save {args.save} holds checkpoints that this job does not load: it will overwrite them "
        f"and their tracker file; to go on from them give --load {args.save}"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# Minor versions of Megatron on which scripts/try_megatron.sh passed (patches/README.md).
TRIED_MEGATRON = ("0.15", "0.16", "0.17", "0.18", "0.19")


def check_version(version: str, allow_untested: bool) -> None:
    """Raises ConfigError for a Megatron that the hooks were not tried on."""
    if not allow_untested and version.split(".")[:2] not in [t.split(".") for t in TRIED_MEGATRON]:
        raise ConfigError(
            f"Megatron {version} was not tried with --recover (tried: {', '.join(TRIED_MEGATRON)});"
            " try it with scripts/try_megatron.sh, or add --recover-allow-untested-megatron"
        )


# What would silently diverge or hang: (attribute of Megatron's args, allowed values, reason).
# megatron-seams.md, section 1.3. An attribute that this Megatron does not have is not set either.
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
