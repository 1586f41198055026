"""Hook E, the end: when the whole job stops, and what is saved before."""

from __future__ import annotations

import functools
import inspect
import signal
import time
from collections.abc import Callable
from typing import Any

from recover_megatron.adapters.megatron.checkpoints import Checkpoints, Mode
from recover_megatron.adapters.megatron.modules import MegatronModules
from recover_megatron.collectives.guard import OUT_OF_TIME, SIGNALLED
from recover_megatron.errors import StopRequested, TooFewReplicas
from recover_megatron.events import Parameters
from recover_megatron.session.peers import Peers
from recover_megatron.session.session import Session


class Exits:
    """One per process. Megatron's own exits by time and by signal are one replica's decision; here
    all agree."""

    def __init__(
        self, session: Session, megatron: MegatronModules, checkpoints: Checkpoints, peers: Peers
    ):
        self._session, self._megatron = session, megatron
        self._checkpoints, self._peers = checkpoints, peers
        self._started = time.monotonic()
        self._limit_s: float | None = None  # --exit-duration-in-mins

    def take_over(self, args: Any) -> None:
        """Megatron has validated its arguments."""
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
        """Megatron asks after each iteration whether to save and whether to leave."""
        session, settings = self._session, self._megatron.args
        bound = inspect.signature(stock).bind(*args, **more).arguments
        iteration, progress = bound["iteration"], session.progress
        progress.holds(functools.partial(self._checkpoints.rescue, bound))
        if iteration == settings.train_iters:
            progress.ends()
        self._check_replicas(bound["model"], iteration)
        self._stop_if_asked(bound)
        if self._limit_s is not None and time.monotonic() - self._started > self._limit_s:
            session.communicator.ask_to_stop(OUT_OF_TIME)
        interval = getattr(settings, "exit_interval", None)
        leaves = bool(interval) and iteration % interval == 0
        if session.communicator.stopping & OUT_OF_TIME:
            settings.exit_duration_in_mins = 1e-9  # now at every rank
            leaves = True
        with self._checkpoints.mode(Mode.REPEATED if leaves else Mode.ALONE):
            answer = stock(*args, **more)
        if answer:
            progress.ends()
        return answer

    def _stop_if_asked(self, bound: dict[str, Any]) -> None:
        """Raises TooFewReplicas or StopRequested, at every rank, with a checkpoint saved."""
        session, config, iteration = self._session, self._session.config, bound["iteration"]
        live = session.world.now.replicas
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

    def _check_replicas(self, model: Any, iteration: int) -> None:
        session, interval = self._session, self._session.config.check_replicas_interval
        last = iteration == self._megatron.args.train_iters
        if interval and (last or iteration % interval == 0):
            with session.waiting_for_peers():
                parameters = (p for chunk in model for p in chunk.parameters())
                mine = self._peers.check_parameters(parameters, iteration)
            session.trace.emit(Parameters(iteration=iteration, fingerprint=f"{mine:014x}"))

    def _save_before_stop(self, bound: dict[str, Any]) -> str:
        """What the leader then says about the checkpoint."""
        iteration, save = bound["iteration"], self._megatron.args.save
        if not save:
            return "without --save there is no checkpoint"
        self._checkpoints.save(bound, Mode.REPEATED)
        if self._checkpoints.saved != iteration:
            return f"no checkpoint of it could be saved in {save}; the one before counts"
        return f"the checkpoint of iteration {iteration} is in {save}"
