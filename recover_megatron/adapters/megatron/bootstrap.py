"""Runs a Megatron training script unchanged, with or without recovery.

    python -m recover_megatron pretrain_gpt.py <Megatron flags> --recover ...

Without `--recover` the script runs as if started by python itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from recover_megatron import mark_started
from recover_megatron.adapters.megatron.command_line import read_job, split_arguments
from recover_megatron.errors import (
    ConfigError,
    NoQuorum,
    StopRequested,
    TooFewReplicas,
    Unrecoverable,
)
from recover_megatron.session import leaving
from recover_megatron.session.arguments import wants_recovery
from recover_megatron.session.exits import (
    EXIT_CONFIG,
    EXIT_STOPPED,
    EXIT_TOO_FEW,
    EXIT_UNRECOVERABLE,
)
from recover_megatron.session.session import Session
from recover_megatron.session.start import start

_STOPS = (
    (TooFewReplicas, EXIT_TOO_FEW),
    (Unrecoverable, EXIT_UNRECOVERABLE),
    (StopRequested, EXIT_STOPPED),
)
_EXAMPLE = "recover_megatron.examples.gpt"  # its modules bear megatron.training's names


def main(argv: Sequence[str], namespace: dict[str, Any]) -> None:
    """`argv` is the script and its flags; `namespace` the dict of the __main__ module to run it in.

    It must be a package's `__main__`: processes that multiprocessing spawns (Megatron's checkpoint
    writer does) skip such a main module, and would otherwise run the whole script again.
    """
    try:
        script, flags, platform = split_arguments(argv)
        mark_started()
        sys.argv = [script, *flags]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        if not wants_recovery(flags):
            with _quick_imports():
                _platform(script, platform)
    except ConfigError as error:
        sys.exit(f"recover: error: {error}")
    if wants_recovery(flags):
        _run_recovering(script, flags, platform, namespace)
    try:
        _run(script, namespace)
    except ConfigError as error:
        sys.exit(f"recover: error: {error}")


def _run_recovering(
    script: str, flags: Sequence[str], platform: str, namespace: dict[str, Any]
) -> NoReturn:
    """Every way out of the script is turned into one that peers notice."""
    session = None
    try:
        with _quick_imports():
            session = start(read_job(flags))
            _platform(script, platform)
            modules = hooked_modules(script)
        from recover_megatron.adapters.megatron.hooks import Hooks

        Hooks(session, modules).install()
        _run(script, namespace)
    except SystemExit as end:
        finish(session, end.code, f"by sys.exit({end.code!r})")
    except ConfigError as error:
        _say(f"error: {error}", session)
        finish(session, EXIT_CONFIG, f"with an error: {error}")
    except (Unrecoverable, StopRequested) as error:
        _say(f"stopped: {error}", session)
        finish(session, next(code for kind, code in _STOPS if isinstance(error, kind)))
    except NoQuorum as error:
        if session is not None and session.watch.on_host is not None:
            session.watch.on_host.had_no_quorum()
        leaving.die(session, error)
    except BaseException as error:
        leaving.save_if_last(session)
        leaving.die(session, error)
    finish(session, 0, "at the end of its script")


def finish(session: Session | None, code: Any, how: str = "") -> NoReturn:
    """End with `code`, which may be anything that sys.exit takes. `how` is for an end that the
    world may not have agreed on."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    number = code if isinstance(code, int) else int(code is not None)
    if session is None:
        # mpirun ends the job at the first code that is not 0: it must be the rank that has spoken.
        sys.exit(number if _speaks(None) else 0)
    leaving.finish(session, number & 0xFF, "" if session.progress.over else how)


@contextlib.contextmanager
def _quick_imports() -> Iterator[None]:
    """Importing torch and Megatron makes a million objects that stay. To look for garbage among
    them takes a sixth of the time; nor is it looked for there later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_ours(script: str) -> bool:
    ours = importlib.util.find_spec(f"{_EXAMPLE}.pretrain")
    return ours is not None and ours.origin is not None and os.path.samefile(script, ours.origin)


def _platform(script: str, platform: str) -> None:
    if platform == "cpu":
        from recover_megatron.adapters.megatron import cpu

        cpu.install_torch()
        cpu.install_core()
        if not is_ours(script):
            _import_training(script)
            cpu.install_training()


def _import_training(script: str) -> None:
    try:
        importlib.import_module("megatron.training.training")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.training"):
            raise
        raise ConfigError(
            f"{script} needs megatron.training, which is not on the import path; run it from a "
            "Megatron-LM checkout or set PYTHONPATH to one"
        ) from None


def hooked_modules(script: str) -> Any:
    """Of the script's Megatron, which has been imported."""
    from recover_megatron.adapters.megatron.modules import MegatronModules

    package = _EXAMPLE if is_ours(script) else "megatron.training"
    if package != _EXAMPLE:
        _import_training(script)
    training, arguments, initialize, writers, checkpointing = (
        importlib.import_module(f"{package}.{name}")
        for name in ("training", "arguments", "initialize", "global_vars", "checkpointing")
    )
    holders = tuple(m for m in (arguments, initialize) if hasattr(m, "validate_args"))
    return MegatronModules(training, arguments, holders, writers, checkpointing)


def _run(script: str, namespace: dict[str, Any]) -> None:
    namespace["__file__"] = script
    with open(script, "rb") as source:
        code = compile(source.read(), script, "exec")
    exec(code, namespace)


def _speaks(session: Session | None) -> bool:
    """One rank tells the user: the leader's first, or one a host before the job has begun."""
    if session is None:
        return os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0") == "0"
    return session.speaks


def _say(message: str, session: Session | None) -> None:
    if _speaks(session):
        print(f"recover: {message}", file=sys.stderr, flush=True)
