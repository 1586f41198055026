"""Hook E and the end: who saves, what a failed save costs (nothing), and when the whole job stops.

A replica holds everything, so the lowest live one saves the whole checkpoint alone, in Megatron's
own format. The others go on; their next reduction waits for it.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from recover_megatron.adapters.megatron.data import MicrobatchFeed, save_streams
from recover_megatron.adapters.megatron.replicas import any_in_replica, check_replicas
from recover_megatron.adapters.megatron.session import Session
from recover_megatron.collectives.guard import OUT_OF_TIME, SIGNALLED
from recover_megatron.errors import StopRequested, TooFewReplicas

logger = logging.getLogger(__name__)

_PROBE_BYTES = 1 << 16
_OTHERS_FAIL_S = 30.0  # within which an error that all ranks meet is met by all


class Checkpoints:
    """One per process. `training` holds Megatron's save_checkpoint_and_time."""

    def __init__(self, session: Session, training: ModuleType, feed: MicrobatchFeed):
        self._session = session
        self._training = training
        self._feed = feed
        self._started = time.monotonic()
        self._limit_s: float | None = None  # --exit-duration-in-mins
        self._insisting = False  # the present save is repeated until its leader has survived it
        self._tracker: Path | None = None  # of the present save, at the rank that writes it
        self._redirecting = False  # the tracker's name is that of its unpublished copy
        self._failure: BaseException | None = None  # of the save that was begun last
        self._saves = 0  # begun by this replica
        self._rescuing = False  # the present save is that of a broken replica, the last one
        self._at: dict[str, Any] = {}  # what Megatron passes after each iteration
        session.rescue = self._rescue
        self.saved: int | None = None  # the last iteration that this rank knows to be saved

    # --- saving --------------------------------------------------------------------------------

    def save_checkpoint(self, stock: Callable[..., Any], *args: Any, **more: Any) -> None:
        """A save that fails is a warning. The last one of a job is repeated by the next leader if
        the leader dies in it, so every rank then waits for it."""
        if self._rescuing:
            stock(*args, **more)
            return
        bound = inspect.signature(stock).bind(*args, **more).arguments
        if bound["iteration"] == self._session.args.train_iters:
            self._insisting = True
        driver, saved_by = self._session.driver, None
        while saved_by != driver.world.leader:
            saved_by = driver.world.leader
            self._save_if_leading(lambda: stock(*args, **more), bound)
            if not self._insisting:
                return
            with self._session.waiting_for_peers():
                driver.guarded("save", lambda: None)

    def _save_if_leading(self, save: Callable[[], Any], bound: dict[str, Any]) -> None:
        session, iteration = self._session, bound["iteration"]
        if not session.leading:
            return
        failure = self._no_room(bound["model"])
        if any_in_replica(failure is not None):
            self._give_up(iteration, failure or OSError("another rank of the replica cannot write"))
            return
        session.injector.enter("save")
        self._failure, self._tracker, self._redirecting = None, None, True
        self._saves += 1
        try:
            save()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if not self._all_ranks_failed():
                raise
            self._failure = error
        finally:
            self._redirecting = False
        if self._failure is None:
            self._save_streams(iteration)  # before the checkpoint is announced
        if getattr(session.args, "async_save", False) and self._failure is None:
            if self._insisting:
                self._training.maybe_finalize_async_save(blocking=True)
        else:
            self._publish(iteration)
        session.injector.leave("save")

    def _save_streams(self, iteration: int) -> None:
        session, streams = self._session, self._feed.streams
        if streams is None or session.position != 0:
            return
        try:
            save_streams(session.args.save, iteration, streams)
        except OSError as error:
            session.terminal.warn(
                "streams",
                f"the positions of the sample streams at iteration {iteration} cannot be saved "
                f"({error}): a job that resumes from it goes on as if none had been lost",
            )

    def finalize_async_save(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Megatron looks here, after each iteration, whether an asynchronous save has ended."""
        result = stock(*args, **more)
        if getattr(self._session.args, "async_save", False) and self._tracker is not None:
            written = _text(_unpublished(self._tracker))
            if written not in ("", _NONE, _text(self._tracker)):
                self._publish(int(written))
        return result

    def _give_up(self, iteration: int, error: BaseException) -> None:
        session = self._session
        if session.position == 0:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            logger.warning(
                "recover: no checkpoint of iteration %d: %s; training goes on, and the next save "
                "is tried at its time",
                iteration,
                reason,
            )
            session.trace.emit("save_failed", iteration=iteration, reason=reason)

    def _no_room(self, model: Any) -> OSError | None:
        """Why this rank could not write its part of a checkpoint, None if it can. Asked before the
        save, because Megatron's ranks do not learn of each other's failures in the middle of it.
        All ranks of the replica call it."""
        parameters = [p for chunk in model for p in chunk.parameters()]
        # Weights; the optimizer's two moments, and its float32 copy of what is not float32.
        size = sum(p.numel() * p.element_size() for p in parameters)
        if not getattr(self._session.args, "no_save_optim", False):
            size += sum(p.numel() * (8 if p.element_size() == 4 else 12) for p in parameters)
        size //= max(1, self._session.args.data_parallel_size)
        total = torch.tensor([size], dtype=torch.int64, device=torch.cuda.current_device())
        torch.distributed.all_reduce(total)
        save = self._session.args.save
        if "://" in save:
            return None  # not a file system
        try:
            Path(save).mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(save).free
            if free < int(total):
                return OSError(f"{save} has {free} bytes free, about {int(total)} are needed")
            # Made anew under a name that nobody can foresee: no link planted there is followed.
            with tempfile.NamedTemporaryFile(dir=save, prefix=".recover_probe.") as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            return error
        return None

    # --- what fails in the middle of a save ------------------------------------------------------

    def _all_ranks_failed(self) -> bool:
        """This rank has left the save by an exception. If all ranks of the replica have, nobody
        waits for anybody, and training can go on."""
        return self._all_ranks_say(f"save_failed/{self._saves}")

    def _all_ranks_say(self, what: str) -> bool:
        """Asked by the replica's store: a collective would not meet the one that another rank may
        still be in."""
        store = torch.distributed.distributed_c10d._get_default_store()
        ranks = range(torch.distributed.get_world_size())
        keys = [f"recover/{what}/{rank}" for rank in ranks]
        store.set(keys[torch.distributed.get_rank()], "1")
        try:
            store.wait(keys, timedelta(seconds=_OTHERS_FAIL_S))
        except RuntimeError:  # torch's DistStoreError
            return False
        return True

    def _rescue(self) -> None:
        """Save the last committed iteration, which this replica, the last one, still holds, though
        an exception has ended its training. Only if it has ended that of all its ranks."""
        session, bound = self._session, self._at
        if not (session.holds_iteration and bound and session.args.save):
            return
        iteration = bound["iteration"]
        if self.saved == iteration or not self._all_ranks_say("broken"):
            return
        session.watchdog.between()
        self._rescuing, self._failure = True, None
        self._save_streams(iteration)
        self._save(bound)
        if self._failure is None and session.position == 0:
            session.trace.emit("rescued", iteration=iteration, save=session.args.save)

    def deferring(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Around the parts of a save that write a file at position 0 alone and meet no other rank
        afterwards: an error is noted, and told once all ranks have left the save."""
        try:
            return stock(*args, **more)
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            self._failure = error
            if self._tracker is not None:  # an asynchronous save
                _unpublished(self._tracker).write_text(_NONE)
            return None

    def tracker_filename(self, stock: Callable[..., str], *args: Any, **more: Any) -> str:
        """Megatron writes the tracker file in place: in a save it is given the name of a copy,
        which is moved once all ranks have left the save."""
        name = stock(*args, **more)
        if not self._redirecting or self._session.position or "://" in name:
            return name
        copy = _unpublished(Path(name))
        if self._tracker is None:
            self._tracker = Path(name)
            # Megatron looks which was the last (--save-retain-interval), and may delete it.
            copy.write_text(_NONE if self._failure else _text(self._tracker) or _NONE)
        return str(copy)

    def _publish(self, iteration: int) -> None:
        """All ranks have left the save of `iteration`."""
        failure, self._failure = self._failure, None
        if failure is None:
            try:
                if self._tracker is not None:
                    os.replace(_unpublished(self._tracker), self._tracker)
                self.saved = iteration
            except OSError as error:  # the checkpoint is whole, but not the one that counts
                self._give_up(iteration, error)
            return
        if self._tracker is not None:
            _unpublished(self._tracker).unlink(missing_ok=True)
            shutil.rmtree(self._tracker.parent / f"iter_{iteration:07d}", ignore_errors=True)
        self._give_up(iteration, failure)

    # --- the end -------------------------------------------------------------------------------

    def take_over_exits(self, args: Any) -> None:
        """Megatron's own exits by time and by signal are one replica's decision; here all agree."""
        minutes = getattr(args, "exit_duration_in_mins", None)
        self._limit_s = None if minutes is None else 60.0 * minutes
        args.exit_duration_in_mins = None
        handlers = ("exit_signal_handler", "exit_signal_handler_for_training")
        asked = [name for name in handlers if getattr(args, name, False)]
        for name in asked:
            setattr(args, name, False)
        if asked:
            number = getattr(args, "exit_signal", signal.SIGTERM)
            ask = self._session.communicator.ask_to_stop
            signal.signal(number, lambda *_: ask(SIGNALLED))

    def checkpoint_and_decide_exit(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        session, config, settings = self._session, self._session.config, self._session.args
        bound = inspect.signature(stock).bind(*args, **more).arguments
        iteration = bound["iteration"]
        self._at, session.holds_iteration = bound, True
        session.ending = iteration == settings.train_iters
        self._check_replicas(bound["model"], iteration)
        live = session.driver.world.replicas
        if len(live) < config.min_replicas:
            raise TooFewReplicas(
                f"only {len(live)} of {session.layout.replicas} replicas are left after iteration "
                f"{iteration}, fewer than --recover-min-replicas {config.min_replicas}; "
                + self._save_before_stop(bound)
            )
        if session.communicator.stopping & SIGNALLED:
            raise StopRequested(
                f"by a signal, after iteration {iteration}; {self._save_before_stop(bound)}"
            )
        if self._limit_s is not None and time.monotonic() - self._started > self._limit_s:
            session.communicator.ask_to_stop(OUT_OF_TIME)
        interval = getattr(settings, "exit_interval", None)
        self._insisting = bool(interval) and iteration % interval == 0
        if session.communicator.stopping & OUT_OF_TIME:
            settings.exit_duration_in_mins = 1e-9  # now at every rank
            self._insisting = True
        try:
            leaves = stock(*args, **more)
        finally:
            self._insisting = False
        session.ending = session.ending or bool(leaves)
        return leaves

    def _check_replicas(self, model: Any, iteration: int) -> None:
        session, interval = self._session, self._session.config.check_replicas_interval
        last = iteration == session.args.train_iters
        if interval and (last or iteration % interval == 0):
            facts = (session.communicator, session.layout, session.replica_id, model, iteration)
            with session.waiting_for_peers():
                mine = check_replicas(session.driver, *facts)
            session.trace.emit("parameters", iteration=iteration, fingerprint=f"{mine:014x}")

    def _save_before_stop(self, bound: dict[str, Any]) -> str:
        """What the leader then says about the checkpoint."""
        iteration, save = bound["iteration"], self._session.args.save
        if not save:
            return "without --save there is no checkpoint"
        self._insisting = True
        self._save(bound)
        if self.saved != iteration:
            return f"no checkpoint of it could be saved in {save}; the one before counts"
        return f"the checkpoint of iteration {iteration} is in {save}"

    def _save(self, bound: dict[str, Any]) -> None:
        """By Megatron's own function, of what it passes after an iteration."""
        self._training.save_checkpoint_and_time(
            bound["iteration"],
            bound["model"],
            bound["optimizer"],
            bound["opt_param_scheduler"],
            bound["num_floating_point_operations_so_far"],
            bound["checkpointing_context"],
            train_data_iterator=bound["train_data_iterator"],
        )


_NONE = "0"  # what an unpublished tracker file says as long as nothing was saved


def _unpublished(tracker: Path) -> Path:
    return tracker.with_name(tracker.name + ".unpublished")


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
