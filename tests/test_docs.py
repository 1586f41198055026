"""The pages name what is there: messages of the code, files, flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recover_megatron.session.arguments import recovery_flags

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md")])


def literals() -> str:
    """All string literals of the package, adjacent ones joined as Python joins them."""
    source = "\n".join(p.read_text() for p in (ROOT / "recover_megatron").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_each_message_in_troubleshooting_is_in_the_code():
    text, code = (ROOT / "docs" / "troubleshooting.md").read_text(), literals()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row):
            assert message in code, message


def test_each_flag_is_described():
    text = (ROOT / "docs" / "flags.md").read_text()
    for flag in recovery_flags():
        assert f"`{flag}" in text, flag


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


# Named in our sources, but not ours, or made by a run.
OUTSIDE = {
    *("pretrain_gpt.py", "schedules.py", "router.py", "moe_utils.py", "param_and_grad_buffer.py"),
    *("multi_token_prediction.py", "data_samplers.py", "finalize_model_grads.py", "index.html"),
    *("sitecustomize.py", "README.md", "clip_grads.py"),
}
SOURCES = sorted(
    path
    for folder in ("recover_megatron", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_each_page_and_file_that_a_source_names_exists(source: Path):
    """By the end of its path: `machine.py`, `recovery/machine.py`, `docs/log.md`."""
    there = FILES_THERE
    for name in re.findall(
        r"(?<![\w/.<{-])[\w./-]*\w\.(?:py|md|sh|yaml|tsv|html)\b", source.read_text()
    ):
        if Path(name).name not in OUTSIDE:
            assert any(f"/{path}".endswith(f"/{name.lstrip('./')}") for path in there), name


FILES_THERE = [
    path.relative_to(ROOT).as_posix()
    for path in ROOT.rglob("*")
    if path.suffix in (".py", ".md", ".sh", ".yaml", ".tsv", ".html")
    and not {".venv", "runs", ".git"} & set(path.relative_to(ROOT).parts)
]
