"""What a finished run's traces prove: samples, recoveries, and which invariants were broken."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from recover_megatron.events import (
    Committed,
    Computed,
    Event,
    FaultInjected,
    Fetched,
    Parameters,
    PeerFailed,
    Repaired,
    SyncFailed,
)
from recover_megatron.record.run_record import RunRecord
from recover_megatron.trace import read_traces
from recover_megatron.workload.assignment import Assignment

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Recovery:
    """One membership change. Times in seconds, None where the cause left no trace."""

    iteration: int | None
    phase: str | None  # in which the fault was injected
    replicas_lost: list[int]
    detect_s: float | None  # fault to the first survivor that noticed it
    repair_s: float  # noticed by the training thread to an agreed new world
    redo_s: float | None  # new world to commit: what was owed is computed and all reduced again
    reassigned_microbatches: int
    live_microbatches_recomputed: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class AuditedRun(RunRecord):
    """A run folder's traces, read once and kept whole.

    Raises ValueError for a folder that holds none.
    """

    def __init__(self, directory: str | Path):
        super().__init__()
        self.directory = Path(directory)
        self.events: list[Event] = sorted(read_traces(directory), key=lambda event: event.time)
        if not self.events:
            raise ValueError(f"{directory} holds no traces; was it run with --recover-trace-dir?")
        self.feed(self.events)
        self.commits = dict(sorted(self.commits.items()))

    def of(self, *kinds: type[E]) -> list[E]:
        """The events of these kinds, by time."""
        return cast(list[E], [event for event in self.events if isinstance(event, kinds)])

    def assignment(self, iteration: int) -> Assignment:
        return self.commits[iteration].assignment

    @cached_property
    def samples(self) -> dict[int, tuple[int, ...]]:
        """Dataset indices whose gradients each iteration committed, as they were really fetched."""
        # Every rank that reads data says so: the ends of the pipeline read the same samples, the
        # data-parallel ranks inside a replica different ones. A replica reads in its share's order.
        fetched: dict[tuple[int, int], dict[int, list[tuple[int, ...]]]] = defaultdict(dict)
        for e in self.of(Fetched):
            read = [samples for samples in e.samples if samples is not None]
            if len(read) == len(e.samples):
                by_position = fetched[e.iteration, e.replica]
                by_position.setdefault(e.position, []).extend(read)
        return {
            iteration: tuple(
                sorted(
                    sample
                    for replica, ids in self.assignment(iteration).shares
                    for place in range(len(ids))
                    for sample in _samples_at(place, fetched[iteration, replica])
                )
            )
            for iteration in self.commits
        }

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """Membership changes as the lowest survivor saw them."""
        if not self.survivors:
            return []
        witness = (min(self.survivors), 0)
        return [self._recovery(e) for e in self.of(Repaired) if e.place == witness]

    def _recovery(self, repaired: Repaired) -> Recovery:
        lost, iteration = repaired.replicas_lost, repaired.iteration
        faults = [e for e in self.of(FaultInjected) if e.replica in lost]
        began = faults[0].time if faults else None
        noticed = [e.time for e in self.of(PeerFailed, SyncFailed) if e.replica not in lost]
        after = [] if began is None else [time - began for time in noticed if time >= began]
        again = [
            e
            for e in self.of(Computed)
            if (e.world_epoch, e.iteration, e.position) == (repaired.world_epoch, iteration, 0)
        ]
        commit = self.commits.get(iteration) if iteration is not None else None
        return Recovery(
            iteration=iteration,
            phase=faults[0].phase if faults else None,
            replicas_lost=list(lost),
            detect_s=min(after, default=None),
            repair_s=repaired.repair_s,
            redo_s=commit.time - repaired.time if commit else None,
            reassigned_microbatches=sum(len(e.microbatches) for e in again),
            live_microbatches_recomputed=self._recomputed(iteration),
        )

    def _recomputed(self, iteration: int | None) -> int:
        """Microbatches of an iteration computed again although a live replica held them."""
        if iteration is None or iteration not in self.commits:
            return 0
        live = self.assignment(iteration).replicas
        times: Counter[int] = Counter()
        for e in self.of(Computed):
            if e.iteration == iteration and e.position == 0 and e.replica in live:
                times.update(e.microbatches)  # what was withheld has no id
        return sum(n - 1 for n in times.values())

    def violations(self, iterations: int, microbatches: int | Mapping[int, int]) -> list[str]:
        """Which of the design's invariants I1 to I5 this run broke, in words; empty if none.
        `microbatches` is B, by iteration where it changes (batch-size ramp-up)."""
        broken: list[str] = []
        if sorted(self.commits) != list(range(1, iterations + 1)):
            broken.append(f"I4: committed iterations {sorted(self.commits)}, not 1..{iterations}")
        if not self.survivors:
            broken.append("I4: no replica reached the end")
        commits, survivors = self.of(Committed), set(self.survivors)
        for e in commits:
            due = microbatches if isinstance(microbatches, int) else microbatches[e.iteration]
            if e.microbatches != due:
                broken.append(f"I1: {_where(e)} committed {e.microbatches}, not {due}")
            if e.bucket_epochs != (e.world_epoch,):
                broken.append(f"I3: {_where(e)} mixed world epochs {e.bucket_epochs}")
        assigned = ((f"assignment of iteration {e.iteration}", e.assignment) for e in commits)
        broken += _disagreements("I1", assigned)
        repairs = (e for e in self.of(Repaired) if e.replica in survivors)
        worlds = ((f"replicas of world_epoch {e.world_epoch}", str(e.replicas)) for e in repairs)
        broken += _disagreements("I5", worlds)
        broken += self._parameter_differences()
        for recovery in self.recoveries:
            if recovery.live_microbatches_recomputed:
                broken.append(f"live microbatches were computed again: {recovery}")
        return broken

    def _parameter_differences(self) -> list[str]:
        prints: dict[tuple[int, int], set[str]] = defaultdict(set)
        for e in self.of(Parameters):
            prints[e.iteration, e.position].add(e.fingerprint)
        return [
            f"I2: parameters of position {p} differ after iteration {i}"
            for (i, p), found in prints.items()
            if len(found) > 1
        ]

    @property
    def parameters_bitwise_equal(self) -> bool | None:
        """None if the run never compared them (--recover-check-replicas-interval)."""
        return not self._parameter_differences() if self.of(Parameters) else None


def _disagreements(name: str, facts: Iterable[tuple[str, str]]) -> list[str]:
    """All ranks that traced the same thing must have traced the same value."""
    seen: dict[str, set[str]] = defaultdict(set)
    for what, value in facts:
        seen[what].add(value)
    return [
        f"{name}: ranks disagree on {what}: {sorted(values)}"
        for what, values in seen.items()
        if len(values) > 1
    ]


def _samples_at(place: int, by_position: dict[int, list[tuple[int, ...]]]) -> set[int]:
    """What a replica's ranks read for the microbatch at `place` of its share; {-1} if nothing."""
    read = [
        microbatches[place] for microbatches in by_position.values() if place < len(microbatches)
    ]
    return set().union(*read) if read else {-1}


def _where(event: Committed) -> str:
    return f"iteration {event.iteration} at replica {event.replica}.{event.position}"


def missing_samples(samples: Iterable[int]) -> bool:
    """True if a committed microbatch has no record of what was fetched for it."""
    return any(sample < 0 for sample in samples)
