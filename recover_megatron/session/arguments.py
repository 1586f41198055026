"""The `--recover*` flags: an argparse group made from the fields of RecoveryConfig, for any host
framework's parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING
from typing import NoReturn

from recover_megatron.config import RecoveryConfig, flag_fields, flag_name
from recover_megatron.errors import ConfigError

TRACE_FLAG = flag_name("trace_dir")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing a usage page and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_recovery_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Append the `--recover*` group to a framework's own parser; returns the parser."""
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


def wants_recovery(argv: Sequence[str]) -> bool:
    return "--recover" in argv


def take_flag(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of `flag`, given as `--flag value` or `--flag=value`, the last one if there are
    several, None if there is none; and the other words. Raises ConfigError if it has no value."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    found, rest = parser.parse_known_args(list(words))
    return found.value, rest
