"""Megatron's log line, TensorBoard and W&B for the whole job, from the lowest live replica."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recover_megatron.adapters.megatron.modules import MegatronModules
from recover_megatron.session.session import Session
from recover_megatron.session.writers import LeadersWriter
from recover_megatron.world import World


class Logs:
    """One per process. `megatron.writers` is the module with Megatron's global writers."""

    def __init__(self, session: Session, megatron: MegatronModules):
        self._session = session
        self._megatron = megatron
        self._writers = megatron.writers
        self._tensorboard: LeadersWriter | None = None
        self._wandb: LeadersWriter | None = None
        self._repair_s = 0.0  # of the driver's, what has been logged
        self._suffix = ""  # of the line that training_log prints
        session.world.on_change(self._follow)

    def training_log(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        session, settings = self._session, self._megatron.args
        world, driver = session.world.now, session.driver
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
        settings = self._megatron.args
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
