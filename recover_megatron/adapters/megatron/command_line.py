"""Megatron's command line, read before anything is started: the job's shape, and what is wrong."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from recover_megatron.config import RecoveryConfig
from recover_megatron.errors import ConfigError
from recover_megatron.session.arguments import (
    Parser,
    add_recovery_arguments,
    recovery_config,
    take_flag,
    wants_recovery,
)
from recover_megatron.session.job import Job
from recover_megatron.tracker import TRACKER, checkpoint_folder

PLATFORM_FLAG = "--recover-platform"


def split_arguments(argv: Sequence[str]) -> tuple[str, list[str], str]:
    """Script, its flags and the platform, whose flag may stand anywhere and is taken out."""
    platform, rest = take_flag(argv, PLATFORM_FLAG)
    platform = "cuda" if platform is None else platform
    if platform not in ("cuda", "cpu"):
        raise ConfigError(f"{PLATFORM_FLAG} must be cuda or cpu, got {platform!r}")
    if not rest or not os.path.isfile(rest[0]):
        found = rest[0] if rest else "nothing"
        raise ConfigError(f"expected a training script such as pretrain_gpt.py, got {found}")
    return rest[0], rest[1:], platform


def read_script(words: Sequence[str]) -> Job:
    """The job of a training script and its flags. Raises ConfigError without --recover, and as
    `read_job`."""
    path, flags, _ = split_arguments(words)
    if not wants_recovery(flags):
        raise ConfigError(f"--recover is not among the flags of {path}; add it, or use torchrun")
    return read_job(flags)


def read_job(argv: Sequence[str]) -> Job:
    """The job of a Megatron command line (without the script's name).

    Raises ConfigError for whatever is wrong before anything is started; flags that are not ours to
    judge are left to Megatron's parser.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
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
