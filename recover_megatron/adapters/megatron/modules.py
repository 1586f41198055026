"""The modules of a training script whose global names are hooked."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class MegatronModules:
    """The modules whose global names are hooked. `validators` all hold a name `validate_args`;
    `writers` holds `_set_tensorboard_writer`, `checkpointing` `get_checkpoint_tracker_filename`."""

    training: ModuleType
    arguments: ModuleType
    validators: tuple[ModuleType, ...]
    writers: ModuleType
    checkpointing: ModuleType

    @property
    def args(self) -> Any:
        """Megatron's arguments, once it has validated them."""
        return self.writers.get_args()
