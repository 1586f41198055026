"""How a job has ended: its exit code, told by what its ranks left behind, and why, in one sentence.

mpirun's own code is 0 even if every rank was killed. Any of these may be missing: a folder may be
full, and a rank may be killed between any two of its last words.
"""

from __future__ import annotations

from pathlib import Path

from recover_megatron.console import say
from recover_megatron.events import Died
from recover_megatron.record.run_record import RunRecord
from recover_megatron.session.exits import EXIT_NOBODY, EXIT_UNRECOVERABLE
from recover_megatron.trace import text_of

_ERROR = "recover-megatron launch: error"


def exit_code(mpirun_code: int, marker: Path, job_folder: Path | None = None) -> int:
    """Of the job: what its survivors left in `marker`, in the job's temporary folder or in their
    traces. If none did: EXIT_UNRECOVERABLE where all replicas met the same error, else EXIT_NOBODY
    or mpirun's own; why is said on the console."""
    for place in (marker, job_folder and job_folder / "done"):
        if place and (text := text_of(place).strip()).isdigit():
            return int(text)
    record = RunRecord.read(marker.parent)
    if (code := _agreed(record)) is not None:
        return code
    if said := same_error(record):
        say(said, who=_ERROR)
        return EXIT_UNRECOVERABLE
    if mpirun_code:
        return mpirun_code if mpirun_code > 0 else 128 - mpirun_code
    say(
        f"the job ended but no replica reached its end{_first_death(record)}; the last words of "
        f"each rank are in {marker.parent}",
        who=_ERROR,
    )
    return EXIT_NOBODY


def _agreed(record: RunRecord) -> int | None:
    """All ranks of a replica trace the code with which they finish before any of them leaves."""
    for replica in record.replicas:
        mine = [place for place in record.started if place[0] == replica]
        if all(place in record.finished for place in mine):
            return record.finished[min(mine)].code
    return None


def same_error(record: RunRecord) -> str:
    """In words, if every replica that took part in the last iteration died of the same exception in
    it: then the data, a setting or the program is at fault, not the hardware. Empty if not."""
    last = record.iteration
    took_part = record.last_committers or set(record.replicas)
    errors: dict[int, Died] = {}
    for death in record.deaths:
        if death.exception is not None and death.iteration in (0, last, last + 1):
            errors.setdefault(death.replica, death)
    if not took_part or not took_part <= set(errors):
        return ""
    if len({(errors[r].exception, errors[r].where) for r in took_part}) > 1:
        return ""
    if len(took_part) == 1 and last:
        return ""  # one replica alone: it may well be its hardware
    first = min(errors.values(), key=lambda death: death.time)
    at = f"in iteration {first.iteration}" if first.iteration else "before the first iteration"
    said = (
        f"all {len(took_part)} replicas met the same error {at}: {first.reason} "
        f"({first.where}); so the data, a setting or the program is at fault, not the hardware"
    )
    if (saved := record.rescued) is not None:
        said += f"; the checkpoint of iteration {saved.iteration} is in {saved.save}"
    return said


def _first_death(record: RunRecord) -> str:
    if not record.deaths:
        return ""
    first = record.deaths[0]
    said = (
        f"; the first to die was replica {first.replica}, position {first.position}: {first.reason}"
    )
    nan = {death.replica for death in record.deaths if "NaN" in death.reason}
    if len(nan) > 1:
        said += (
            f"; {len(nan)} replicas found NaN at once, so the data or the model is at fault, not "
            "the hardware"
        )
    return said
