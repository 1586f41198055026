"""Failure stories as golden text files: read tests/transcripts/ to learn the protocol.

After an intended change: `python -m tests.test_transcripts` writes them anew; read the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recover_megatron.testing.scripted import Death
from recover_megatron.testing.simulated_job import Schedule, check, simulate
from recover_megatron.world import ReplicaLayout

FOLDER = Path(__file__).with_name("transcripts")


@dataclass(frozen=True)
class Story:
    """Calls of a rank: 0 split and 1 agreement of the start; then per iteration 2 buckets and an
    agreement; a repair is shrink, split, survey and agreement."""

    name: str
    title: str
    deaths: dict[int, Death] = field(default_factory=dict)
    layout: ReplicaLayout = ReplicaLayout(3, 2)
    seed: int = 1
    together: bool = False
    policy: str = "exact"
    microbatches: int = 7

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            self.layout,
            self.deaths,
            self.seed,
            self.together,
            policy=self.policy,
            microbatches=self.microbatches,
        )


STORIES = [
    Story("01_no_failure", "Nobody dies"),
    Story(
        "02_before_training", "A rank dies before the first position groups", {2: Death(0, False)}
    ),
    Story("03_between_buckets", "A rank dies between two buckets", {2: Death(3, False)}, seed=2),
    Story(
        "04_inside_a_bucket",
        "A rank dies inside an all-reduce; some peers see success, some failure",
        {3: Death(3, True)},
        seed=4,
    ),
    Story(
        "05_before_the_agreement",
        "All buckets are reduced, then a rank dies before the agreement: nothing is committed",
        {4: Death(4, False)},
    ),
    Story(
        "06_inside_the_agreement",
        "A rank dies after it voted yes: whatever is decided, it is the same for all",
        {4: Death(4, True)},
        seed=3,
    ),
    Story(
        "07_second_failure_inside_the_repair",
        "While replica 1 is being repaired, a rank of replica 2 dies in the split",
        {2: Death(2, False), 5: Death(5, True)},
    ),
    Story(
        "08_two_replicas_at_once",
        "Two of three replicas die in the same bucket",
        {0: Death(2, True), 4: Death(2, False)},
        together=True,
    ),
    Story(
        "09_one_after_the_other",
        "Replicas die in successive iterations until one is left with all the work",
        {0: Death(2, False), 3: Death(12, False), 4: Death(25, False)},
        layout=ReplicaLayout(4, 2),
    ),
    Story(
        "10_nobody_is_left",
        "Every replica loses a rank in the same bucket",
        {0: Death(2, False), 3: Death(2, True), 5: Death(2, False)},
    ),
    Story(
        "13_partition_majority",
        "Replica 2 is out of reach, not proven dead: the majority goes on",
        {4: Death(3, False, silent=True)},
        together=True,
    ),
    Story(
        "14_partition_minority",
        "The same partition, seen from replica 2: no majority, no proof, so it must not go on",
        {0: Death(3, False, silent=True), 2: Death(3, False, silent=True)},
        together=True,
    ),
    Story(
        "11_spares_stand_in",
        "Policy versatile: a major and the minor die; spares stand in without computing",
        {0: Death(2, True), 3: Death(3, False)},
        layout=ReplicaLayout(6, 1),
        policy="versatile",
    ),
    Story(
        "12_policy_boundary",
        "Policy versatile without spares: the survivors compute the lost microbatches anew",
        {2: Death(3, True)},
        policy="versatile",
    ),
]


def transcript(story: Story) -> str:
    job, _ = simulate(story.schedule)
    layout = story.layout
    head = f"{story.title}.\n{layout.replicas} replicas of {layout.ranks_per_replica} ranks, "
    head += f"{story.microbatches} microbatches, 2 iterations.\n\n"
    return head + "\n".join(job.transcript) + "\n"


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_the_story_is_told_as_written(story: Story):
    assert (FOLDER / f"{story.name}.txt").read_text() == transcript(story)
    check(story.schedule)


if __name__ == "__main__":
    for each in STORIES:
        (FOLDER / f"{each.name}.txt").write_text(transcript(each))
