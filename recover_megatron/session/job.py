"""A job's shape, as its command line says it: how many ranks a replica has, and how large B is."""

from __future__ import annotations

from dataclasses import dataclass

from recover_megatron.config import RecoveryConfig
from recover_megatron.errors import ConfigError
from recover_megatron.faults import parse_faults
from recover_megatron.world import ReplicaLayout


@dataclass(frozen=True)
class Job:
    """What a framework's command line says of the job, read before anything is started.

    Attributes:
        config: The values of the `--recover*` flags.
        ranks_per_replica: tensor x pipeline x context parallel x --recover-intra-replica-dp.
        global_batch_size: In samples, after a ramp-up.
        micro_batch_size: In samples, of one data-parallel rank.
        first_batch_size: In samples, of a batch-size ramp-up; else the global batch.
        warning: What is allowed, and may not be meant; empty if nothing.
    """

    config: RecoveryConfig
    ranks_per_replica: int
    global_batch_size: int
    micro_batch_size: int
    first_batch_size: int
    warning: str = ""

    @property
    def microbatches(self) -> int:
        """B: what every iteration commits, counted per replica (after a batch-size ramp-up)."""
        return self.global_batch_size // self.samples_per_microbatch

    @property
    def samples_per_microbatch(self) -> int:
        return self.micro_batch_size * self.config.intra_replica_dp

    def layout(self, ranks: int) -> ReplicaLayout:
        """Raises ConfigError unless `ranks` are whole replicas, each with work to do."""
        if ranks % self.ranks_per_replica:
            raise ConfigError(
                f"{ranks} ranks are not a whole number of replicas of {self.ranks_per_replica} "
                "ranks (tensor x pipeline x context parallel x --recover-intra-replica-dp); "
                f"start a multiple of {self.ranks_per_replica}"
            )
        layout = ReplicaLayout(ranks // self.ranks_per_replica, self.ranks_per_replica)
        fewest = self.first_batch_size // self.samples_per_microbatch
        if fewest < layout.replicas:
            ramp = self.first_batch_size < self.global_batch_size
            flag = "--rampup-batch-size" if ramp else "--global-batch-size"
            raise ConfigError(
                f"{fewest} microbatches an iteration ({flag} {self.first_batch_size} / "
                f"{self.samples_per_microbatch} samples) are fewer than {layout.replicas} "
                f"replicas; raise {flag} or start fewer replicas"
            )
        if self.config.min_replicas > layout.replicas:
            raise ConfigError(
                f"--recover-min-replicas {self.config.min_replicas} is more than the "
                f"{layout.replicas} replicas of this job"
            )
        parse_faults(self.config.inject, layout)
        return layout
