"""The design's rules about who may import whom, checked on the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "recover_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))
FOUNDATION = {
    *("world", "errors", "config", "events", "trace", "faults", "inject", "console", "tracker"),
}
# A layer may import the layers named here, itself and the foundation. The design draws workload on
# top; it stands below recovery here, since the machine validates every assignment (docs/design.md).
MAY_IMPORT = {
    "collectives": set(),
    "workload": set(),
    "recovery": {"workload"},
    "hosts": {"collectives"},
    "session": {"collectives", "recovery", "workload", "hosts"},
    "adapters": {"session", "collectives", "recovery", "workload"},
    "examples": {"workload"},
    "plots": set(),
    "record": {"workload", "plots"},
    "data": set(),
    "goodput": {"recovery", "workload", "plots"},
    "launch": {"session", "collectives", "hosts", "record"},
    "cli": {"adapters", "launch", "record", "data", "goodput"},
    "testing": {"adapters", "session", "collectives", "recovery", "workload", "record", "data"},
}
OWNERS = {  # outside library -> the only places that may import it
    "mpi4py": {"collectives/openmpi.py"},
    "megatron": {"adapters/megatron/", "examples/gpt/", "data/prepare_data.py"},
    "torch": {"adapters/megatron/", "session/", "examples/gpt/", "launch/plan.py"},
    "matplotlib": {"plots.py"},
    "jinja2": {"record/report.py"},
    "yaml": {"launch/run_config.py", "goodput/simulate.py"},
    "rich": {
        "launch/doctor.py",
        "data/prepare_c4.py",
        "testing/rehearsal.py",
        "goodput/simulate.py",
        "record/status.py",
    },
    "tokenizers": {"data/prepare_data.py"},
}
PURE = [
    "recovery/machine.py",
    *(f"workload/{n}.py" for n in ("assignment", "policy", "samples")),
    *(f"goodput/{n}.py" for n in ("costs", "run")),
]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down_only(path: Path):
    layer = name(path).split("/")[0].removesuffix(".py")
    allowed = MAY_IMPORT.get(layer, set()) | {layer} | FOUNDATION
    if layer in FOUNDATION:
        allowed = FOUNDATION
    if layer in ("__init__", "__main__"):
        allowed = {"adapters"}
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "recover_megatron" and len(parts) > 1:
            assert parts[1] in allowed, f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_outside_libraries_have_owners(path: Path):
    for module in imports(path):
        owners = OWNERS.get(module.split(".")[0])
        assert owners is None or any(name(path).startswith(o) for o in owners), module


@pytest.mark.parametrize("file", PURE)
def test_decisions_need_the_standard_library_only(file: str):
    for module in imports(PACKAGE / file):
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names or top == "recover_megatron"
        assert top not in {"time", "random", "os", "socket", "threading"}, module


def test_importing_the_package_has_no_effect():
    code = (
        "import sys, recover_megatron as r; r.install()\n"
        "print('torch' in sys.modules or 'mpi4py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("tool", ["ruff-check", "ruff-format", "mypy"])
def test_the_code_is_clean(tool: str):
    commands = {
        "ruff-check": ["ruff", "check", "."],
        "ruff-format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy"],
    }
    done = subprocess.run(
        [sys.executable, "-m", *commands[tool]], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_functions_stay_short():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= 70, f"{name(path)}: {node.name} has {lines} lines"


MEGATRONS_SIGNATURES = {"save_checkpoint_and_time", "checkpoint_and_decide_exit"}


def test_functions_take_at_most_five_parameters():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in MEGATRONS_SIGNATURES:
                positional = [*node.args.posonlyargs, *node.args.args]
                names = [each.arg for each in positional if each.arg not in ("self", "cls")]
                assert len(names) <= 5, f"{name(path)}: {node.name} takes {names}"
