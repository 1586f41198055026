"""Megatron's index caches: which documents make up which sample, kept in files beside the data.

Megatron finds them again by the name of the data set and by settings, not by what the data set
holds, and takes a file for whole if it is there. So a data set that was prepared again under the
same name is read with the old index: documents are never read, or asked for that are not there;
and a file that was cut short by a kill ends every later start. Here what does not fit is removed
before Megatron looks, and Megatron makes it anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recover_megatron.trace import text_of, write_atomically

_STAMPS = "recover_stamps"
_ENDS = 1 << 20  # bytes at both ends of an .idx file that are hashed


def sweep(prefixes: Sequence[str], cache: str | None) -> list[str]:
    """Remove index files of the data sets `prefixes` that are not of what they hold now, or not
    whole. `cache` is --data-cache-path. Called by one rank of the job, before any builds. Returns
    what was found, in words. A folder that cannot be read or written is left to Megatron."""
    found = []
    for prefix in prefixes:
        with contextlib.suppress(OSError):
            folder = Path(cache) if cache else Path(prefix) / "cache" / "GPTDataset_indices"
            found += _sweep_one(prefix, folder)
    return found


def _sweep_one(prefix: str, folder: Path) -> list[str]:
    stamp = folder / _STAMPS / (hashlib.sha256(os.path.abspath(prefix).encode()).hexdigest()[:32])
    known, now = text_of(stamp), identity(prefix)
    sets = list(_sets_of(prefix, folder))
    found = []
    # Without a stamp, by another program: as old as its files say.
    newest = max(Path(prefix + suffix).stat().st_mtime for suffix in (".bin", ".idx"))
    for name in sets:
        files = [*folder.glob(f"{name}-*.npy"), *folder.glob(f"{name}-*.txt")]
        stale = known != now if known else min(f.stat().st_mtime for f in files) < newest
        broken = [f for f in files if not _whole(f)]
        if stale or broken:
            for file in files:
                file.unlink(missing_ok=True)
            why = "is of an earlier data set" if stale else f"{broken[0].name} was not whole"
            found.append(f"index cache of {prefix}: {why}; it is made anew")
    if known != now:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(stamp, now)
    return found


def identity(prefix: str) -> str:
    """Of what a data set holds, without reading all of it."""
    facts: list[Any] = []
    for suffix in (".bin", ".idx"):
        status = os.stat(prefix + suffix)
        facts.append([status.st_size, status.st_mtime_ns])
    digest = hashlib.sha256()
    with open(f"{prefix}.idx", "rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _ENDS))
        digest.update(file.read())
    return json.dumps([*facts, digest.hexdigest()])


def _sets_of(prefix: str, folder: Path) -> Iterator[str]:
    """The beginnings of the names of the index files that were made for a data set."""
    for description in folder.glob("*-description.txt"):
        try:
            path = json.loads(description.read_text(encoding="utf-8")).get("dataset_path")
        except (OSError, ValueError, AttributeError):
            continue
        if path is not None and os.path.abspath(path) == os.path.abspath(prefix):
            yield description.name.removesuffix("-description.txt")


def _whole(file: Path) -> bool:
    if file.suffix != ".npy":
        return True
    try:
        np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        return False
    return True


def one_at_a_time(stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Around Megatron's compilation of its data set helper, which every replica would begin at
    once, in the same folder: the second finds it done."""
    import megatron.core.datasets as datasets

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fd = os.open(next(iter(datasets.__path__)), os.O_RDONLY)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        return stock(*args, **more)
