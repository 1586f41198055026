"""How a job has ended: its exit code, told by what its ranks left behind, and why, in one sentence.

mpirun's own code is 0 even if every rank was killed. Any of these may be missing: a folder may be
full, and a rank may be killed between any two of its last words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recover_megatron.console import say
from recover_megatron.session.exits import EXIT_NOBODY, EXIT_UNRECOVERABLE
from recover_megatron.trace import read_traces, text_of

_ERROR = "recover-megatron launch: error"
Event = dict[str, Any]


def exit_code(mpirun_code: int, marker: Path, job_folder: Path | None = None) -> int:
    """Of the job: what its survivors left in `marker`, in the job's temporary folder or in their
    traces. If none did: EXIT_UNRECOVERABLE where all replicas met the same error, else EXIT_NOBODY
    or mpirun's own; why is said on the console."""
    for place in (marker, job_folder and job_folder / "done"):
        if place and (text := text_of(place).strip()).isdigit():
            return int(text)
    events = sorted(read_traces(marker.parent), key=lambda e: float(e["time"]))
    if (code := _agreed(events)) is not None:
        return code
    if said := same_error(events):
        say(said, who=_ERROR)
        return EXIT_UNRECOVERABLE
    if mpirun_code:
        return mpirun_code if mpirun_code > 0 else 128 - mpirun_code
    say(
        f"the job ended but no replica reached its end{_first_death(events)}; the last words of "
        f"each rank are in {marker.parent}",
        who=_ERROR,
    )
    return EXIT_NOBODY


def has_committed(run_dir: Path) -> bool:
    return any(e["event"] == "committed" for e in read_traces(run_dir))


def _agreed(events: Sequence[Event]) -> int | None:
    """All ranks of a replica trace the code with which they finish before any of them leaves."""
    ranks = {(e["replica"], e["position"]) for e in events if e["event"] == "started"}
    finished = {(e["replica"], e["position"]): e for e in events if e["event"] == "finished"}
    for replica in {r for r, _ in ranks}:
        mine = {place for place in ranks if place[0] == replica}
        if mine <= set(finished):
            return int(finished[min(mine)]["code"])
    return None


def same_error(events: Sequence[Event]) -> str:
    """In words, if every replica that took part in the last iteration died of the same exception in
    it: then the data, a setting or the program is at fault, not the hardware. Empty if not.
    `events` are in the order of their time."""
    committed = [e for e in events if e["event"] == "committed"]
    last = max((e["iteration"] for e in committed), default=0)
    took_part = {e["replica"] for e in committed if e["iteration"] == last} or {
        e["replica"] for e in events if e["event"] == "started"
    }
    errors: dict[int, Event] = {}
    for e in events:
        if e["event"] == "died" and "exception" in e and e["iteration"] in (0, last, last + 1):
            errors.setdefault(e["replica"], e)
    if not took_part or not took_part <= set(errors):
        return ""
    if len({(errors[r]["exception"], errors[r]["where"]) for r in took_part}) > 1:
        return ""
    if len(took_part) == 1 and last:
        return ""  # one replica alone: it may well be its hardware
    first = next(e for e in events if e["event"] == "died" and e in errors.values())
    number = first["iteration"]
    at = f"in iteration {number}" if number else "before the first iteration"
    said = (
        f"all {len(took_part)} replicas met the same error {at}: {first['reason']} "
        f"({first['where']}); so the data, a setting or the program is at fault, not the hardware"
    )
    for e in events:
        if e["event"] == "rescued":
            said += f"; the checkpoint of iteration {e['iteration']} is in {e['save']}"
    return said


def _first_death(events: Sequence[Event]) -> str:
    deaths = [e for e in events if e["event"] == "died"]
    if not deaths:
        return ""
    first = deaths[0]
    said = f"; the first to die was replica {first['replica']}, position {first['position']}: " + (
        str(first["reason"])
    )
    nan = {e["replica"] for e in deaths if "NaN" in str(e["reason"])}
    if len(nan) > 1:
        said += (
            f"; {len(nan)} replicas found NaN at once, so the data or the model is at fault, not "
            "the hardware"
        )
    return said
