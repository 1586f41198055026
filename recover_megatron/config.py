"""RecoveryConfig: every setting of recovery, its default, its unit and its check, in one place.

Each field with `help` metadata is also a command-line flag: `min_replicas` is
`--recover-min-replicas` (session/arguments.py makes the parser group from the fields).
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

from recover_megatron.errors import ConfigError

POLICIES = ("exact", "versatile")


# Seconds that have no flag.
_DURATIONS = ("settle_s", "settle_limit_s", "proof_poll_s", "hang_floor_s", "poll_s")


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class RecoveryConfig:
    """Frozen and self-checking: an instance that exists is valid (ConfigError otherwise)."""

    policy: str = _flag(
        "exact",
        "who computes what after a loss: 'exact' recomputes the lost replica's own samples, "
        "'versatile' (the paper's) lets spares stand in, on samples of the survivors' own streams",
        choices=POLICIES,
    )
    min_replicas: int = _flag(
        1, "fewer live replicas than this: save a checkpoint and stop with an error (needs --save)"
    )
    restart_command: str = _flag(
        "",
        "what the launcher runs, without a shell, if no replica or fewer than "
        "--recover-min-replicas are left: the job's own launch line with --load, or "
        "`scontrol requeue JOB`",
    )
    allow_untested_megatron: bool = _flag(
        False, "try a version of Megatron that the hooks were not tried on"
    )
    inject: str = _flag(
        "", "faults to inject, e.g. 1.0@3:sync.2 or random:seed=1:every=5:count=2 (docs/faults.md)"
    )
    trace_dir: str | None = _flag(
        None, "folder for one trace file and one log file per rank; without it no trace is kept"
    )
    check_replicas_interval: int = _flag(
        0, "every N iterations compare all parameters bitwise across replicas (0: never)"
    )
    hang_timeout_s: float | None = _flag(
        None,
        "a rank that computes without progress for this many seconds counts as dead (0: never; "
        "default: 20 times the longest time between two microbatches so far, at least 60)",
        flag="--recover-hang-timeout",
        type=float,
    )
    stall_timeout_s: float | None = _flag(
        None,
        "so does a rank that takes longer than this from a commit to its next microbatch "
        "(optimizer, log, save, evaluation; 0: no limit; default: 20 times the longest so far, at "
        "least 1800)",
        flag="--recover-stall-timeout",
        type=float,
    )
    intra_replica_dp: int = _flag(1, "data-parallel ranks inside one replica")
    bucket_mb: float = _flag(
        25.0, "size in MB of the pieces in which gradients are reduced across replicas"
    )
    # A replica dies rank by rank; shrinking meanwhile can crash survivors (docs/ulfm.md, rule 6).
    settle_s: float = 0.1
    settle_limit_s: float = 10.0
    # How often, and how many times, survivors that are no majority look for proof that the others
    # are dead before they give up. Counted, not timed, so that all come to the same end. Longer
    # than it takes until mpirun or a witness knows that a process has ended.
    proof_poll_s: float = 0.25
    proof_polls: int = 80
    # The least that a measured hang time-out can be.
    hang_floor_s: float = 60.0
    # How often the watcher makes MPI progress and looks for failures.
    poll_s: float = 0.02

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"--recover-policy must be one of {', '.join(POLICIES)}, got {self.policy!r}"
            )
        for name, least in (
            ("min_replicas", 1),
            ("check_replicas_interval", 0),
            ("hang_timeout_s", 0),
            ("stall_timeout_s", 0),
            ("intra_replica_dp", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = flag_name(name)
                raise ConfigError(f"{flag} must be at least {least}, got {value}")
        for name in ("bucket_mb", *_DURATIONS):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{flag_name(name)} must be more than 0, got {getattr(self, name)}"
                )

    @property
    def bucket_bytes(self) -> int:
        return max(4096, int(self.bucket_mb * 1e6))


def flag_fields() -> list[Field[Any]]:
    """The fields that are command-line flags."""
    return [f for f in fields(RecoveryConfig) if "help" in f.metadata]


def flag_name(field_name: str) -> str:
    """The command-line flag of a field of RecoveryConfig."""
    for f in fields(RecoveryConfig):
        if f.name == field_name and "flag" in f.metadata:
            return str(f.metadata["flag"])
    return "--recover-" + field_name.replace("_", "-")
