"""Membership and fabric without MPI: all ranks in one process, and a seed decides.

It behaves as badly as ULFM may: a collective that loses a member returns at some ranks and fails at
others, delivers garbage, or leaves ranks waiting until somebody revokes; a shrunk world may hold a
rank that has just died; mates of a dead rank die one by one. Every rank is a thread, but only the
hub decides, and only when all live ranks are blocked in a call, so a seed replays exactly.
"""

from __future__ import annotations

import functools
import operator
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from recover_megatron.collectives.fabric.interface import Array, check_pair
from recover_megatron.errors import InvariantViolation, ReplicaLost
from recover_megatron.world import ReplicaLayout

_COMBINE = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class Killed(BaseException):
    """Unwinds the thread of a rank that has died."""


@dataclass(frozen=True)
class Death:
    """A rank dies at its `call`-th call (from 0): before it takes part, or inside, having taken
    part. (Dying after a call is dying before the next one.) No peer has proof of a `silent` death:
    for them it is as if the rank were out of reach behind a partition."""

    call: int
    inside: bool
    silent: bool = False


@dataclass
class _Group:
    """A communicator: members are initial ranks."""

    members: tuple[int, ...]
    revoked: bool = False
    broken: bool = False  # a collective lost a member: who is in it now waits for a revoke
    parts: dict[int, _Group] = field(default_factory=dict)  # position groups split off it


@dataclass
class _Call:
    rank: int
    kind: str
    group: _Group | None
    payload: Any
    outcome: Any = None  # a value, or an exception to raise
    done: bool = False
    wake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class ScriptedJob:
    """Runs one function per rank over scripted calls and keeps a transcript.

    `deaths` says who is killed; `seed` decides everything else. With `vanish_together` the mates of
    a dead rank die at once, else one by one.
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        deaths: Mapping[int, Death],
        seed: int,
        vanish_together: bool = False,
    ):
        self.layout = layout
        self.transcript: list[str] = []
        self._deaths = dict(deaths)
        self._random = random.Random(seed)
        self._vanish_together = vanish_together
        self._lock = threading.Lock()
        self._said: list[tuple[int, str]] = []
        self._waiting: dict[int, _Call] = {}
        self._calls: dict[int, int] = dict.fromkeys(range(layout.ranks), 0)
        self._running: set[int] = set(range(layout.ranks))
        self._dead: set[int] = set()
        self._finished: set[int] = set()
        self._last_words: dict[int, _Call] = {}  # the calls that ranks died inside
        everyone = tuple(range(layout.ranks))
        self._world: dict[int, _Group] = dict.fromkeys(everyone, _Group(everyone))
        self._group: dict[int, _Group | None] = dict.fromkeys(everyone, None)

    # --- running -------------------------------------------------------------------------------

    def run(self, body: Callable[[ScriptedMembership, ScriptedFabric], Any]) -> dict[int, Any]:
        """`body(membership, fabric)` in every rank; the results of those that reached its end.

        Raises the first exception of a rank that is not its death, with the transcript.
        """
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def rank_main(rank: int) -> None:
            try:
                results[rank] = body(ScriptedMembership(self, rank), ScriptedFabric(self, rank))
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001  handed to the caller below
                errors.append(error)
            with self._lock:
                self._running.discard(rank)
                self._finished.add(rank)
                self._advance()

        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(self.layout.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise InvariantViolation("the simulated job hangs\n" + "\n".join(self.transcript))
        return results

    def live(self) -> list[int]:
        return [r for r in range(self.layout.ranks) if r not in self._dead]

    def failed(self) -> frozenset[int]:
        return frozenset(self._dead)

    def proven_dead(self) -> frozenset[int]:
        silent = [rank for rank, death in self._deaths.items() if death.silent]
        behind = {self.layout.replica_of(rank) for rank in silent}
        return frozenset(r for r in self._dead if self.layout.replica_of(r) not in behind)

    def call(self, rank: int, kind: str, payload: Any = None) -> Any:
        """Block until the hub has decided; return its value or raise its exception."""
        with self._lock:
            if rank in self._dead:
                raise Killed
            death = self._deaths.get(rank)
            number = self._calls[rank]
            self._calls[rank] += 1
            group = self._group[rank] if kind == "all_reduce" else self._world[rank]
            mine = _Call(rank, kind, group, payload)
            self._waiting[rank] = mine
            self._running.discard(rank)
            if death is not None and death.call == number:
                self._kill(rank, f"in {kind}" if death.inside else f"before {kind}", death.inside)
            self._advance()
        mine.wake.acquire()
        if isinstance(mine.outcome, BaseException):
            raise mine.outcome
        return mine.outcome

    def say(self, rank: int, text: str) -> None:
        """A line of `rank`'s own for the transcript; lines of one round stand in rank order."""
        with self._lock:
            self._said.append((rank, text))

    def revoke(self, rank: int) -> None:
        """Takes effect at once, everywhere."""
        with self._lock:
            for group in (self._group[rank], self._world[rank]):
                if group is not None:
                    group.revoked = True

    def kill(self, rank: int, reason: str) -> None:
        with self._lock:
            self._kill(rank, reason, inside=False)

    # --- the hub: all below holds the lock --------------------------------------------------------

    def _kill(self, rank: int, where: str, inside: bool) -> None:
        if rank in self._dead:
            return
        self._dead.add(rank)
        self._running.discard(rank)
        self._said.append((rank, f"dies {where}"))
        if rank in self._waiting:
            if inside:
                self._last_words[rank] = self._waiting[rank]
            self._release(self._waiting[rank], Killed())

    def _advance(self) -> None:
        """When every live rank is blocked, decide until one is not."""
        while not self._running:
            self._note_what_was_said()
            if not self._waiting:
                return
            if self._mates_die():
                continue
            enabled = [step for step in (self._step(g) for g in self._groups()) if step]
            if enabled:
                self._random.choice(enabled)()
            elif not self._mates_die(all_of_them=True):
                self._deadlock()

    def _deadlock(self) -> None:
        waiting = {self._name(c.rank): c.kind for c in self._waiting.values()}
        told = "\n".join(self.transcript[-40:])
        for call in list(self._waiting.values()):
            self._release(call, InvariantViolation(f"deadlock: {waiting}\n{told}"))

    def _mates_die(self, all_of_them: bool = False) -> bool:
        """The watchers of a dead rank's mates: each strikes now with chance one half."""
        mates = [
            mate
            for rank in sorted(self._dead)
            for mate in self.layout.ranks_of(self.layout.replica_of(rank))
            if mate not in self._dead and mate in self._waiting
        ]
        struck = False
        for mate in dict.fromkeys(mates):
            if all_of_them or self._vanish_together or self._random.random() < 0.5:
                self._kill(mate, "with its replica", inside=False)
                struck = True
        return struck

    def _groups(self) -> list[tuple[str, _Group]]:
        found: dict[tuple[str, int], tuple[str, _Group]] = {}
        for rank in sorted(self._waiting):
            call = self._waiting[rank]
            assert call.group is not None
            found.setdefault((call.kind, id(call.group)), (call.kind, call.group))
        return list(found.values())

    def _step(self, what: tuple[str, _Group]) -> Callable[[], None] | None:
        """What can happen now to the calls of one kind in one communicator, if anything."""
        kind, group = what
        at = [*self._waiting.values(), *self._last_words.values()]
        here = [c for c in at if c.group is group and c.kind == kind]
        calls = sorted((c for c in here if c.rank not in self._dead), key=lambda c: c.rank)
        dead = [rank for rank in group.members if rank in self._dead]
        complete = len(calls) + len(dead) == len(group.members)
        if kind in ("all_reduce", "survey", "split"):
            if group.revoked:
                return lambda: self._fail(calls)
            if dead:
                if group.broken:
                    return None
                return lambda: self._fail_somehow(group, here, calls, complete)
            return (lambda: self._succeed(here, calls)) if complete else None
        if not complete:
            return None
        return lambda: self._agree(here, calls, dead) if kind == "agree" else self._shrink(calls)

    def _fail(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            self._release(call, ReplicaLost(f"{call.kind}: revoked or a peer died"))

    def _fail_somehow(
        self, group: _Group, here: list[_Call], calls: list[_Call], complete: bool
    ) -> None:
        """A member is dead: at least one rank fails; others fail, return garbage, or wait for a
        revoke. If the dead had taken part, some may even return the right result."""
        group.broken = True
        self._note(f"{calls[0].kind} breaks")
        unlucky = self._random.choice(calls)
        took_part = len(here) == len(_members(here))
        for call in calls:
            chance = self._random.random()
            if call is unlucky or chance < 0.4:
                self._fail([call])
            elif complete and chance < 0.8:
                self._succeed(here if took_part else [], [call])

    def _succeed(self, here: list[_Call], calls: list[_Call]) -> None:
        """`here` are the contributions; none of them means garbage."""
        if calls[0].kind == "split":
            self._split(calls)
            return
        sends = [c.payload[0] for c in sorted(here, key=lambda c: c.rank)]
        for call in calls:
            _, receive, op = call.payload
            if sends:
                receive[:] = functools.reduce(_COMBINE[op], sends)
            else:
                receive[:] = self._random.randrange(2, 100)
            self._release(call, None)

    def _split(self, calls: list[_Call]) -> None:
        world = calls[0].group
        assert world is not None
        for call in calls:
            position = call.payload
            members = tuple(r for r in world.members if self.layout.position_of(r) == position)
            self._group[call.rank] = world.parts.setdefault(position, _Group(members))
            self._release(call, None)

    def _agree(self, here: list[_Call], calls: list[_Call], dead: list[int]) -> None:
        votes = functools.reduce(operator.and_, (call.payload for call in here))
        late = len(here) == len(_members(here))
        # Whoever died after the decision did not change it; the answer is uniform either way.
        answer = votes if not dead or (late and self._random.random() < 0.5) else 0
        self._note(f"agreement: {'yes' if answer & 1 else 'no'}")
        for call in here:  # what the dead said counts in this agreement only
            self._last_words.pop(call.rank, None)
        for call in calls:
            self._release(call, answer)

    def _shrink(self, calls: list[_Call]) -> None:
        members = tuple(c.rank for c in calls)
        world = _Group(members)
        self._note("world shrinks to " + " ".join(map(self._name, members)))
        for call in calls:
            self._world[call.rank] = world
            self._release(call, members)

    def _release(self, call: _Call, outcome: Any) -> None:
        del self._waiting[call.rank]
        if call.rank not in self._dead:
            self._running.add(call.rank)
        call.outcome = outcome
        call.wake.release()

    def _note_what_was_said(self) -> None:
        for rank, text in sorted(self._said, key=lambda line: line[0]):
            self._note(f"{self._name(rank)}: {text}")
        self._said.clear()

    def _note(self, text: str) -> None:
        self.transcript.append(text)

    def _name(self, rank: int) -> str:
        return f"r{self.layout.replica_of(rank)}.p{self.layout.position_of(rank)}"


def _members(calls: Sequence[_Call]) -> tuple[int, ...]:
    group = calls[0].group
    assert group is not None
    return group.members


class ScriptedMembership:
    """One rank's membership.interface.Membership over a ScriptedJob."""

    def __init__(self, job: ScriptedJob, rank: int):
        self._job = job
        self.rank = rank

    def agree(self, flags: int) -> int:
        return int(self._job.call(self.rank, "agree", flags))

    def revoke(self) -> None:
        self._job.revoke(self.rank)

    def failed(self) -> frozenset[int]:
        return self._job.failed()

    def shrink(self) -> tuple[int, ...]:
        return tuple(self._job.call(self.rank, "shrink"))

    def survey(self, marks: np.ndarray) -> np.ndarray:
        found = np.zeros_like(marks)
        self._job.call(self.rank, "survey", (marks, found, "max"))
        return found

    def die(self, reason: str) -> NoReturn:
        self._job.kill(self.rank, reason)
        raise Killed


class ScriptedFabric:
    """One rank's fabric.interface.Fabric over a ScriptedJob."""

    def __init__(self, job: ScriptedJob, rank: int):
        self._job = job
        self._rank = rank

    def open(self, members: tuple[int, ...]) -> None:
        self._job.call(self._rank, "split", self._job.layout.position_of(members[0]))

    def start(self, send: Array, receive: Array, op: str) -> tuple[Array, Array, str]:
        check_pair(send, receive)
        return send, receive, op

    def wait(self, ticket: tuple[Array, Array, str]) -> None:
        self._job.call(self._rank, "all_reduce", ticket)

    def abort(self) -> None:
        """Revoking the world, which the guard does at the same time, ends transfers as well."""
