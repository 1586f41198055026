"""Pre-training with Megatron-LM that survives the loss of model replicas.

Importing this package has no effect. `install()` is the one line for a training script that is not
started by `python -m recover_megatron`.
"""

from __future__ import annotations

import os
import sys

__version__ = "0.1.0"
__all__ = ["install"]

_MARK = "RECOVER_MEGATRON_STARTED"


def install() -> None:
    """Call as `recover_megatron.install()` in a training script's first lines, before all imports.

    With `--recover` (or `--recover-platform`) on the command line, this process starts over as
    `python -m recover_megatron SCRIPT FLAGS`, before anything else was imported; there the call
    returns at once. Without those flags it does nothing.
    """
    flags = {arg.partition("=")[0] for arg in sys.argv[1:]}
    asked = not flags.isdisjoint(("--recover", "--recover-platform"))
    if not asked or os.environ.get(_MARK) == str(os.getpid()):
        return
    mark_started()
    before_script = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    if before_script[-1:] == ["-m"]:
        before_script.pop()
    command = [sys.executable, *before_script, "-m", "recover_megatron", *sys.argv]
    os.execv(sys.executable, command)  # noqa: S606  no shell is wanted


def mark_started() -> None:
    """`python -m recover_megatron` runs the script in this process: install() has no more to do."""
    os.environ[_MARK] = str(os.getpid())
