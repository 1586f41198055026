"""How a run stands, told by its traces one event at a time. What `status` and `report` show."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover_megatron.trace import parse_events
from recover_megatron.workload.assignment import parse

_WINDOW = 20  # commits over which a speed is taken


@dataclass
class Loss:
    """One lost replica."""

    replica: int
    hosts: tuple[str, ...]
    iteration: int | None  # the last that was committed with it
    time: float
    repair_s: float
    cause: str


@dataclass
class Progress:
    """Feed it a run's events in any order within a rank; ask it at any time."""

    train_iters: int | None = None
    tokens_per_sample: int | None = None
    samples_per_microbatch: int | None = None
    policy: str = ""
    hosts: dict[tuple[int, int], str] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    commits: dict[int, tuple[float, int, tuple[int, ...]]] = field(default_factory=dict)
    lost: dict[int, Loss] = field(default_factory=dict)
    save_failures: int = 0
    exit_code: int | None = None
    _said: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def feed(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            handler = getattr(self, f"_on_{event.get('event')}", None)
            if handler is not None:
                handler(event)

    # --- what is asked -------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return max(self.commits, default=0)

    @property
    def started(self) -> tuple[int, ...]:
        return tuple(sorted({replica for replica, _ in self.hosts}))

    @property
    def ranks_per_replica(self) -> int:
        return 1 + max((position for _, position in self.hosts), default=0)

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(r for r in self.started if r not in self.lost)

    def tokens(self, iteration: int) -> int | None:
        """Committed by this iteration."""
        if self.tokens_per_sample is None or self.samples_per_microbatch is None:
            return None
        return self.commits[iteration][1] * self.samples_per_microbatch * self.tokens_per_sample

    @property
    def seconds_per_iteration(self) -> float | None:
        """Over the last commits; recoveries count."""
        known = sorted(self._recent)
        if len(known) < 2:
            return None
        took = self.commits[known[-1]][0] - self.commits[known[0]][0]
        return took / (known[-1] - known[0]) if known[-1] > known[0] else None

    @property
    def tokens_per_second(self) -> float | None:
        seconds, tokens = self.seconds_per_iteration, None
        if self.commits:
            tokens = self.tokens(self.iteration)
        return tokens / seconds if tokens and seconds else None

    @property
    def seconds_left(self) -> float | None:
        seconds = self.seconds_per_iteration
        if seconds is None or self.train_iters is None:
            return None
        return seconds * max(0, self.train_iters - self.iteration)

    # --- events --------------------------------------------------------------------------------

    def _on_started(self, e: dict[str, Any]) -> None:
        self.hosts[e["replica"], e["position"]] = e.get("host", "?")

    def _on_training(self, e: dict[str, Any]) -> None:
        self.train_iters = e["train_iters"]
        self.tokens_per_sample = e["tokens_per_sample"]
        self.samples_per_microbatch = e["samples_per_microbatch"]
        self.policy = e["policy"]

    def _on_committed(self, e: dict[str, Any]) -> None:
        iteration = e["iteration"]
        if iteration not in self.commits:
            self._recent.append(iteration)
            live = parse(e["assignment"]).replicas
            self.commits[iteration] = (e["time"], e["microbatches"], live)

    def _on_loss(self, e: dict[str, Any]) -> None:
        if "lm loss" in e["losses"]:
            self.losses[e["iteration"]] = e["losses"]["lm loss"]

    def _on_repaired(self, e: dict[str, Any]) -> None:
        for replica in e["replicas_lost"]:
            if replica not in self.lost:
                held = [i for i, (_, _, live) in self.commits.items() if replica in live]
                hosts = {h for (r, _), h in self.hosts.items() if r == replica}
                self.lost[replica] = Loss(
                    replica,
                    tuple(sorted(hosts)),
                    max(held, default=None),
                    e["time"],
                    e["repair_s"],
                    self._cause(replica),
                )

    def _on_fault(self, e: dict[str, Any]) -> None:
        self._says(e, f"injected: {e['fault']}")

    def _on_died(self, e: dict[str, Any]) -> None:
        self._says(e, str(e["reason"]))

    def _on_save_failed(self, e: dict[str, Any]) -> None:
        self.save_failures += 1

    def _on_finished(self, e: dict[str, Any]) -> None:
        self.exit_code = e["code"]

    def _says(self, e: dict[str, Any], text: str) -> None:
        self._said.setdefault(e["replica"], []).append((e["time"], text))
        if e["replica"] in self.lost:
            self.lost[e["replica"]].cause = self._cause(e["replica"])

    def _cause(self, replica: int) -> str:
        """The first of its ranks that said anything; a SIGKILL from outside says nothing, and the
        others then name it."""
        said = sorted(self._said.get(replica, []))
        return said[0][1].splitlines()[0] if said else "no last words (killed, or its host lost)"


class TraceTail:
    """Reads a run folder's traces, each line once."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new_events(self) -> list[dict[str, Any]]:
        """What was written since the last call, by time; a line that is not yet complete waits."""
        events: list[dict[str, Any]] = []
        for path in sorted(self._directory.glob("trace.r*.p*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            events += parse_events(whole.splitlines())
        return sorted(events, key=lambda e: float(e["time"]))
