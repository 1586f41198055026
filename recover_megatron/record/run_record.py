"""A run, told by its traces one event at a time: the one model that all who ask about runs share.

`status`, `report`, `compare`, the launcher's stall report and its verdict feed it and ask it. What
needs every event (which samples were read, which invariants were broken) is in audit.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.events import (
    Committed,
    Computed,
    Died,
    Event,
    FaultInjected,
    Fetched,
    Finished,
    Loss,
    Parameters,
    Place,
    Repaired,
    Rescued,
    SaveFailed,
    Started,
    SyncFailed,
    Training,
)
from recover_megatron.trace import parse_events, read_traces
from recover_megatron.workload.assignment import Assignment, parse

_WINDOW = 20  # commits over which a speed is taken
# Events by which one sees how far a rank has come.
_TELLING = (Started, Committed, Loss, Parameters, Fetched, Computed, SyncFailed, Repaired)


@dataclass(frozen=True)
class Commit:
    """One iteration, as the lowest rank that traced it saw it."""

    time: float
    microbatches: int
    assignment: Assignment
    place: Place

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.assignment.replicas


@dataclass
class LostReplica:
    """A replica that a repair has left out. `iteration` is the last that was committed with it."""

    replica: int
    hosts: tuple[str, ...]
    iteration: int | None
    time: float
    repair_s: float
    cause: str


class RunRecord:
    """Feed it a run's events, those of one rank in their order; ask it at any time."""

    def __init__(self) -> None:
        self.training = Training()
        self.started: dict[Place, Started] = {}
        self.commits: dict[int, Commit] = {}  # by iteration
        self.iteration = 0  # the last that was committed; 0 for none
        self.losses: dict[int, float] = {}  # "lm loss" by iteration; all ranks traced the same
        self.lost: dict[int, LostReplica] = {}
        self.deaths: list[Died] = []
        self.finished: dict[Place, Finished] = {}
        self.rescued: Rescued | None = None
        self.save_failures = 0
        self.last: dict[Place, Event] = {}  # what each rank traced last of what tells how far it is
        self.last_committers: set[int] = set()  # replicas that traced the last committed iteration
        self._said: dict[int, list[tuple[float, str]]] = {}
        self._recent: deque[int] = deque(maxlen=_WINDOW)

    @classmethod
    def read(cls, directory: str | Path) -> RunRecord:
        """Of all that a run has traced so far."""
        record = cls()
        record.feed(sorted(read_traces(directory), key=lambda event: event.time))
        return record

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, _TELLING):
                self.last[event.place] = event
            match event:
                case Started():
                    self.started[event.place] = event
                case Training():
                    self.training = event
                case Committed():
                    self._commit(event)
                case Loss():
                    if "lm loss" in event.losses:
                        self.losses[event.iteration] = event.losses["lm loss"]
                case Repaired():
                    self._lose(event)
                case FaultInjected():
                    self._says(event, f"injected: {event.fault}")
                case Died():
                    self.deaths.append(event)
                    self._says(event, event.reason)
                case SaveFailed():
                    self.save_failures += 1
                case Rescued():
                    self.rescued = event
                case Finished():
                    self.finished[event.place] = event

    # --- what is asked -------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[int, ...]:
        """With which the run started."""
        return tuple(sorted({replica for replica, _ in self.started}))

    @property
    def ranks_per_replica(self) -> int:
        return 1 + max((position for _, position in self.started), default=0)

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(r for r in self.replicas if r not in self.lost)

    @property
    def survivors(self) -> list[int]:
        """The replicas that reached the end, all of whose ranks say so."""
        whole = range(self.ranks_per_replica)
        return [r for r in self.replicas if all((r, p) in self.finished for p in whole)]

    @property
    def exit_code(self) -> int | None:
        """As any rank traced it; None if none has ended in order yet."""
        return next((event.code for event in self.finished.values()), None)

    def tokens(self, iteration: int) -> int | None:
        """Committed by this iteration; None where that was not traced."""
        training = self.training
        if training.tokens_per_sample is None or training.samples_per_microbatch is None:
            return None
        samples = self.commits[iteration].microbatches * training.samples_per_microbatch
        return samples * training.tokens_per_sample

    def seconds(self, iteration: int) -> float | None:
        """From the commit before to this one, recovery included; the first has no predecessor."""
        if iteration not in self.commits or iteration - 1 not in self.commits:
            return None
        return self.commits[iteration].time - self.commits[iteration - 1].time

    def tokens_per_second(self, tokens_per_iteration: int = 0) -> dict[int, float]:
        """By iteration. The number of tokens is the traced one unless it is given; without either
        it is empty."""
        rates = {}
        for iteration in sorted(self.commits):
            tokens = tokens_per_iteration or self.tokens(iteration)
            seconds = self.seconds(iteration)
            if tokens and seconds is not None:
                rates[iteration] = tokens / max(1e-9, seconds)
        return rates

    @property
    def seconds_per_iteration(self) -> float | None:
        """Over the last commits; recoveries count."""
        known = sorted(self._recent)
        if len(known) < 2:
            return None
        took = self.commits[known[-1]].time - self.commits[known[0]].time
        return took / (known[-1] - known[0]) if known[-1] > known[0] else None

    @property
    def present_tokens_per_second(self) -> float | None:
        """As `seconds_per_iteration`."""
        seconds, tokens = self.seconds_per_iteration, None
        if self.commits:
            tokens = self.tokens(self.iteration)
        return tokens / seconds if tokens and seconds else None

    @property
    def seconds_left(self) -> float | None:
        seconds, last = self.seconds_per_iteration, self.training.train_iters
        return None if seconds is None or last is None else seconds * max(0, last - self.iteration)

    # --- events --------------------------------------------------------------------------------

    def _commit(self, event: Committed) -> None:
        iteration = event.iteration
        if iteration > self.iteration:
            self.iteration = iteration
            self.last_committers = set()
        if iteration == self.iteration:
            self.last_committers.add(event.replica)
        known = self.commits.get(iteration)
        if known is None:
            self._recent.append(iteration)
        if known is None or event.place < known.place:
            assignment = parse(event.assignment)
            commit = Commit(event.time, event.microbatches, assignment, event.place)
            self.commits[iteration] = commit

    def _lose(self, event: Repaired) -> None:
        for replica in event.replicas_lost:
            if replica not in self.lost:
                held = [i for i, commit in self.commits.items() if replica in commit.replicas]
                hosts = {s.host for (r, _), s in self.started.items() if r == replica}
                self.lost[replica] = LostReplica(
                    replica=replica,
                    hosts=tuple(sorted(hosts)),
                    iteration=max(held, default=None),
                    time=event.time,
                    repair_s=event.repair_s,
                    cause=self._cause(replica),
                )

    def _says(self, event: Event, text: str) -> None:
        self._said.setdefault(event.replica, []).append((event.time, text))
        if event.replica in self.lost:
            self.lost[event.replica].cause = self._cause(event.replica)

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

    def new_events(self) -> list[Event]:
        """What was written since the last call, by time; a line that is not yet complete waits."""
        events: list[Event] = []
        for path in sorted(self._directory.glob("trace.r*.p*.jsonl")):
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    text = file.read()
            except OSError:  # it has just been moved away, or cannot be read now
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            events += parse_events(whole.splitlines())
        return sorted(events, key=lambda event: event.time)


def has_committed(directory: str | Path) -> bool:
    """Whether a run has committed any iteration so far; reads no more than it must."""
    return any(isinstance(event, Committed) for event in read_traces(directory))
