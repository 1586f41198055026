"""Megatron's tracker file: which checkpoint a folder's last one is. Standard library only."""

from __future__ import annotations

from pathlib import Path

from recover_megatron.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def checkpoint_folder(load: str | Path) -> Path:
    """The checkpoint that the tracker file in `load` names: `iter_0000100`, or `release`, which is
    weights from which another training begins.

    Raises ConfigError, with the file and what it holds, for a tracker that names none.
    """
    tracker = Path(load) / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tracker}: cannot be read ({error})") from None
    if text != RELEASE and not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{tracker} holds {text[:40]!r}, expected the number of an iteration or 'release'; "
            f"write the number of a whole checkpoint into it: {_there(load)}"
        )
    folder = Path(load) / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ConfigError(
            f"{tracker} names {folder.name}, which is not there; write the number of a whole "
            f"checkpoint into it: {_there(load)}"
        )
    return folder


def _there(load: str | Path) -> str:
    names = sorted(p.name for p in Path(load).glob("iter_*") if p.is_dir())
    return ", ".join(names[-5:]) or "there is none"
