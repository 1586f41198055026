"""Hook E: who saves, and what a failed save costs (nothing).

A replica holds everything, so the lowest live one saves the whole checkpoint alone, in Megatron's
own format. The others go on; their next reduction waits for it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from recover_megatron.adapters.megatron.modules import MegatronModules
from recover_megatron.events import Rescued, SaveFailed
from recover_megatron.session.feeds import MicrobatchFeed
from recover_megatron.session.peers import any_in_replica
from recover_megatron.session.session import Session
from recover_megatron.session.streams import save_streams

logger = logging.getLogger(__name__)

_PROBE_BYTES = 1 << 16
_OTHERS_FAIL_S = 30.0  # within which an error that all ranks meet is met by all
_NONE = "0"  # what an unpublished tracker file says as long as nothing was saved


class Mode(Enum):
    """How a save is made."""

    ALONE = "by the leader, while the others go on"
    REPEATED = "by the next leader again, if the leader dies in it; so all wait for it"
    RESCUE = "by a broken replica, the last one"


class SaveAttempt:
    """One save of this replica's. Megatron writes the tracker file (which names the checkpoint that
    counts) in place. Here it gets the name of a copy, which is moved once all ranks have left the
    save, so that the tracker never names a checkpoint that is not whole."""

    def __init__(self, number: int = 0):
        self.number = number  # of this replica's saves, from 1; 0 before the first
        self.failure: BaseException | None = None
        self.tracker: Path | None = None  # at the rank that writes it
        self._inside = False  # the present call of Megatron's is a save

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around Megatron's own save."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def tracker_filename(self, name: str) -> str:
        """What Megatron shall write to, instead of `name`."""
        if not self._inside:
            return name
        copy = unpublished(Path(name))
        if self.tracker is None:
            self.tracker = Path(name)
            # Megatron looks which was the last (--save-retain-interval), and may delete it.
            copy.write_text(_NONE if self.failure else text_of(self.tracker) or _NONE)
        return str(copy)

    def fail(self, error: BaseException) -> None:
        """An error at this rank, while others may still be in the save."""
        self.failure = error
        if self.tracker is not None:  # an asynchronous save
            unpublished(self.tracker).write_text(_NONE)

    def written(self) -> int | None:
        """The iteration that an asynchronous save has written since it was begun."""
        if self.tracker is None:
            return None
        text = text_of(unpublished(self.tracker))
        return None if text in ("", _NONE, text_of(self.tracker)) else int(text)

    def publish(self, iteration: int) -> BaseException | None:
        """All ranks have left the save of `iteration`: its checkpoint counts from now on, or what
        there is of it is removed. Returns why it does not count."""
        failure, self.failure = self.failure, None
        if failure is None:
            try:
                if self.tracker is not None:
                    os.replace(unpublished(self.tracker), self.tracker)
            except OSError as error:  # the checkpoint is whole, but not the one that counts
                return error
            return None
        if self.tracker is not None:
            unpublished(self.tracker).unlink(missing_ok=True)
            shutil.rmtree(self.tracker.parent / f"iter_{iteration:07d}", ignore_errors=True)
        return failure


class Checkpoints:
    """One per process. `megatron.training` holds Megatron's save_checkpoint_and_time."""

    def __init__(self, session: Session, megatron: MegatronModules, feed: MicrobatchFeed):
        self._session = session
        self._megatron = megatron
        self._feed = feed
        self._attempt = SaveAttempt()
        self._mode = Mode.ALONE
        self.saved: int | None = None  # the last iteration that this rank knows to be saved

    # --- saving --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def mode(self, mode: Mode) -> Iterator[None]:
        """How the saves are made that Megatron begins inside; the same at all ranks."""
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def save(self, bound: dict[str, Any], mode: Mode) -> None:
        """By Megatron's own function, of what it passes after an iteration."""
        with self.mode(mode):
            self._megatron.training.save_checkpoint_and_time(
                bound["iteration"],
                bound["model"],
                bound["optimizer"],
                bound["opt_param_scheduler"],
                bound["num_floating_point_operations_so_far"],
                bound["checkpointing_context"],
                train_data_iterator=bound["train_data_iterator"],
            )

    def save_checkpoint(self, stock: Callable[..., Any], *args: Any, **more: Any) -> None:
        """A save that fails is a warning. The last one of a job is repeated."""
        if self._mode is Mode.RESCUE:
            stock(*args, **more)
            return
        bound = inspect.signature(stock).bind(*args, **more).arguments
        last = bound["iteration"] == self._megatron.args.train_iters
        mode = Mode.REPEATED if last else self._mode
        driver, saved_by = self._session.driver, None
        while saved_by != driver.world.leader:
            saved_by = driver.world.leader
            self._save_if_leading(lambda: stock(*args, **more), bound, mode)
            if mode is Mode.ALONE:
                return
            with self._session.waiting_for_peers():
                driver.guarded("save", lambda: None)

    def _save_if_leading(self, save: Callable[[], Any], bound: dict[str, Any], mode: Mode) -> None:
        session, iteration = self._session, bound["iteration"]
        if not session.leading:
            return
        failure = self._no_room(bound["model"])
        if any_in_replica(failure is not None):
            self._give_up(iteration, failure or OSError("another rank of the replica cannot write"))
            return
        session.injector.enter("save")
        self._attempt = attempt = SaveAttempt(self._attempt.number + 1)
        try:
            with attempt.inside():
                save()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if not self._all_ranks_say(f"save_failed/{attempt.number}"):
                raise
            attempt.failure = error
        if attempt.failure is None:
            self._save_streams(iteration)  # before the checkpoint is announced
        if getattr(self._megatron.args, "async_save", False) and attempt.failure is None:
            if mode is Mode.REPEATED:
                self._megatron.training.maybe_finalize_async_save(blocking=True)
        else:
            self._publish(iteration)
        session.injector.leave("save")

    def _save_streams(self, iteration: int) -> None:
        session, streams = self._session, self._feed.streams
        if streams is None or session.position != 0:
            return
        try:
            save_streams(self._megatron.args.save, iteration, streams)
        except OSError as error:
            session.terminal.warn(
                "streams",
                f"the positions of the sample streams at iteration {iteration} cannot be saved "
                f"({error}): a job that resumes from it goes on as if none had been lost",
            )

    def finalize_async_save(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Megatron looks here, after each iteration, whether an asynchronous save has ended."""
        result = stock(*args, **more)
        if getattr(self._megatron.args, "async_save", False):
            written = self._attempt.written()
            if written is not None:
                self._publish(written)
        return result

    def _publish(self, iteration: int) -> None:
        failure = self._attempt.publish(iteration)
        if failure is None:
            self.saved = iteration
        else:
            self._give_up(iteration, failure)

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
            session.trace.emit(SaveFailed(iteration=iteration, reason=reason))

    def _no_room(self, model: Any) -> OSError | None:
        """Why this rank could not write its part of a checkpoint, None if it can. Asked before the
        save, because Megatron's ranks do not learn of each other's failures in the middle of it.
        All ranks of the replica call it."""
        args = self._megatron.args
        parameters = [p for chunk in model for p in chunk.parameters()]
        # Weights; the optimizer's two moments, and its float32 copy of what is not float32.
        size = sum(p.numel() * p.element_size() for p in parameters)
        if not getattr(args, "no_save_optim", False):
            size += sum(p.numel() * (8 if p.element_size() == 4 else 12) for p in parameters)
        size //= max(1, args.data_parallel_size)
        total = torch.tensor([size], dtype=torch.int64, device=torch.cuda.current_device())
        torch.distributed.all_reduce(total)
        if "://" in args.save:
            return None  # not a file system
        try:
            Path(args.save).mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(args.save).free
            if free < int(total):
                return OSError(f"{args.save} has {free} bytes free, about {int(total)} are needed")
            # Made anew under a name that nobody can foresee: no link planted there is followed.
            with tempfile.NamedTemporaryFile(dir=args.save, prefix=".recover_probe.") as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            return error
        return None

    # --- what fails in the middle of a save ------------------------------------------------------

    def _all_ranks_say(self, what: str) -> bool:
        """True if all ranks of the replica have come here: then nobody waits for anybody, and
        training, or a rescue, can go on. Asked by the replica's store: a collective would not meet
        the one that another rank may still be in."""
        store = torch.distributed.distributed_c10d._get_default_store()
        ranks = range(torch.distributed.get_world_size())
        keys = [f"recover/{what}/{rank}" for rank in ranks]
        store.set(keys[torch.distributed.get_rank()], "1")
        try:
            store.wait(keys, timedelta(seconds=_OTHERS_FAIL_S))
        except RuntimeError:  # torch's DistStoreError
            return False
        return True

    def rescue(self, bound: dict[str, Any]) -> None:
        """Save the last committed iteration, which this replica, the last one, still holds, though
        an exception has ended its training. Only if it has ended that of all its ranks."""
        session, iteration, save = self._session, bound["iteration"], self._megatron.args.save
        if not save or self.saved == iteration or not self._all_ranks_say("broken"):
            return
        session.watchdog.between()
        self._attempt = attempt = SaveAttempt(self._attempt.number + 1)
        self._save_streams(iteration)
        self.save(bound, Mode.RESCUE)
        if attempt.failure is None and session.position == 0:
            session.trace.emit(Rescued(iteration=iteration, save=save))

    def deferring(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Around the parts of a save that write a file at position 0 alone and meet no other rank
        afterwards: an error is noted, and told once all ranks have left the save."""
        try:
            return stock(*args, **more)
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            self._attempt.fail(error)
            return None

    def tracker_filename(self, stock: Callable[..., str], *args: Any, **more: Any) -> str:
        """The tracker's name in a folder of checkpoints."""
        name = stock(*args, **more)
        if self._session.position or "://" in name:
            return name
        return self._attempt.tracker_filename(name)


def unpublished(tracker: Path) -> Path:
    """The copy of a tracker file that a save writes to."""
    return tracker.with_name(tracker.name + ".unpublished")


def text_of(path: Path) -> str:
    """Empty if there is no such file."""
    return path.read_text().strip() if path.is_file() else ""
