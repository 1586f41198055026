"""Failure traces: when something fails, and which GPU goes. The same seed, the same trace.

fixed:seconds=1080          one every 18 minutes
fixed:steps=5               one every five iterations, in the middle of the gradient's reduction
exponential:mean=1080       mean time between failures of the whole machine, in seconds
weibull:mean=1080:shape=0.7
file:PATH                   a CSV with the columns time_s and gpu
none
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import gamma
from pathlib import Path

from recover_megatron.errors import ConfigError

_FIELDS = {
    "none": (),
    "fixed": ("seconds", "steps"),
    "exponential": ("mean",),
    "weibull": ("mean", "shape"),
}


@dataclass(frozen=True)
class Failure:
    """At `time_s`, or during the iteration number `iteration` (from 1), one GPU is lost."""

    gpu: int
    time_s: float | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class FailureTrace:
    """`mean_s` is the mean time between failures, None where it is not known beforehand."""

    kind: str
    mean_s: float | None
    steps: int | None = None
    shape: float = 1.0
    listed: tuple[Failure, ...] = ()

    def failures(self, gpus: int, seed: int) -> Iterator[Failure]:
        """Endless, but for a file and `none`; ascending in time."""
        draw = random.Random(seed)
        if self.kind in ("none", "file"):
            yield from self.listed
            return
        time_s, iteration = 0.0, 0
        while True:
            if self.steps is not None:
                iteration += self.steps
                yield Failure(draw.randrange(gpus), iteration=iteration)
                continue
            time_s += self._gap(draw)
            yield Failure(draw.randrange(gpus), time_s=time_s)

    def _gap(self, draw: random.Random) -> float:
        assert self.mean_s is not None
        if self.kind == "exponential":
            return draw.expovariate(1 / self.mean_s)
        if self.kind == "weibull":
            return draw.weibullvariate(self.mean_s / gamma(1 + 1 / self.shape), self.shape)
        return self.mean_s

    def scaled(self, factor: float) -> FailureTrace:
        """The same kind with `factor` times the mean time between failures."""
        mean_s = None if self.mean_s is None else self.mean_s * factor
        return FailureTrace(self.kind, mean_s, self.steps, self.shape, self.listed)


def parse_failures(text: str) -> FailureTrace:
    """Raises ConfigError naming what is wrong."""
    kind, *rest = text.split(":")
    if kind == "file":
        return _from_file(Path(text.partition(":")[2]))
    if kind not in _FIELDS:
        raise ConfigError(
            f"--failures: expected {', '.join(_FIELDS)} or file:PATH, got {kind!r}, such as "
            "exponential:mean=1080"
        )
    values: dict[str, float] = {}
    for word in rest:
        name, _, number = word.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            values[name] = 0.0
        if name not in _FIELDS[kind] or values[name] <= 0:
            raise ConfigError(f"--failures {text!r}: {word!r} is not one of " + _expected(kind))
    wanted = 0 if kind == "none" else 1 if kind == "fixed" else len(_FIELDS[kind])
    if len(values) != wanted:
        raise ConfigError(f"--failures {text!r}: give {_expected(kind)}")
    steps = int(values["steps"]) if "steps" in values else None
    return FailureTrace(
        kind, values.get("mean", values.get("seconds")), steps, values.get("shape", 1.0)
    )


def _expected(kind: str) -> str:
    return " or ".join(f"{name}=NUMBER (above 0)" for name in _FIELDS[kind]) or "nothing"


def _from_file(path: Path) -> FailureTrace:
    try:
        with path.open(newline="") as file:
            rows = [(float(row["time_s"]), int(row["gpu"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--failures file:{path}: expected a CSV with the columns time_s and gpu: {error!r}"
        ) from None
    if any(time_s < 0 or gpu < 0 for time_s, gpu in rows):
        raise ConfigError(f"--failures file:{path}: times and GPUs start from 0")
    return FailureTrace("file", None, listed=tuple(Failure(g, time_s=t) for t, g in sorted(rows)))
