"""A pytest plugin that installs the CPU platform and all hooks before Megatron-LM's own unit tests:

    cd Megatron-LM && python -m pytest --noconftest -o addopts= -p tests.megatron_plugin TESTS

with this project on PYTHONPATH. No job is behind the hooks: what they must leave alone stays green.
"""

from __future__ import annotations

import importlib
import os
from unittest.mock import MagicMock

from recover_megatron.adapters.megatron import cpu
from recover_megatron.config import RecoveryConfig

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
cpu.install_torch()
cpu.install_core()
training = importlib.import_module("megatron.training.training")
cpu.install_training()

from recover_megatron.adapters.megatron.bootstrap import _host  # noqa: E402
from recover_megatron.adapters.megatron.hooks import Hooks  # noqa: E402

session = MagicMock()
session.config = RecoveryConfig()
session.injector.plans.return_value = False
Hooks(session, _host(__file__)).install()
