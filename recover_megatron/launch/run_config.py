"""A run as a YAML file (configs/): script, replicas, environment and Megatron's flags."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover_megatron.errors import ConfigError

_KEYS = ("script", "replicas", "hosts", "environment", "flags")


@dataclass(frozen=True)
class RunConfig:
    """`flags` by Megatron's names, without dashes in front; true is a switch, false and null leave
    a flag out, a list is several words."""

    script: str
    flags: dict[str, Any]
    replicas: int | None = None
    hosts: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The script and its flags as a command line has them."""
        words = [self.script]
        for name, value in self.flags.items():
            if value is None or value is False:
                continue
            words.append(f"--{name}")
            if value is not True:
                words += [str(v) for v in (value if isinstance(value, list) else [value])]
        return words


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Raises ConfigError, naming the key, for what is no run. `overrides` are KEY=VALUE, of a key
    of the file or a flag; values are YAML."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("flags"), dict):
        raise ConfigError(f"--config {path}: expected the keys {', '.join(_KEYS)}, flags a mapping")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: expected KEY=VALUE")
        into = found if key in _KEYS else found["flags"]
        into[_name(key) if into is found["flags"] else key] = yaml.safe_load(value)
    for key in found:
        if key not in _KEYS:
            raise ConfigError(f"--config {path}: unknown key {key!r}{_nearest(key, _KEYS)}")
    if not isinstance(found.get("script"), str):
        raise ConfigError(f"--config {path}: script must name a training script")
    flags = {_name(str(k)): v for k, v in found["flags"].items()}
    environment = {str(k): str(v) for k, v in (found.get("environment") or {}).items()}
    script = os.path.expandvars(found["script"])
    return RunConfig(script, flags, found.get("replicas"), found.get("hosts"), environment)


def check_flags(config: RunConfig) -> None:
    """Raises ConfigError for a flag that neither the script's own Megatron nor --recover has, and
    for a switch with a value or a value without one."""
    known = known_flags(config.script)
    for name, value in config.flags.items():
        if f"--{name}" not in known:
            names = [flag[2:] for flag in known]
            raise ConfigError(f"flags: Megatron has no --{name}{_nearest(name, names)}")
        is_switch = isinstance(value, bool)
        if known[f"--{name}"] != is_switch and value is not None:
            raise ConfigError(
                f"flags: --{name} takes {'no value: true or false' if not is_switch else 'a value'}"
                f", got {value!r}"
            )


def known_flags(script: str) -> dict[str, bool]:
    """Every flag of the script's Megatron, and whether it is a switch. Asked of Megatron's own
    parser, in a process of its own: it imports torch."""
    command = [sys.executable, "-m", "recover_megatron.adapters.megatron.known_flags", script]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"cannot ask {script} for its flags: {last}")
    answer: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _name(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _nearest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
