"""Prints the flags of a training script's Megatron as JSON, each with whether it is a switch, or
with Megatron's own group of it.

    python -m recover_megatron.adapters.megatron.known_flags [--groups] pretrain_gpt.py

Needs no GPU: the CPU platform stands in for what Megatron looks for when it is imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings

from recover_megatron.adapters.megatron import cpu
from recover_megatron.adapters.megatron.bootstrap import is_ours
from recover_megatron.adapters.megatron.command_line import PLATFORM_FLAG
from recover_megatron.session.arguments import add_recovery_arguments


def main(script: str, groups: bool = False) -> None:
    warnings.simplefilter("ignore")
    if is_ours(script):
        arguments = importlib.import_module("recover_megatron.examples.gpt.arguments")
    else:
        cpu.install_torch()
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        arguments = importlib.import_module("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    if groups:
        by_group = [(g.title, g._group_actions) for g in parser._action_groups]
        pairs = [
            (o, title) for title, actions in by_group for a in actions for o in a.option_strings
        ]
        print(json.dumps({option: title for option, title in pairs if option.startswith("--")}))
        return
    add_recovery_arguments(parser)
    known = {o: a.nargs == 0 for a in parser._actions for o in a.option_strings}
    print(json.dumps({**known, PLATFORM_FLAG: False}))


if __name__ == "__main__":
    main(sys.argv[-1], "--groups" in sys.argv[1:-1])
