"""Faults to inject, as data: the grammar of `--recover-inject`, parsed and printed. Pure.

    SPEC   = ITEM { "," ITEM }
    ITEM   = [ KIND ":" ] REPLICA "." POSITION "@" ITERATION ":" PHASE [ "." INDEX ]
           | "random:" FIELD { ":" FIELD }
    FIELD  = every=K | seed=S | count=N | phase=PHASE | kind=any (one of the first seven KINDs)
    KIND   = kill (SIGKILL) | raise (an exception) | leave (sys.exit) | exit (os._exit) | abort
           | segv | terminate (SIGTERM) | nan (one gradient value; phase gradient only)
           | hang (the training thread sleeps) | hold (it keeps Python's lock, too) | stop (SIGSTOP)
           | full (from now on no file may grow past 100,000 bytes, as if the disk were full)
    PHASE  = forward | backward | gradient | sync | commit | optimizer | repair

`2.0@7:sync.3` kills position 0 of replica 2 in iteration 7 (as Megatron logs it, from 1) in the
middle of the all-reduce of bucket 3; `forward.1` and `backward.1` mean that rank's second
microbatch of the iteration; `gradient` is when the K-th pass over microbatches is done (0, or 1 for
what a lost replica owed); `commit` is just before the agreement, `optimizer` inside
`optimizer.step()`, `save` and `evaluate` inside a checkpoint's save (by the replica that leads) and
an evaluation after the iteration, `repair` when the rank starts to repair another replica's loss.
`random:seed=1:every=5:count=4` loses one replica in each of the first four intervals of five
iterations, the iteration inside the interval, replica, position, phase and index drawn from the
seed (the paper's schedule, section 5).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from recover_megatron.errors import ConfigError
from recover_megatron.world import ReplicaLayout

PHASES = (
    *("forward", "backward", "gradient", "sync", "commit"),
    *("optimizer", "save", "evaluate", "repair"),
)
INDEXED_PHASES = ("forward", "backward", "gradient", "sync")
HANGS = ("hang", "hold", "stop")
# Ways for a process to end.
ENDS = ("kill", "raise", "leave", "exit", "abort", "segv", "terminate")
KINDS = (*ENDS, "nan", "full", *HANGS)
# Where no peer is waited for.
HANG_PHASES = ("forward", "backward", "optimizer", "save", "evaluate")
RANDOM_PHASES = ("forward", "backward", "sync", "commit", "optimizer")

_ITEM = re.compile(
    r"(?:(?P<kind>\w+):)?(?P<replica>\d+)\.(?P<position>\d+)@(?P<iteration>\d+)"
    r":(?P<phase>[a-z]+)(?:\.(?P<index>\d+))?"
)


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` happens to `position` of `replica` in `phase` of `iteration` (from 1)."""

    kind: str
    replica: int
    position: int
    iteration: int
    phase: str
    index: int = 0

    def __str__(self) -> str:
        where = f"{self.replica}.{self.position}@{self.iteration}"
        index = f".{self.index}" if self.phase in INDEXED_PHASES else ""
        return f"{self.kind}:{where}:{self.phase}{index}"


def parse_faults(spec: str, layout: ReplicaLayout) -> tuple[Fault, ...]:
    """The faults of `spec` for a job of `layout`; the same at every rank.

    Raises ConfigError naming the part that is wrong: grammar, kind, phase, or a replica, position
    or iteration that the job does not have.
    """
    faults: list[Fault] = []
    for item in filter(None, (part.strip() for part in spec.split(","))):
        faults.extend(
            _random(item, layout) if item.startswith("random:") else _single(item, layout)
        )
    lost = {fault.replica for fault in faults if fault.kind != "full"}
    if len(lost) >= layout.replicas:
        raise ConfigError(
            f"--recover-inject {spec!r} would lose all {layout.replicas} replicas; leave one alive"
        )
    return tuple(sorted(faults, key=lambda f: (f.iteration, f.replica, f.position)))


def _single(item: str, layout: ReplicaLayout) -> Iterator[Fault]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ConfigError(
            f"--recover-inject: cannot read {item!r}; expected [KIND:]REPLICA.POSITION@"
            f"ITERATION:PHASE[.INDEX] such as 1.0@3:sync.2, or random:seed=1:every=5:count=2"
        )
    replica, position, iteration = (int(match[k]) for k in ("replica", "position", "iteration"))
    kind, phase = match["kind"] or "kill", match["phase"]
    _expect(kind in KINDS, item, f"kind {kind!r} is not one of {', '.join(KINDS)}")
    _expect(phase in PHASES, item, f"phase {phase!r} is not one of {', '.join(PHASES)}")
    _expect(
        kind not in HANGS or phase in HANG_PHASES,
        item,
        f"a {kind} in {phase!r} would not be found; use {' or '.join(HANG_PHASES)}",
    )
    _expect(kind != "nan" or phase == "gradient", item, "only a gradient can become nan")
    _expect(
        match["index"] is None or phase in INDEXED_PHASES,
        item,
        f"phase {phase!r} takes no index; only {', '.join(INDEXED_PHASES)} do",
    )
    _expect(
        replica < layout.replicas, item, f"replica {replica} is not in 0..{layout.replicas - 1}"
    )
    _expect(
        position < layout.ranks_per_replica,
        item,
        f"position {position} is not in 0..{layout.ranks_per_replica - 1}",
    )
    _expect(iteration >= 1, item, "iterations count from 1")
    yield Fault(kind, replica, position, iteration, phase, int(match["index"] or 0))


def _random(item: str, layout: ReplicaLayout) -> Iterator[Fault]:
    fields = {"every": 5, "seed": 0, "count": 1}
    phases: tuple[str, ...] = RANDOM_PHASES
    kinds: tuple[str, ...] = ("kill",)
    for field in item.split(":")[1:]:
        name, equals, value = field.partition("=")
        if name == "phase":
            _expect(value in RANDOM_PHASES, item, f"phase {value!r} is not one of {RANDOM_PHASES}")
            phases = (value,)
            continue
        if name == "kind":
            _expect(value == "any", item, f"kind {value!r} is not any")
            kinds = ENDS
            continue
        _expect(
            bool(equals) and name in fields and value.isdigit(),
            item,
            f"field {field!r} is not every=K, seed=S, count=N, phase=PHASE or kind=any",
        )
        fields[name] = int(value)
    _expect(fields["every"] >= 1, item, "every must be at least 1")
    _expect(
        fields["count"] < layout.replicas,
        item,
        f"count {fields['count']} must leave one of {layout.replicas} replicas alive",
    )
    draw = random.Random(fields["seed"])
    victims = draw.sample(range(layout.replicas), fields["count"])
    for interval, replica in enumerate(victims):
        position = draw.randrange(layout.ranks_per_replica)
        iteration = 1 + interval * fields["every"] + draw.randrange(fields["every"])
        phase = draw.choice(phases)
        index = draw.randrange(4) if phase in INDEXED_PHASES else 0
        kind = draw.choice(kinds) if len(kinds) > 1 else kinds[0]
        yield Fault(kind, replica, position, iteration, phase, index)


def _expect(true: bool, item: str, found: str) -> None:
    if not true:
        raise ConfigError(f"--recover-inject: in {item!r}, {found}")
