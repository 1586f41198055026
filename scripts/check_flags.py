"""Names the flags of a Megatron-LM checkout that nobody has judged yet.

    python scripts/check_flags.py /path/to/Megatron-LM

patches/megatron_flags.tsv has a line for each flag that was gone through: the flag, Megatron's own
group of it, and the verdict (docs/combinations.md). A flag that a new version brings could make
replicas differ without a word, so it is named here, and the exit code is 1, until it has its line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

VERDICTS = {
    "inside": "concerns the inside of a replica, and is the same in all of them",
    "handled": "hooked, or taken over",
    "refused": "refused at the start, with the reason",
    "leader": "done by the lowest live replica alone",
    "each": "done by each replica for itself; what it writes is by rank or harmless",
    "other": "of another program than pre-training (inference, RL, vision, retrieval)",
    "untried": "thought harmless, but not tried here",
}
TABLE = Path(__file__).resolve().parent.parent / "patches" / "megatron_flags.tsv"


def judged(path: Path = TABLE) -> dict[str, tuple[str, str]]:
    """(group, verdict) by flag. Raises ValueError for a verdict that is none."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        flag, group, verdict = line.split("\t")
        if verdict not in VERDICTS:
            raise ValueError(f"{path}: {flag} has the verdict {verdict!r}")
        found[flag] = (group, verdict)
    return found


def flags_of(checkout: Path) -> dict[str, str]:
    """Megatron's group of each flag, asked of its own parser."""
    script = checkout / "pretrain_gpt.py"
    module = "recover_megatron.adapters.megatron.known_flags"
    command = [sys.executable, "-m", module, "--groups", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"check_flags: {checkout}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    groups: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return groups


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path)
    known, found = judged(), flags_of(parser.parse_args().checkout)
    new = {flag: group for flag, group in found.items() if flag not in known}
    for flag, group in sorted(new.items(), key=lambda item: (item[1], item[0])):
        print(f"{flag} ({group}): not judged")
    print(f"check_flags: {len(found)} flags, {len(new)} of them not judged")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
