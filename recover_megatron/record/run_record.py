"""What a run's traces say happened: losses, samples, commits, recoveries, and broken invariants."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recover_megatron.trace import read_traces
from recover_megatron.workload.assignment import Assignment, parse

Event = dict[str, Any]


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


class RunRecord:
    """Reads a run folder's traces once."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.events: list[Event] = sorted(read_traces(directory), key=lambda e: e["time"])
        if not self.events:
            raise ValueError(f"{directory} holds no traces; was it run with --recover-trace-dir?")

    def of(self, *kinds: str) -> list[Event]:
        return [e for e in self.events if e["event"] in kinds]

    @cached_property
    def finished(self) -> list[Event]:
        return self.of("finished")

    @property
    def survivors(self) -> list[int]:
        """The replicas that reached the end, all of whose ranks say so."""
        ended = Counter(e["replica"] for e in self.finished)
        per_replica = 1 + max(e["position"] for e in self.of("started"))
        return sorted(r for r, n in ended.items() if n == per_replica)

    @property
    def replicas_start(self) -> int:
        return len({e["replica"] for e in self.of("started")})

    @cached_property
    def losses(self) -> dict[int, float]:
        """ "lm loss" by iteration; every live replica traced the same number."""
        return {e["iteration"]: e["losses"]["lm loss"] for e in self.of("loss")}

    @cached_property
    def commits(self) -> dict[int, Event]:
        """By iteration, as the lowest replica that traced it saw it."""
        found: dict[int, Event] = {}
        for e in self.of("committed"):
            best = found.get(e["iteration"])
            if best is None or (e["replica"], e["position"]) < (best["replica"], best["position"]):
                found[e["iteration"]] = e
        return dict(sorted(found.items()))

    def assignment(self, iteration: int) -> Assignment:
        return parse(self.commits[iteration]["assignment"])

    @cached_property
    def samples(self) -> dict[int, tuple[int, ...]]:
        """Dataset indices whose gradients each iteration committed, as they were really fetched."""
        # Every rank that reads data says so: the ends of the pipeline read the same samples, the
        # data-parallel ranks inside a replica different ones. A replica reads in its share's order.
        fetched: dict[tuple[int, int], dict[int, list[list[int]]]] = defaultdict(dict)
        for e in self.of("fetched"):
            if None not in e["samples"]:
                by_position = fetched[e["iteration"], e["replica"]]
                by_position.setdefault(e["position"], []).extend(e["samples"])
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
        witness = min(self.survivors)
        repaired = [
            e for e in self.of("repaired") if e["replica"] == witness and e["position"] == 0
        ]
        return [self._recovery(e) for e in repaired]

    def _recovery(self, repaired: Event) -> Recovery:
        lost, epoch = repaired["replicas_lost"], repaired["world_epoch"]
        faults = [e for e in self.of("fault") if e["replica"] in lost]
        began = faults[0]["time"] if faults else None
        noticed = [
            e["time"]
            for e in self.of("peer_failed", "sync_failed")
            if began is not None and e["time"] >= began and e["replica"] not in lost
        ]
        iteration = repaired["iteration"]
        again = [
            e
            for e in self.of("computed")
            if e["world_epoch"] == epoch and e["iteration"] == iteration and e["position"] == 0
        ]
        commit = self.commits.get(iteration) if iteration is not None else None
        return Recovery(
            iteration=iteration,
            phase=faults[0]["phase"] if faults else None,
            replicas_lost=lost,
            detect_s=min(noticed) - began if noticed and began is not None else None,
            repair_s=repaired["repair_s"],
            redo_s=commit["time"] - repaired["time"] if commit else None,
            reassigned_microbatches=sum(len(e["microbatches"]) for e in again),
            live_microbatches_recomputed=self._recomputed(iteration),
        )

    def _recomputed(self, iteration: int | None) -> int:
        """Microbatches of an iteration computed again although a live replica held them."""
        if iteration is None or iteration not in self.commits:
            return 0
        live = self.assignment(iteration).replicas
        times: Counter[int] = Counter()
        for e in self.of("computed"):
            if e["iteration"] == iteration and e["position"] == 0 and e["replica"] in live:
                times.update(e["microbatches"])  # what was withheld has no id
        return sum(n - 1 for n in times.values())

    def violations(self, iterations: int, microbatches: int | Mapping[int, int]) -> list[str]:
        """Which of the design's invariants I1 to I5 this run broke, in words; empty if none.
        `microbatches` is B, by iteration where it changes (batch-size ramp-up)."""
        broken: list[str] = []
        if sorted(self.commits) != list(range(1, iterations + 1)):
            broken.append(f"I4: committed iterations {sorted(self.commits)}, not 1..{iterations}")
        if not self.survivors:
            broken.append("I4: no replica reached the end")
        for e in self.of("committed"):
            due = microbatches
            if not isinstance(due, int):
                due = due[e["iteration"]]
            if e["microbatches"] != due:
                broken.append(f"I1: {_where(e)} committed {e['microbatches']}, not {due}")
            if e["bucket_epochs"] != [e["world_epoch"]]:
                broken.append(f"I3: {_where(e)} mixed world epochs {e['bucket_epochs']}")
        broken += self._disagreements("committed", "assignment", "iteration", "I1")
        broken += self._disagreements("repaired", "replicas", "world_epoch", "I5")
        broken += self._parameter_differences()
        for recovery in self.recoveries:
            if recovery.live_microbatches_recomputed:
                broken.append(f"live microbatches were computed again: {recovery}")
        return broken

    def _disagreements(self, kind: str, fact: str, key: str, name: str) -> list[str]:
        """All ranks that traced the same thing must have traced the same value."""
        seen: dict[Any, set[str]] = defaultdict(set)
        for e in self.of(kind):
            if kind != "repaired" or e["replica"] in self.survivors:
                seen[e[key]].add(str(e[fact]))
        return [
            f"{name}: ranks disagree on {fact} of {key} {at}: {sorted(values)}"
            for at, values in seen.items()
            if len(values) > 1
        ]

    def _parameter_differences(self) -> list[str]:
        prints: dict[tuple[int, int], set[str]] = defaultdict(set)
        for e in self.of("parameters"):
            prints[e["iteration"], e["position"]].add(e["fingerprint"])
        return [
            f"I2: parameters of position {p} differ after iteration {i}"
            for (i, p), found in prints.items()
            if len(found) > 1
        ]

    @property
    def parameters_bitwise_equal(self) -> bool | None:
        """None if the run never compared them (--recover-check-replicas-interval)."""
        return not self._parameter_differences() if self.of("parameters") else None


def _samples_at(place: int, by_position: dict[int, list[list[int]]]) -> set[int]:
    """What a replica's ranks read for the microbatch at `place` of its share; {-1} if nothing."""
    read = [
        microbatches[place] for microbatches in by_position.values() if place < len(microbatches)
    ]
    return set().union(*read) if read else {-1}


def _where(event: Event) -> str:
    return f"iteration {event['iteration']} at replica {event['replica']}.{event['position']}"


def last_iteration(directory: str | Path) -> int:
    """The last that a run has committed so far; 0 for none."""
    committed = (e["iteration"] for e in read_traces(directory) if e["event"] == "committed")
    return max(committed, default=0)


def missing_samples(samples: Iterable[int]) -> bool:
    """True if a committed microbatch has no record of what was fetched for it."""
    return any(sample < 0 for sample in samples)
