"""The hooks in Megatron's training loop: every name that is replaced, in one table.

`Host` names the modules that hold them: Megatron-LM's own `megatron.training`, or
`recover_megatron.pretrain`, whose functions bear the same names. Hook letters as in
`design/megatron-seams.md`, section 1.1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from recover_megatron.adapters.megatron.arguments import add_recovery_arguments, refuse_unsupported
from recover_megatron.adapters.megatron.data import MicrobatchFeed, load_streams, save_streams
from recover_megatron.adapters.megatron.gradients import GradientBuckets
from recover_megatron.adapters.megatron.iteration import Iteration
from recover_megatron.adapters.megatron.replicas import (
    any_in_replica,
    check_replicas,
    check_same_iteration,
)
from recover_megatron.adapters.megatron.session import Session
from recover_megatron.errors import ConfigError, InvariantViolation, StopRequested, Unrecoverable
from recover_megatron.workload.samples import sample_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """The modules whose global names are hooked. `validators` all hold a name `validate_args`."""

    training: ModuleType
    arguments: ModuleType
    validators: tuple[ModuleType, ...]


class Hooks:
    """Holds what the hooks share. `install` replaces the names, `uninstall` restores them."""

    def __init__(self, session: Session, host: Host):
        self._session = session
        self._host = host
        self._stock: dict[tuple[ModuleType, str], Any] = {}
        self._args: Any = None
        self._feed = MicrobatchFeed(session.replica_id)
        self._gradients: GradientBuckets | None = None
        self._microbatches: int | None = None  # B while training, None in evaluation
        self._captured: dict[str, Any] = {}  # what the schedule passed to finalize_model_grads
        self._forwards = self._backwards = 0

    def install(self) -> None:
        import megatron.core.pipeline_parallel.schedules as schedules

        training = self._host.training
        replace = self._replace
        replace(training, "get_forward_backward_func", self._get_forward_backward_func)  # A
        replace(training, "finalize_model_grads", self._finalize_model_grads)  # B
        replace(schedules, "forward_step_calc_loss", self._forward_step_calc_loss)  # C
        replace(training, "build_pretraining_data_loader", self._build_data_loader)  # D
        replace(training, "build_train_valid_test_data_loaders", self._build_data_loaders)
        replace(training, "save_checkpoint", self._save_checkpoint)  # E
        replace(training, "checkpoint_and_decide_exit", self._checkpoint_and_decide_exit)
        replace(self._host.arguments, "add_megatron_arguments", self._add_arguments)  # F
        for module in self._host.validators:
            replace(module, "validate_args", self._validate_args)
        if self._session.injector.plans("backward"):
            replace(schedules, "backward_step", self._backward_step)
        if self._session.injector.plans("optimizer"):
            self._watch_optimizer()

    def uninstall(self) -> None:
        for (module, name), stock in self._stock.items():
            setattr(module, name, stock)
        self._stock.clear()

    def _replace(self, module: ModuleType, name: str, hook: Callable[..., Any]) -> None:
        stock = getattr(module, name, None)
        if stock is None:
            raise ConfigError(
                f"{module.__name__} has no {name}: this version of Megatron is not supported"
            )
        self._stock[module, name] = stock
        bound = functools.partial(hook, stock)
        setattr(module, name, functools.update_wrapper(bound, stock))

    # --- F: arguments --------------------------------------------------------------------------

    def _add_arguments(self, stock: Callable[..., Any], parser: Any) -> Any:
        return add_recovery_arguments(stock(parser))

    def _validate_args(self, stock: Callable[..., Any], args: Any, *rest: Any, **more: Any) -> Any:
        result = stock(args, *rest, **more)
        self._args = args if result is None else result
        refuse_unsupported(self._args)
        if getattr(self._args, "rerun_mode", "disabled") != "disabled":
            # Its decision to repeat a step is one replica's: the others would wait for it.
            if self._session.leading and self._session.position == 0:
                logger.warning("--rerun-mode %s is set to disabled", self._args.rerun_mode)
            self._args.rerun_mode = "disabled"
        return result

    # --- D: data -------------------------------------------------------------------------------

    def _build_data_loader(self, stock: Callable[..., Any], dataset: Any, consumed: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.datasets.utils import Split

        split = getattr(dataset, "index_split", getattr(dataset, "split", None))
        if dataset is None or split != Split.train:
            return stock(dataset, consumed)
        dp = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        args, micro_batch_size = self._args, self._args.micro_batch_size
        if self._session.config.policy == "versatile":
            microbatches = consumed // (micro_batch_size * dp[1])
            self._feed.streams = load_streams(
                args.load, args.iteration, microbatches, self._session.layout.replicas
            )
        return self._feed.loader(dataset, micro_batch_size, dp)

    def _build_data_loaders(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """The leader first: every replica's rank 0 would write the same index cache files."""
        session, built = self._session, None
        driver, facts = session.driver, (session.communicator, session.layout, session.replica_id)
        check_same_iteration(driver, *facts, getattr(self._args, "iteration", 0))
        for turn in ("leader", "others"):
            if built is None and (self._session.leading or turn == "others"):
                built = (stock(*args, **more),)
            driver.guarded("build data loaders", lambda: None)
        if built is None:
            raise InvariantViolation("no data loader was built")
        return built[0]

    # --- A, B, C: the iteration ----------------------------------------------------------------

    def _get_forward_backward_func(
        self, stock: Callable[..., Any], *args: Any, **more: Any
    ) -> Callable[..., Any]:
        schedule = stock(*args, **more)

        @functools.wraps(schedule)
        def forward_backward(**call: Any) -> Any:
            if call.get("forward_only"):
                return schedule(**call)
            return self._train_iteration(schedule, call)

        return forward_backward

    def _train_iteration(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        session = self._session
        model = call["model"] if isinstance(call["model"], list) else [call["model"]]
        if self._gradients is None:
            self._gradients = GradientBuckets(model, session.config.bucket_bytes)
            session.injector.make_nan = self._gradients.make_nan
        self._microbatches = call["num_microbatches"]
        self._forwards = self._backwards = 0
        number = self._args.curr_iteration + 1  # as Megatron logs it
        session.injector.begin(number)
        session.injector.expect("sync", len(self._gradients.buckets))
        session.injector.expect("gradient", 2)  # the first pass, and what a lost replica owed
        self._feed.begin()
        run_pass = functools.partial(self._run_pass, schedule, call, model, number)
        work = Iteration(
            model,
            self._gradients,
            self._microbatches,
            run_pass,
            any_in_replica,
            same_samples=session.config.policy == "exact",
        )
        if session.console is not None:
            session.console.begin()
        self._feed.committed(session.driver.run_step(number, self._microbatches, work))
        session.watchdog.between()
        if session.console is not None:
            session.console.committed()
        if work.poisoned:
            raise Unrecoverable(self._poisoned(number))
        self._finish_gradients(model, work)
        self._microbatches = None
        losses = work.losses()
        self._trace(number, losses)
        return losses

    def _run_pass(
        self,
        schedule: Callable[..., Any],
        call: dict[str, Any],
        model: list[Any],
        number: int,
        microbatches: Sequence[int],
    ) -> tuple[list[dict[str, torch.Tensor]], float]:
        """One pass of the stock schedule over these ids, and the gradient sync in the replica."""
        session, extra = self._session, bool(self._captured)
        self._feed.supply(microbatches, self._args.consumed_train_samples)
        session.watchdog.beat()
        if not extra:
            for phase in ("forward", "backward"):
                session.injector.expect(phase, len(microbatches))
        with self._extra_pass(model) if extra else contextlib.nullcontext():
            losses = schedule(**{**call, "num_microbatches": len(microbatches)})
            session.injector.enter("gradient", int(extra))
            for chunk in model:
                chunk.finish_grad_sync()  # a group of one rank by default
        session.watchdog.rest()
        session.trace.emit(
            "fetched",
            iteration=number,
            microbatches=list(microbatches),
            samples=self._feed.fetched,
        )
        tokens = self._captured.get("num_tokens")
        return losses, 0.0 if tokens is None else float(tokens)

    @contextlib.contextmanager
    def _extra_pass(self, model: list[Any]) -> Iterator[None]:
        """No timers, which assert when they are started twice in an iteration; and no NaN checks,
        which raise in the middle of the pipeline: Iteration looks for NaN itself."""
        from megatron.core.utils import get_model_config

        settings: list[tuple[Any, str, Any]] = [
            (get_model_config(model[0]), "timers", None),
            (self._args, "check_for_nan_in_loss_and_grad", False),
        ]
        settings += [(chunk.ddp_config, "check_for_nan_in_grad", False) for chunk in model]
        settings = [s for s in settings if hasattr(s[0], s[1])]
        before = [getattr(owner, name) for owner, name, _ in settings]
        for owner, name, value in settings:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for (owner, name, _), value in zip(settings, before, strict=True):
                setattr(owner, name, value)

    def _poisoned(self, number: int) -> str:
        again = self._session.driver.reassigned
        args = self._args
        size = args.micro_batch_size * args.data_parallel_size  # over the replica's own ranks
        ranges = (sample_ids(args.consumed_train_samples, i, size) for i in again)
        samples = [sample for ids in ranges for sample in ids]
        return (
            f"iteration {number}: NaN or infinity in microbatches {list(again)} on a second "
            "replica, after the first was lost: the data or the model is at fault, not the "
            f"hardware. Look at samples {samples}; iteration {number - 1} is the last that was "
            "committed"
        )

    def _finalize_model_grads(
        self, stock: Callable[..., Any], model: Any, num_tokens: Any = None, *args: Any, **more: Any
    ) -> None:
        """Called by the schedule at its end. Only noted: what follows must wait for the commit."""
        self._captured = {"num_tokens": num_tokens, "args": args, "more": more}

    def _finish_gradients(self, model: list[Any], work: Iteration) -> None:
        """The rest of stock finalize_model_grads, on the committed gradient: all but the grad sync
        (done) and with the whole job's number of tokens."""
        stock = self._stock[self._host.training, "finalize_model_grads"]
        num_tokens = self._captured["num_tokens"]
        if num_tokens is not None:
            num_tokens = torch.full_like(num_tokens, work.tokens)
        for chunk in model:
            chunk.finish_grad_sync = lambda *args, **more: None
        try:
            stock(model, num_tokens, *self._captured["args"], **self._captured["more"])
        finally:
            for chunk in model:
                del chunk.finish_grad_sync
        self._captured = {}

    def _forward_step_calc_loss(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Every loss is scaled by the constant B, whatever number this replica computes."""
        session = self._session
        if self._microbatches is None:
            session.watchdog.between()  # an evaluation goes on
            session.injector.enter("evaluate")
            return stock(*args, **more)
        session.watchdog.beat()
        session.injector.enter("forward", self._forwards)
        self._forwards += 1
        bound = inspect.signature(stock).bind(*args, **more)
        bound.arguments["num_microbatches"] = self._microbatches
        return stock(*bound.args, **bound.kwargs)

    def _backward_step(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self._session.injector.enter("backward", self._backwards)
        self._backwards += 1
        return stock(*args, **more)

    def _watch_optimizer(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def inside_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._session.injector.enter("optimizer")

        register_optimizer_step_pre_hook(inside_step)

    def _trace(self, number: int, losses: list[dict[str, Any]]) -> None:
        if losses:
            values = {
                key: float(v[0] / v[1]) if v.numel() == 2 else float(v)
                for key, v in losses[0].items()
            }
            self._session.trace.emit("loss", iteration=number, losses=values)

    # --- E: checkpoints and the end --------------------------------------------------------------

    def _save_checkpoint(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """A replica holds everything, so the lowest live one saves the whole checkpoint alone. The
        others go on; their next reduction waits for it."""
        if not self._session.leading:
            return None
        if self._feed.streams is not None and self._session.position == 0:
            iteration = inspect.signature(stock).bind(*args, **more).arguments["iteration"]
            save_streams(self._args.save, iteration, self._feed.streams)
        self._session.injector.enter("save")
        result = stock(*args, **more)
        self._session.injector.leave("save")
        return result

    def _checkpoint_and_decide_exit(
        self, stock: Callable[..., Any], *args: Any, **more: Any
    ) -> Any:
        session, config = self._session, self._session.config
        bound = inspect.signature(stock).bind(*args, **more).arguments
        iteration, model = bound["iteration"], bound["model"]
        last = iteration == self._args.train_iters
        interval = config.check_replicas_interval
        if interval and (last or iteration % interval == 0):
            with session.waiting_for_peers():
                mine = check_replicas(
                    session.driver,
                    session.communicator,
                    session.layout,
                    session.replica_id,
                    model,
                    iteration,
                )
            session.trace.emit("parameters", iteration=iteration, fingerprint=f"{mine:014x}")
        live = session.driver.world.replicas
        if len(live) < config.min_replicas:
            self._save_before_stop(bound)
            raise Unrecoverable(
                f"only {len(live)} of {session.layout.replicas} replicas are left after iteration "
                f"{iteration}, fewer than --recover-min-replicas {config.min_replicas}; the "
                f"checkpoint of iteration {iteration} is in {self._args.save}"
            )
        if session.communicator.stopping:
            kept = f"the checkpoint of iteration {iteration} is in {self._args.save}"
            if self._args.save:
                self._save_before_stop(bound)
            raise StopRequested(
                f"by a signal, after iteration {iteration}; "
                + (kept if self._args.save else "without --save there is no checkpoint")
            )
        return stock(*args, **more)

    def _save_before_stop(self, bound: dict[str, Any]) -> None:
        """The leader saves; if it dies meanwhile, the next one saves again."""
        driver, saved_by = self._session.driver, None
        while saved_by != driver.world.leader:
            saved_by = driver.world.leader
            self._save(bound)
            with self._session.waiting_for_peers():
                driver.guarded("save before stop", lambda: None)

    def _save(self, bound: dict[str, Any]) -> None:
        self._host.training.save_checkpoint_and_time(
            bound["iteration"],
            bound["model"],
            bound["optimizer"],
            bound["opt_param_scheduler"],
            bound["num_floating_point_operations_so_far"],
            bound["checkpointing_context"],
            train_data_iterator=bound["train_data_iterator"],
        )
