"""Policies: pure functions from membership to assignment. `exact` keeps the very samples."""

from __future__ import annotations

from collections.abc import Sequence

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
        shares, first = {}, 0
        for index, replica in enumerate(world.replicas):
            size = base + (index < larger)
            shares[replica] = range(first, first + size)
            first += size
        return Assignment.of(shares)

    def reassign(self, assignment: Assignment, world: World) -> Assignment:
        """The same iteration after the world shrank: the lost ids appended to survivors' shares."""
        shares = {replica: list(assignment.share(replica)) for replica in world.replicas}
        lost = [i for r, ids in assignment.shares if r not in shares for i in ids]
        for microbatch in sorted(lost):
            least = min(shares, key=lambda r: (len(shares[r]), r))
            shares[least].append(microbatch)
        return Assignment.of(shares)


def moved(before: Assignment, after: Assignment, replica_id: int) -> Sequence[int]:
    """The ids that `replica_id` must compute now: in its share of `after`, not of `before`."""
    held = set(before.share(replica_id))
    return [i for i in after.share(replica_id) if i not in held]
