"""Megatron's log line, TensorBoard and W&B for the whole job, from the lowest live replica."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from recover_megatron.adapters.megatron.session import Session
from recover_megatron.world import World

_Call = tuple[tuple[str, ...], tuple[Any, ...], dict[str, Any]]


class LeadersWriter:
    """Stands in for a TensorBoard or W&B writer in every replica. The leader's calls go to the real
    one, which `make` opens; the others' are kept for two logged iterations, and made by the replica
    that comes to lead. So no value is lost; some may be written twice.

    The real one may fail at any moment (a full disk, a folder that cannot be made, a missing
    package): `failed` is told, training goes on, and at later logs, ever fewer, it is opened anew,
    and what it should have written is written, up to KEPT logs back.

    Any method may be called on it, also on its attributes (`writer.config.update(...)`).
    """

    KEPT = 1000

    def __init__(self, make: Callable[[], Any], failed: Callable[[Exception], None]):
        self._make = make
        self._failed = failed
        self._writer: Any = None  # the real one, while it works
        self._leading = False
        self._failures = 0  # since it worked last
        self._wait = 0  # logs, until it is tried again
        self._kept: deque[list[_Call]] = deque([[]], maxlen=self.KEPT)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, (name,))

    def begin_log(self) -> None:
        """The log of an iteration begins."""
        self._kept.append([])
        if not self._leading:
            while len(self._kept) > 2:
                self._kept.popleft()

    def end_log(self) -> None:
        """What the leader wrote must outlive it."""
        self._wait -= 1
        if not self._leading or self._wait > 0:
            return
        with self._unharmed():
            if self._writer is None:
                self._writer = self._make()
                for call in [call for calls in self._kept for call in calls]:
                    self._do(*call)
            if hasattr(self._writer, "flush"):
                self._writer.flush()
            while len(self._kept) > 1:  # written
                self._kept.popleft()
            self._failures = 0

    def lead(self) -> None:
        """From now on this rank's calls are the job's. Does nothing the second time."""
        if not self._leading:
            self._leading = True
            self.end_log()

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever a writer raises, it only tells
            self._writer = None
            self._failures += 1
            self._wait = min(2**self._failures, 64)
            self._failed(error)

    def call(self, path: Sequence[str], args: Sequence[Any], more: dict[str, Any]) -> Any:
        """What stands for the real writer's method at `path`."""
        self._kept[-1].append((tuple(path), tuple(args), more))
        if self._leading and self._writer is not None:
            with self._unharmed():
                return self._do(path, args, more)
        return None

    def _do(self, path: Sequence[str], args: Sequence[Any], more: dict[str, Any]) -> Any:
        target = self._writer
        for name in path:
            target = getattr(target, name) if target is not None else None
        return None if target is None else target(*args, **more)


class _Method:
    def __init__(self, writer: LeadersWriter, path: tuple[str, ...]):
        self._writer, self._path = writer, path

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._writer, (*self._path, name))

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._writer.call(self._path, args, more)


class Logs:
    """One per process. `writers` is the module with Megatron's global writers."""

    def __init__(self, session: Session, writers: ModuleType):
        self._session = session
        self._writers = writers
        self._tensorboard: LeadersWriter | None = None
        self._wandb: LeadersWriter | None = None
        self._repair_s = 0.0  # of the driver's, what has been logged
        self._suffix = ""  # of the line that training_log prints
        session.driver.on_repair(self._follow)

    def training_log(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        session, settings = self._session, self._session.args
        world, driver = session.driver.world, session.driver
        iteration = inspect.signature(stock).bind(*args, **more).arguments["iteration"]
        for writer in self._open():
            writer.begin_log()
        live = {
            "live replicas": len(world.replicas),
            "world epoch": world.world_epoch,
            "repair time (ms)": round(1000 * (driver.repair_s - self._repair_s), 1),
        }
        self._suffix = "".join(f" {name}: {value} |" for name, value in live.items())
        with self._of_job(len(world.replicas)):
            result = stock(*args, **more)
        self._suffix = ""
        if iteration % settings.log_interval == 0:
            self._repair_s = driver.repair_s
        if iteration % getattr(settings, "tensorboard_log_interval", 1) == 0:
            self._write(live, iteration)
        for writer in self._open():
            writer.end_log()
        return result

    def only_by_leader(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Around a function that all ranks of a replica call and that writes to progress.txt, whose
        lines Megatron reads again by the number of GPUs that the job was started with."""
        if not self._session.leading:
            return None
        try:
            with self._of_job(self._session.layout.replicas):
                return stock(*args, **more)
        except (OSError, ValueError) as error:  # position 0 writes, after all have met
            self._session.terminal.warn(
                "progress", f"progress.txt cannot be written ({error}): training goes on"
            )
            return None

    @contextlib.contextmanager
    def _of_job(self, replicas: int) -> Iterator[None]:
        """Megatron divides by args.world_size to get numbers per GPU: here by those of `replicas`
        replicas, not of one."""
        settings = self._session.args
        own = getattr(settings, "world_size", None)
        settings.world_size = replicas * self._session.layout.ranks_per_replica
        try:
            yield
        finally:
            settings.world_size = own

    def print_rank_last(self, stock: Callable[..., Any], message: str, *more: Any) -> Any:
        return stock(message + self._suffix, *more)

    def _write(self, values: dict[str, Any], iteration: int) -> None:
        named = {"recover/" + re.sub(r"[ ()]+", "-", k).strip("-"): v for k, v in values.items()}
        if self._wandb is not None:
            self._wandb.log(named, iteration)
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, iteration)

    def _open(self) -> list[LeadersWriter]:
        return [writer for writer in (self._tensorboard, self._wandb) if writer is not None]

    # --- the writers ---------------------------------------------------------------------------

    def set_tensorboard_writer(self, stock: Callable[..., None], args: Any) -> None:
        if getattr(args, "tensorboard_dir", None):
            self._tensorboard = self._stand_in(stock, args, "_GLOBAL_TENSORBOARD_WRITER")

    def set_wandb_writer(self, stock: Callable[..., None], args: Any) -> None:
        folder = self._session.config.trace_dir
        if not getattr(args, "wandb_project", ""):
            return
        if folder:  # the next leader goes on with the same run
            run_id = re.sub(r"[^A-Za-z0-9_-]", "-", Path(folder).resolve().name)
            os.environ.setdefault("WANDB_RUN_ID", run_id)
            os.environ.setdefault("WANDB_RESUME", "allow")
        self._wandb = self._stand_in(stock, args, "_GLOBAL_WANDB_WRITER")

    def _stand_in(self, stock: Callable[..., None], args: Any, name: str) -> LeadersWriter | None:
        """Megatron's writer is opened by its own function, and only where and when it leads."""
        if args.rank != args.world_size - 1:
            return None

        def make() -> Any:
            setattr(self._writers, name, None)
            stock(args)
            real = getattr(self._writers, name)
            setattr(self._writers, name, writer)
            return real

        def failed(error: Exception) -> None:
            said = f"{name.removeprefix('_GLOBAL_').lower()}: {type(error).__name__}: {error}"
            self._session.terminal.warn(name, f"{said}; training goes on without it")
            setattr(self._writers, name, writer)

        writer = LeadersWriter(make, failed)
        setattr(self._writers, name, writer)
        if self._session.leading:
            writer.lead()
        return writer

    def _follow(self, world: World) -> None:
        if self._session.leading:
            for writer in self._open():
                writer.lead()
