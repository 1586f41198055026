"""torch.distributed, Megatron's process groups, seeds, and the number of iterations."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import traceback
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

from recover_megatron.errors import ConfigError
from recover_megatron.examples.gpt.global_vars import set_global_variables


def initialize_megatron(args: argparse.Namespace) -> None:
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
    with settings("the batch size"):
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
    set_global_variables(args)


@contextlib.contextmanager
def settings(what: str) -> Iterator[None]:
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
