"""The `recover-megatron` command."""

from __future__ import annotations

import argparse
import functools
import io
import os
import sys
from collections.abc import Sequence

from recover_megatron.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a ConfigError is one sentence on stderr and code 2."""
    from recover_megatron.adapters.megatron.command_line import read_script
    from recover_megatron.data import prepare_c4, prepare_data
    from recover_megatron.goodput import simulate
    from recover_megatron.launch import command as launch
    from recover_megatron.launch import doctor
    from recover_megatron.record import compare, report, status

    parser = argparse.ArgumentParser(prog="recover-megatron", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, summary in (
        ("launch", launch, "start a training job under mpirun"),
        ("doctor", doctor, "check this machine by really killing a process in a small job"),
        ("prepare-data", prepare_data, "text to Megatron's .bin/.idx"),
        ("prepare-c4", prepare_c4, "C4's files to one indexed dataset, in parallel, resumable"),
        ("status", status, "how a run stands, refreshed in the terminal"),
        ("report", report, "one HTML page of a run: plots, and a table of its failures"),
        ("simulate", simulate, "goodput under a failure trace, by system and size; simulated"),
        ("compare", compare, "compare a run with failures to a run without"),
    ):
        sub = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(entry=module.run)
    commands.choices["launch"].set_defaults(
        entry=functools.partial(launch.run, read_script=read_script)
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a console may know fewer characters
    args = parser.parse_args(argv)
    try:
        return int(args.entry(args))
    except BrokenPipeError:  # nobody reads what is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (ConfigError, OSError) as error:
        print(f"recover-megatron {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"recover-megatron {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
