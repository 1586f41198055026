"""What a simulated job is, and what each thing that a system does costs, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2


@dataclass(frozen=True)
class Growth:
    """A cost that grows with the live replicas (collectives: a step for each doubling)."""

    base_s: float
    per_doubling_s: float = 0.0

    def at(self, replicas: int) -> float:
        return self.base_s + self.per_doubling_s * log2(replicas)


@dataclass(frozen=True)
class SimulatedJob:
    """`microbatches` is B, of the whole job; `compute_s` is one microbatch's time in one replica
    (t_c of the paper's throughput formula)."""

    replicas: int
    gpus_per_replica: int
    microbatches: int
    tokens_per_microbatch: int
    compute_s: float

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpus_per_replica

    @property
    def tokens(self) -> int:
        """Of one iteration."""
        return self.microbatches * self.tokens_per_microbatch


@dataclass(frozen=True)
class Restart:
    """Checkpoint and restart. Lost GPUs are replaced at once: the job always has its full size.

    `detect_s` is from the failure to the end of the last process, `warmup_s` what the first
    iteration after a restart takes longer. `interval` is in iterations; 0 means the best by Daly's
    first-order rule, sqrt(2 x save x mean time between failures)."""

    reduce: Growth
    detect_s: float
    restart_s: float
    load_s: float
    save_s: float
    warmup_s: float = 0.0
    interval: int = 0


@dataclass(frozen=True)
class Recover:
    """Recovery inside the iteration, by recovery/machine.py and a policy of workload/policy.py.

    `reduce` is what an iteration takes beyond its microbatches (T_r), `detect_s` from the failure
    to its being known, `settle_s` what the first iteration on a new membership takes longer. Every
    `regain_interval_s` (0: never) the job is saved and started anew at its full size, which takes
    `regain_s`: machines that were lost have been mended by then.
    """

    reduce: Growth
    detect_s: float
    repair: Growth
    agree: Growth
    policy: str = "exact"
    settle_s: float = 0.0
    regain_interval_s: float = 0.0
    regain_s: float = 0.0


System = Restart | Recover
