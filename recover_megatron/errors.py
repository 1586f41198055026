"""What can go wrong, named by who must act."""

from __future__ import annotations


class RecoveryError(Exception):
    """Base of all errors of this package."""


class ConfigError(RecoveryError, ValueError):
    """The user must act: a setting is wrong. Raised before training starts; nothing is lost."""


class ReplicaLost(RecoveryError):
    """A peer acted: it died or left. Expected, and always handled by the driver's repair."""


class Unrecoverable(RecoveryError):
    """Going on would be wrong: the job stops, with a checkpoint where one could be saved."""


class TooFewReplicas(Unrecoverable):
    """Fewer than --recover-min-replicas are left. A new job may go on from the checkpoint."""


class StopRequested(RecoveryError):
    """The user or the scheduler asked for an end: the job stops here, with a checkpoint."""


class NoQuorum(RecoveryError):
    """The other side of a partition may go on, so this one must leave, by SIGKILL."""


class InvariantViolation(RecoveryError):
    """Our bug. Never caught on the way up: the rank prints it and leaves by SIGKILL."""
