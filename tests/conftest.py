"""Shared fixtures: the corpus, run folders, and a Megatron-LM checkout where there is one."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path

import pytest

from recover_megatron.testing.rehearsal import (
    MEGATRON_LM_PATH,
    SCRIPT,
    corpus,
    environment,
    run_job,
)

NO_CHECKOUT = f"{MEGATRON_LM_PATH} names no Megatron-LM checkout"


@pytest.hookimpl(wrapper=True)  # before pytest-xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """With pytest-xdist: jobs, and what is about seconds, one after the other."""
    for item in items:
        if item.get_closest_marker("mpi") or item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.xdist_group("one at a time"))
    return (yield)


def pytest_runtest_setup(item):
    """The others leave the cores to them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        beside = item.get_closest_marker("xdist_group") is None
        with contextlib.suppress(PermissionError):  # only root can go back
            os.setpriority(os.PRIO_PROCESS, 0, 10 if beside else 0)


def checkout() -> Path | None:
    path = os.environ.get(MEGATRON_LM_PATH)
    return Path(path) if path and (Path(path) / "pretrain_gpt.py").is_file() else None


@pytest.fixture(scope="session")
def data_prefix() -> str:
    """The standard library's text; kept between runs of the suite."""
    return corpus(Path(__file__).resolve().parent.parent / "runs" / "data")


@pytest.fixture(
    params=["pretrain.py", pytest.param("pretrain_gpt.py", marks=pytest.mark.megatron_lm)]
)
def script(request) -> str:
    """Both training scripts: our own, and Megatron-LM's where a checkout is at hand."""
    if request.param == "pretrain.py":
        return SCRIPT
    path = checkout()
    if path is None:
        pytest.skip(NO_CHECKOUT)
    return str(path / "pretrain_gpt.py")


@pytest.fixture
def megatron_lm(monkeypatch):
    """Imports a module of the checkout, on the CPU platform, in this process."""
    path = checkout()
    if path is None:
        pytest.skip(NO_CHECKOUT)

    def load(module: str):
        from recover_megatron.adapters.megatron import cpu

        cpu.install_torch()
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
            sys.modules.pop("megatron", None)
        return importlib.import_module(module)

    return load


@pytest.fixture
def run(tmp_path):
    """Runs a command; returns its exit code and output."""

    def start(command, name="job"):
        log = tmp_path / f"{name}.log"
        code = run_job([str(word) for word in command], log)
        return code, log.read_text()

    return start


@pytest.fixture
def env() -> dict[str, str]:
    return environment()
