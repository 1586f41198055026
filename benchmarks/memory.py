"""Host memory of a rank with --recover beside plain data parallelism: the same model, in one run.

    python benchmarks/memory.py

Prints the peak resident memory of each rank (VmHWM of /proc/PID/status), read while the job runs,
and what --recover adds in units of one float32 gradient.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recover_megatron.testing.rehearsal import (  # noqa: E402
    Rehearsal,
    corpus,
    descendants,
    environment,
)

RANKS, ROUNDS = 2, 3


def peaks(command: list[str], folder: Path) -> list[int]:
    """Peak resident bytes of each rank."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        found: dict[int, int] = {}
        while process.poll() is None:
            for pid in ranks(process.pid):
                found[pid] = max(found.get(pid, 0), peak(pid))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit((folder / "log").read_text()[-2000:])
    return sorted(found.values(), reverse=True)[:RANKS]


def ranks(ancestor: int) -> list[int]:
    """Descendants that train: they run the package, and are not what starts it."""
    found = []
    for pid in descendants(ancestor):
        words = command_line(pid)
        if "recover_megatron" in words and not {"torch.distributed.run", "launch"} & set(words):
            found.append(pid)
    return found


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def peak(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 0


def main() -> None:
    job = Rehearsal(corpus(ROOT / "runs" / "data"), 4, 4, hidden_size=512, layers=8)
    parameters = 8 * (4 * 512**2 + 3 * 512 * 3 * 512) + 2 * 320 * 512
    gradient = 4 * parameters
    print(f"{parameters / 1e6:.1f} M parameters; a float32 gradient is {gradient / 1e6:.0f} MB")
    plain, ours = [], []
    for _ in range(ROUNDS):  # in alternation
        for command, into in ((job.plain(RANKS), plain), (None, ours)):
            with tempfile.TemporaryDirectory() as folder:
                into += peaks(command or job.recover(RANKS, Path(folder) / "run"), Path(folder))
    middle = [sorted(values)[len(values) // 2] for values in (plain, ours)]
    for name, value in zip(("plain data parallel", "--recover"), middle, strict=True):
        print(f"{name}: {value / 1e6:.0f} MB a rank (median of {RANKS * ROUNDS})")
    more = middle[1] - middle[0]
    print(f"difference: {more / 1e6:.0f} MB, {more / gradient:.2f} gradients")


if __name__ == "__main__":
    main()
