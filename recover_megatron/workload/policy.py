"""Policies: pure functions from membership to assignment.

`exact` keeps the very samples; `versatile` is the paper's: spares stand in without computing anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

from recover_megatron.workload.assignment import Assignment
from recover_megatron.world import World


class ExactPolicy:
    """Ids 0..B-1 over the live replicas, sizes differing by at most one (makespan ceil(B/n)).

    After a loss the survivors keep what they hold, and each lost id goes to the survivor with the
    fewest, lowest replica first. Nothing that is alive is computed again. Samples are a function
    of (iteration, id) alone (samples.py), so they are the failure-free run's.
    """

    def plan(self, world: World, microbatches: int) -> Assignment:
        """The assignment with which an iteration starts; contiguous ids, ascending by replica."""
        base, larger = divmod(microbatches, len(world.replicas))
        sizes = [base + (index < larger) for index in range(len(world.replicas))]
        return Assignment.of(_contiguous(world.replicas, sizes))

    def reassign(self, assignment: Assignment, world: World) -> Assignment:
        """The same iteration after the world shrank: the lost ids appended to survivors' shares."""
        shares = _lists(assignment.shares, world)
        _spread(_lost(assignment, world), shares)
        return Assignment.of(shares)


class VersatilePolicy:
    """The paper's policy (section 4): majors, one minor, spares, and a policy boundary step.

    With G = ceil(B/n), floor(B/G) majors contribute G microbatches each, one minor the remainder,
    and the other replicas are spares: they compute G as well and withhold the gradient. After a
    loss, spares are promoted in the lost ones' place, which costs no computation. What spares
    cannot cover is computed anew by those that contribute, evenly (the policy boundary step); the
    next iteration's G and roles follow from its number of replicas.

    An id stands for a place in the batch, not for samples: each replica reads its own endless
    stream (samples.py). A spare withholds two parts where there is a minor, so that it can stand in
    for a minor as well as for a major.
    """

    def plan(self, world: World, microbatches: int) -> Assignment:
        """The assignment with which an iteration starts; majors first, ascending by replica."""
        quota = -(-microbatches // len(world.replicas))
        majors, rest = divmod(microbatches, quota)
        sizes = [quota] * majors + ([rest] if rest else [])
        spares = world.replicas[len(sizes) :]
        shares = _contiguous(world.replicas, sizes + [0] * len(spares))
        return Assignment.of(shares, {r: [rest, quota - rest] if rest else [quota] for r in spares})

    def reassign(self, assignment: Assignment, world: World) -> Assignment:
        """The same iteration after the world shrank: spares promoted, the rest computed anew."""
        shares = _lists(assignment.shares, world)
        withheld = _lists(assignment.withheld, world)
        owed = _lost(assignment, world)
        for replica, parts in withheld.items():
            fitting = [total for total in accumulate(parts) if total <= len(owed)]
            shares[replica] += owed[: fitting[-1] if fitting else 0]
            del owed[: fitting[-1] if fitting else 0], parts[: len(fitting)]
        # Not to replicas that withhold: what a stream gives is committed in its order, or later.
        anew: dict[int, list[int]] = {r: [] for r in shares if not withheld[r]}
        _spread(owed, anew)
        return Assignment.of({r: shares[r] + anew.get(r, []) for r in shares}, withheld)


def make_policy(name: str) -> ExactPolicy | VersatilePolicy:
    """The policy of a `--recover-policy` value (config.POLICIES)."""
    return VersatilePolicy() if name == "versatile" else ExactPolicy()


def moved(before: Assignment, after: Assignment, replica_id: int) -> Sequence[int]:
    """The ids that `replica_id` took over: in its share of `after`, not of `before`."""
    held = set(before.share(replica_id))
    return [i for i in after.share(replica_id) if i not in held]


def promoted(before: Assignment, after: Assignment, replica_id: int) -> int:
    """How many of the parts that `replica_id` withheld it contributes now."""
    return len(before.parts(replica_id)) - len(after.parts(replica_id))


def anew(before: Assignment, after: Assignment, replica_id: int) -> Sequence[int]:
    """The ids that `replica_id` must compute now: moved to it, and no promoted part stands in."""
    standing_in = sum(before.parts(replica_id)[: promoted(before, after, replica_id)])
    return moved(before, after, replica_id)[standing_in:]


def _contiguous(replicas: Sequence[int], sizes: Sequence[int]) -> dict[int, range]:
    ends = list(accumulate(sizes))
    return {
        replica: range(end - size, end)
        for replica, size, end in zip(replicas, sizes, ends, strict=True)
    }


def _lists(pairs: Sequence[tuple[int, Sequence[int]]], world: World) -> dict[int, list[int]]:
    """A list for each live replica, empty if `pairs` has none."""
    given = dict(pairs)
    return {replica: list(given.get(replica, ())) for replica in world.replicas}


def _lost(assignment: Assignment, world: World) -> list[int]:
    """The ids of replicas that are no more, ascending."""
    live = set(world.replicas)
    return sorted(i for r, ids in assignment.shares if r not in live for i in ids)


def _spread(ids: Sequence[int], shares: dict[int, list[int]]) -> None:
    """Each id to the replica with the fewest, lowest replica first."""
    fewest = [(len(share), replica) for replica, share in shares.items()]
    heapify(fewest)
    for microbatch in ids:
        size, replica = fewest[0]
        shares[replica].append(microbatch)
        heapreplace(fewest, (size + 1, replica))
