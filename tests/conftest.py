"""Shared fixtures: the corpus, run folders, and a Megatron-LM checkout where there is one."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
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


@pytest.hookimpl(tryfirst=True)  # before fixtures that start jobs
def pytest_runtest_setup(item):
    """Jobs begin quickly, and the other tests leave the cores to them."""
    _begin_quickly("mpi" in item.keywords and "native" not in item.keywords)
    if "PYTEST_XDIST_WORKER" in os.environ:
        beside = item.get_closest_marker("xdist_group") is None
        with contextlib.suppress(PermissionError):  # only root can go back
            os.setpriority(os.PRIO_PROCESS, 0, 10 if beside else 0)


# --- ranks that are forked from a template (tests/jobs/template/server.py) ------------------------

_TEMPLATE = Path(__file__).with_name("jobs") / "template"
_template: tuple[subprocess.Popen, Path] | None = None
_path = os.environ.get("PYTHONPATH", "")


def _begin_quickly(quickly: bool) -> None:
    """For the jobs of the test that begins now."""
    os.environ["PYTHONPATH"] = f"{_TEMPLATE}{os.pathsep}{_path}" if quickly else _path
    os.environ.pop("RECOVER_TEST_TEMPLATE", None)
    if quickly:
        os.environ["RECOVER_TEST_TEMPLATE"] = str(_template_socket())


def _template_socket() -> Path:
    """Of the template, which is started with the first job."""
    global _template
    if _template is None:
        socket = Path(tempfile.mkdtemp(prefix="recover-template-")) / "socket"
        command = [sys.executable, str(_TEMPLATE / "server.py"), str(socket)]
        _template = subprocess.Popen(command, env=environment()), socket
        limit = time.monotonic() + 120
        while not socket.exists():
            assert _template[0].poll() is None, "the template of a rank did not start"
            assert time.monotonic() < limit, "no template of a rank"
            time.sleep(0.05)
    return _template[1]


def pytest_sessionfinish(session):
    if _template is not None:
        _template[0].kill()
        _template[0].wait()
        shutil.rmtree(_template[1].parent, ignore_errors=True)


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
