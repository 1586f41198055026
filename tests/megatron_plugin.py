"""A pytest plugin that installs the CPU platform and all hooks before Megatron-LM's own unit tests:

    cd Megatron-LM && python -m pytest --noconftest -o addopts= -p tests.megatron_plugin TESTS

with this project on PYTHONPATH. No job is behind the hooks: what they must leave alone stays green.
"""

from __future__ import annotations

import importlib
import os

from recover_megatron.adapters.megatron import cpu

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
cpu.install_torch()
cpu.install_core()
training = importlib.import_module("megatron.training.training")
cpu.install_training()

from recover_megatron.adapters.megatron.bootstrap import hooked_modules  # noqa: E402
from recover_megatron.adapters.megatron.hooks import Hooks  # noqa: E402
from recover_megatron.testing.lone import lone_session  # noqa: E402

Hooks(lone_session(), hooked_modules(__file__)).install()
