"""Writes the README's table of Megatron's settings from the results of tests/test_combinations.py.

    scripts/support_table.sh [/path/to/Megatron-LM]

With a checkout the stock pretrain_gpt.py is tried as well. Each row is what the tests measured in
that run; nothing is filled in by hand but the rows of what cannot run on a CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path

from recover_megatron.testing.combinations import COMBINATIONS, NOT_ON_A_CPU, Combination

ROOT = Path(__file__).resolve().parent.parent

SCRIPTS = ("pretrain.py", "pretrain_gpt.py")
BEGIN, END = "<!-- support table: made by scripts/support_table.sh -->", "<!-- end of table -->"


def run_tests(results: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_combinations.py",
        f"--junitxml={results}",
    ]
    return subprocess.run(command, cwd=ROOT).returncode


def read(results: Path) -> dict[tuple[str, str], dict[str, str]]:
    """By script and combination: `result` (passed, failed, skipped) and the measured numbers."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314  our own file
        name = case.get("name", "")
        script, _, combination = name[name.index("[") + 1 : -1].partition("-")
        facts = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        tags = {child.tag for child in case}
        facts["result"] = (
            "failed"
            if tags & {"failure", "error"}
            else "skipped"
            if "skipped" in tags
            else "passed"
        )
        found[script, combination] = facts
    return found


def table(found: dict[tuple[str, str], dict[str, str]], where: str) -> str:
    lines = [
        "| inside a replica | our `pretrain.py` | stock `pretrain_gpt.py` | largest difference "
        "of the loss | of a number in the checkpoint |",
        "|---|---|---|---|---|",
    ]
    for combination in COMBINATIONS:
        mine = [found.get((s, combination.id), {"result": "not run"}) for s in SCRIPTS]
        numbers = [
            max((float(m[key]) for m in mine if key in m), default=None)
            for key in ("loss_difference", "weight_difference")
        ]
        cells = [_cell(combination, script, m) for script, m in zip(SCRIPTS, mine, strict=True)]
        cells += ["" if n is None else f"{n:.1e}" for n in numbers]
        lines.append(f"| {combination.name} | {' | '.join(cells)} |")
    lines += [f"| {name} | not run: {reason} | not run | | |" for name, reason in NOT_ON_A_CPU]
    return "\n".join(lines) + f"\n\n*{where}*"


def _cell(combination: Combination, script: str, facts: dict[str, str]) -> str:
    if combination.stock_only and script == SCRIPTS[0]:
        return "does not have it"
    return facts["result"]


def write(text: str, path: Path) -> None:
    before, _, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"support_table: {path} has no lines '{BEGIN}' and '{END}'")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, help="a junit file of an earlier run")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--commit", required=True, help="for the line below the table")
    args = parser.parse_args()
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or Path(folder) / "results.xml"
        if args.results is None:
            code = run_tests(results)
        found = read(results)
    write(table(found, f"CPU, {date.today()}, commit {args.commit}"), args.readme)
    return code


if __name__ == "__main__":
    sys.exit(main())
