"""What the whole process shares: the arguments and the TensorBoard writer, as in Megatron."""

from __future__ import annotations

import argparse
from typing import Any

_ARGS: argparse.Namespace
_GLOBAL_TENSORBOARD_WRITER: Any = None


def get_args() -> argparse.Namespace:
    return _ARGS


def get_tensorboard_writer() -> Any:
    """None but at the last rank, and there only with --tensorboard-dir."""
    return _GLOBAL_TENSORBOARD_WRITER


def set_global_variables(args: argparse.Namespace) -> None:
    """Once, when the arguments are valid."""
    global _ARGS
    _ARGS = args
    _set_tensorboard_writer(args)


def _set_tensorboard_writer(args: argparse.Namespace) -> None:
    global _GLOBAL_TENSORBOARD_WRITER
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        from torch.utils.tensorboard import SummaryWriter

        _GLOBAL_TENSORBOARD_WRITER = SummaryWriter(log_dir=args.tensorboard_dir)
