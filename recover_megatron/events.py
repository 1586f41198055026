"""What a rank traces: one frozen dataclass for each kind of event. Standard library only.

An event prints as one line of JSON (`to_line`) and is parsed from it (`parse_line`). Who makes an
event gives its facts; time and place are added when it is traced (trace.py).
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

Place = tuple[int, int]  # (replica, position)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all. `time` is in Unix seconds; `replica` and `position` are those of the rank."""

    KIND: ClassVar[str] = ""

    time: float = 0.0
    replica: int = -1
    position: int = -1

    @property
    def place(self) -> Place:
        return self.replica, self.position


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The rank has met all others; `ranks` is how many there are."""

    KIND = "started"
    host: str = "?"
    pid: int = 0
    ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class Training(Event):
    """Once, before the first iteration: what does not change."""

    KIND = "training"
    train_iters: int | None = None
    tokens_per_sample: int | None = None
    samples_per_microbatch: int | None = None
    policy: str = ""


@dataclass(frozen=True, kw_only=True)
class Fetched(Event):
    """`samples`: the dataset indices read, by microbatch; None where this rank reads no data. A
    microbatch of -1 is to be withheld."""

    KIND = "fetched"
    iteration: int
    microbatches: tuple[int, ...] = ()
    samples: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Computed(Event):
    """The gradient of `microbatches` is in the local buckets; under `versatile` also the sizes of
    parts `withheld`, and how many were `promoted`."""

    KIND = "computed"
    iteration: int
    world_epoch: int = 0
    microbatches: tuple[int, ...] = ()
    promoted: int = 0
    withheld: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FaultInjected(Event):
    """A fault of --recover-inject strikes; `fault` is its item."""

    KIND = "fault"
    iteration: int
    phase: str = ""
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class PeerFailed(Event):
    """This rank's MPI knows these ranks of the initial world to be dead."""

    KIND = "peer_failed"
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SyncFailed(Event):
    """A collective reported a lost peer: the all-reduce of a bucket, or what has that name."""

    KIND = "sync_failed"
    iteration: int | None = None
    bucket: int | str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Repaired(Event):
    """All live ranks have agreed on a new world. `repair_s` is in seconds."""

    KIND = "repaired"
    iteration: int | None = None
    world_epoch: int
    replicas: tuple[int, ...]
    replicas_lost: tuple[int, ...]
    repair_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Batch(Event):
    """All live ranks have agreed to commit a batch. `assignment` says who computed what;
    `bucket_epochs` under which world epochs the buckets were reduced."""

    world_epoch: int = 0
    assignment: str = ""
    microbatches: int = 0
    bucket_epochs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluated(_Batch):
    """A batch of an evaluation."""

    KIND = "evaluated"


@dataclass(frozen=True, kw_only=True)
class Committed(_Batch):
    """The batch of an iteration."""

    KIND = "committed"
    iteration: int


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A checkpoint could not be saved; training goes on."""

    KIND = "save_failed"
    iteration: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Loss(Event):
    """The losses of the whole batch, by name; traced by the last pipeline stage."""

    KIND = "loss"
    iteration: int
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Parameters(Event):
    """`fingerprint` of this rank's parameters, which was compared across replicas."""

    KIND = "parameters"
    iteration: int
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """An iteration that the user leaves out."""

    KIND = "skipped"
    iteration: int


@dataclass(frozen=True, kw_only=True)
class Rescued(Event):
    """The last replica, which an exception has ended, saved what it held, in the folder `save`."""

    KIND = "rescued"
    iteration: int
    save: str = ""


@dataclass(frozen=True, kw_only=True)
class Died(Event):
    """Why a rank ends itself, or what its watchdog saw of its end. For an exception also its type,
    where it was raised (file:line), and the last iteration that had begun."""

    KIND = "died"
    reason: str
    exception: str | None = None
    where: str | None = None
    iteration: int | None = None


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The rank ends in order, with the job's exit `code` and the `replicas` that are left."""

    KIND = "finished"
    code: int
    replicas: tuple[int, ...] = ()


KINDS: dict[str, type[Event]] = {
    kind.KIND: kind
    for kind in (
        *(Started, Training, Fetched, Computed, FaultInjected, PeerFailed, SyncFailed, Repaired),
        *(Evaluated, Committed, SaveFailed, Loss, Parameters, Skipped, Rescued, Died, Finished),
    )
}


def to_line(event: Event) -> str:
    """JSON, with a newline; a value of None that is the default is left out."""
    facts: dict[str, Any] = {"time": event.time, "event": event.KIND}
    facts |= {"replica": event.replica, "position": event.position}
    for each in fields(event):
        value = getattr(event, each.name)
        if value is not None or each.default is MISSING:
            facts.setdefault(each.name, value)
    return json.dumps(facts) + "\n"


def parse_line(line: str | bytes) -> Event | None:
    """The inverse of `to_line`. None for what is no event: a line cut short by a kill, or of
    another version. Facts that this version does not know are left out."""
    try:
        found = json.loads(line)
    except ValueError:  # also of bytes that are no text
        return None
    kind = KINDS.get(str(found.get("event"))) if isinstance(found, dict) else None
    if kind is None:
        return None
    known = {each.name for each in fields(kind)}
    try:
        return kind(**{name: _frozen(v) for name, v in found.items() if name in known})
    except TypeError:
        return None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
