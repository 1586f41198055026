"""The positions of the sample streams under `versatile`: a file beside each checkpoint."""

from __future__ import annotations

from pathlib import Path

from recover_megatron.errors import ConfigError
from recover_megatron.trace import write_atomically
from recover_megatron.workload.samples import Streams, parse_streams


def save_streams(checkpoints: str, iteration: int, streams: Streams) -> None:
    """One rank of the replica that saves calls it, before the checkpoint is announced. Raises
    OSError if neither the folder beside the checkpoint nor the checkpoint's own can be written."""
    beside, inside = _streams_paths(checkpoints, iteration)
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(beside, f"{streams}\n")
    except OSError:
        inside.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(inside, f"{streams}\n")


def load_streams(checkpoints: str | None, iteration: int, size: int) -> Streams | None:
    """What a checkpoint of `versatile` says of its streams; None for a new job, or a checkpoint of
    `exact` or of plain Megatron. Raises ConfigError for a broken file."""
    if not checkpoints or not iteration:
        return None
    for path in _streams_paths(checkpoints, iteration):
        if path.is_file():
            try:
                return parse_streams(path.read_text(encoding="utf-8"), size)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: {error}") from None
    return None


def streams_to_start_with(
    found: Streams | None, policy: str, consumed: int, replicas: int, size: int
) -> Streams | None:
    """The streams of a job under `policy` that goes on after `consumed` samples, `found` being what
    its checkpoint says; None under `exact`. `size` is the number of samples of a microbatch.

    Raises ConfigError where `exact` cannot go on: it takes the samples in order, and here some
    behind `consumed` have been committed, and some before it have not.
    """
    if policy == "versatile":
        return (found or Streams.after(consumed, replicas, size)).resumed_by(replicas, size)
    if found is not None and (found.skipped or found.end != consumed):
        raise ConfigError(
            f"--recover-policy exact cannot go on from this checkpoint of versatile, which lost a "
            f"replica: of its first {found.end} samples {found.skipped} were not trained on, and "
            f"exact would go on at sample {consumed}; resume with --recover-policy versatile"
        )
    return None


def _streams_paths(checkpoints: str, iteration: int) -> tuple[Path, Path]:
    """Beside the checkpoint, and inside it where that place cannot be written."""
    root, name = Path(checkpoints), f"iter_{iteration:07d}"
    return root / "recover_streams" / f"{name}.json", root / name / "recover_streams.json"
