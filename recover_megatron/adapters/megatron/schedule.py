"""Hooks A, B and C: Megatron's forward-backward schedule under the driver.

The stock schedule is called with this replica's share of the microbatches, as often as failures
demand; what follows it in stock Megatron, from the gradient sync on, waits for the commit.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from recover_megatron.adapters.megatron.gradient_source import MegatronGradients, batch_counters
from recover_megatron.adapters.megatron.modules import MegatronModules
from recover_megatron.adapters.megatron.passes import FinalizeCall, Pass, padding
from recover_megatron.adapters.megatron.randomness import BETWEEN, Randomness
from recover_megatron.errors import Unrecoverable
from recover_megatron.events import Fetched, Loss, Skipped, Training
from recover_megatron.session.feeds import EvaluationFeed, MicrobatchFeed
from recover_megatron.session.gradients import GradientBuckets
from recover_megatron.session.iteration import Evaluation, Iteration, NanRule
from recover_megatron.session.peers import any_in_replica
from recover_megatron.session.session import Session
from recover_megatron.session.statistics import Losses, Statistics
from recover_megatron.workload.samples import sample_ids

Schedule = Callable[..., Losses]
_signature = functools.cache(inspect.signature)  # asked for with each microbatch


class TrainingIteration:
    """The iteration that is in progress: the schedule's call, and what its hooks count."""

    def __init__(self, schedule: Schedule, call: dict[str, Any], number: int):
        self.number = number  # as Megatron logs it
        self.model = model_chunks(call)
        self.microbatches: int = call["num_microbatches"]  # B, whatever share is computed here
        self.forwards = self.backwards = 0
        self.finalize: FinalizeCall | None = None  # of the last pass; None before the first
        self._schedule, self._call = schedule, call

    def run(self, count: int) -> Losses:
        """One pass of the stock schedule over `count` microbatches."""
        return self._schedule(**{**self._call, "num_microbatches": count})


class Schedules:
    """Runs iterations and evaluations. One per process; the training thread alone uses it."""

    def __init__(self, session: Session, megatron: MegatronModules):
        self.feed = MicrobatchFeed(session.replica_id)
        self.evaluation_feed = EvaluationFeed()
        self.randomness = Randomness()
        self._session = session
        self._megatron = megatron
        self._gradients: GradientBuckets | None = None
        self._iteration: TrainingIteration | None = None  # None in evaluation
        self._pass = Pass((), 0)

    @property
    def shares_evaluation(self) -> bool:
        """Whether evaluation data comes from `evaluation_feed`. The same at all ranks, also at
        those that read no data."""
        whole = ("full_validation", "multiple_validation_sets")
        return not any(getattr(self._megatron.args, name, False) for name in whole)

    # --- A: the schedule -----------------------------------------------------------------------

    def get_forward_backward_func(
        self, stock: Callable[..., Any], *args: Any, **more: Any
    ) -> Callable[..., Any]:
        schedule = stock(*args, **more)

        @functools.wraps(schedule)
        def forward_backward(**call: Any) -> Any:
            if call.get("forward_only"):
                return self._evaluate(schedule, call)
            return self._train_iteration(schedule, call)

        return forward_backward

    def _train_iteration(self, schedule: Schedule, call: dict[str, Any]) -> Losses:
        session, args = self._session, self._megatron.args
        iteration = TrainingIteration(schedule, call, args.curr_iteration + 1)
        gradients = self._gradients or self._first_iteration(call, iteration.model)
        session.progress.begins(iteration.number)
        session.injector.begin(iteration.number)
        session.injector.expect("sync", len(gradients.buckets))
        session.injector.expect("gradient", 2)  # the first pass, and what a lost replica owed
        self.feed.begin()
        statistics = Statistics(lambda: batch_counters(iteration.model))
        nan_rule = NanRule(
            looks=getattr(args, "check_for_nan_in_loss_and_grad", True),
            same_samples=session.config.policy == "exact",
            any_in_replica=any_in_replica,
        )
        run_pass = functools.partial(self._train_pass, iteration, gradients)
        work = Iteration(gradients, statistics, iteration.microbatches, run_pass, nan_rule)
        if session.console is not None:
            session.console.begin()
        with self._in_progress(iteration):
            self.feed.committed(
                session.driver.run_step(iteration.number, iteration.microbatches, work)
            )
            session.progress.changes()  # the optimizer is about to
            session.watchdog.between()
            if session.console is not None:
                session.console.committed()
            if statistics.poisoned:
                raise Unrecoverable(self._poisoned(iteration.number))
            self.randomness.set(iteration.number, BETWEEN, 0, 0)
            assert iteration.finalize is not None
            iteration.finalize.carry_out(iteration.model, statistics.tokens)
        losses = statistics.losses(iteration.microbatches)
        self._trace(iteration.number, losses)
        return losses

    def _first_iteration(self, call: dict[str, Any], model: list[Any]) -> GradientBuckets:
        """Before it the model may still change."""
        session, args = self._session, self._megatron.args
        self._gradients = GradientBuckets(MegatronGradients(model), session.config.bucket_bytes)
        session.trace.emit(
            Training(
                train_iters=args.train_iters,
                tokens_per_sample=call["seq_length"],
                samples_per_microbatch=call["micro_batch_size"] * args.data_parallel_size,
                policy=session.config.policy,
            )
        )
        return self._gradients

    @contextlib.contextmanager
    def _in_progress(self, iteration: TrainingIteration) -> Iterator[None]:
        """The hooks inside the schedule see the iteration."""
        self._iteration = iteration
        yield  # an exception ends the rank
        self._iteration = None

    def skip_iteration(self, stock: Callable[..., Any], *args: Any, **more: Any) -> None:
        """Megatron leaves out an iteration that --iterations-to-skip names, the same at all ranks:
        its samples are not read, but count as consumed."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        session, driver = self._session, self._session.driver
        session.watchdog.between()
        session.progress.begins(self._megatron.args.curr_iteration + 1)
        self.feed.committed(driver.policy.plan(driver.world, get_num_microbatches()))
        session.trace.emit(Skipped(iteration=session.progress.iteration))

    def _train_pass(
        self, iteration: TrainingIteration, gradients: GradientBuckets, microbatches: Sequence[int]
    ) -> tuple[Losses, float]:
        """One pass of the stock schedule over these ids, and the gradient sync in the replica."""
        session, model = self._session, iteration.model
        extra = iteration.finalize is not None
        count = len(microbatches) + padding(model, len(microbatches))
        consumed = self._megatron.args.consumed_train_samples
        numbers = self.feed.supply(microbatches, consumed, count - len(microbatches))
        self._pass = Pass(numbers, len(microbatches))
        session.watchdog.beat()
        if not extra:
            for phase in ("forward", "backward"):
                session.injector.expect(phase, count * len(model))
        with self._extra_pass(model) if extra else contextlib.nullcontext():
            losses = iteration.run(count)
            session.injector.enter("gradient", int(extra), gradients.make_nan)
            for chunk in model:
                chunk.finish_grad_sync()  # a group of one rank by default
        session.watchdog.rest()
        session.trace.emit(
            Fetched(
                iteration=iteration.number,
                microbatches=tuple(microbatches),
                samples=self.feed.fetched,
            )
        )
        iteration.finalize = self._pass.finalize
        assert iteration.finalize is not None
        return losses, iteration.finalize.tokens

    @contextlib.contextmanager
    def _extra_pass(self, model: list[Any]) -> Iterator[None]:
        """No timers, which assert when they are started twice in an iteration; and no NaN checks,
        which raise in the middle of the pipeline: Iteration looks for NaN itself."""
        from megatron.core.utils import get_model_config

        settings: list[tuple[Any, str, Any]] = [
            (get_model_config(model[0]), "timers", None),
            (self._megatron.args, "check_for_nan_in_loss_and_grad", False),
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
        args = self._megatron.args
        size = args.micro_batch_size * args.data_parallel_size  # over the replica's own ranks
        ranges = (sample_ids(args.consumed_train_samples, i, size) for i in again)
        samples = [sample for ids in ranges for sample in ids]
        return (
            f"iteration {number}: NaN or infinity in microbatches {list(again)} on a second "
            "replica, after the first was lost: the data or the model is at fault, not the "
            f"hardware. Look at samples {samples}; iteration {number - 1} is the last that was "
            "committed"
        )

    def _trace(self, number: int, losses: Losses) -> None:
        if losses:
            values = {
                key: float(v[0] / v[1]) if v.numel() == 2 else float(v)
                for key, v in losses[0].items()
            }
            self._session.trace.emit(Loss(iteration=number, losses=values))

    # --- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, schedule: Schedule, call: dict[str, Any]) -> Any:
        """Each replica computes its share; a dead one's is computed by the others.

        Not shared, but done whole by every replica: what does not read by microbatch (full
        validation), or has fewer microbatches than there are replicas; and what returns more than
        losses.
        """
        session, microbatches = self._session, call["num_microbatches"]
        size = call["micro_batch_size"] * self._megatron.args.data_parallel_size
        self.evaluation_feed.begin(microbatches * size)

        def run_pass(ids: Sequence[int], more: int = 0) -> Losses:
            self.evaluation_feed.supply(ids, more)
            self._pass = Pass((), len(ids))
            return schedule(**{**call, "num_microbatches": len(ids) + more})

        enough = microbatches >= len(session.world.now.replicas)
        if not (self.shares_evaluation and enough) or call.get("collect_non_loss_data"):
            return run_pass(range(microbatches))

        def run_share(ids: Sequence[int]) -> tuple[Losses, float]:
            session.watchdog.between()
            losses = run_pass(ids, padding(model_chunks(call), len(ids)))
            session.watchdog.rest()
            return losses, 0.0

        work = Evaluation(microbatches, run_share)
        session.driver.run_evaluation(microbatches, work)
        session.watchdog.between()
        return work.statistics.losses(microbatches)

    # --- B: what follows the schedule ----------------------------------------------------------

    def finalize_model_grads(
        self, stock: Callable[..., Any], model: Any, num_tokens: Any = None, *args: Any, **more: Any
    ) -> None:
        """Called by the schedule at its end."""
        self._pass.finalize = FinalizeCall(stock, num_tokens, args, more)

    # --- C: one microbatch ---------------------------------------------------------------------

    def forward_step(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Around a microbatch's forward pass through one model chunk, data included."""
        if (iteration := self._iteration) is not None:
            from megatron.core import parallel_state

            model = _signature(stock).bind(*args, **more).arguments["model"]
            chunk = next(k for k, one in enumerate(iteration.model) if one is model)
            number = self._pass.next_number(chunk)
            dp_rank = parallel_state.get_data_parallel_rank()
            self.randomness.set(iteration.number, number, dp_rank, chunk)
        return stock(*args, **more)

    def forward_step_calc_loss(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Every loss is scaled by the constant B, whatever number this replica computes. Padding
        weighs nothing."""
        session, iteration = self._session, self._iteration
        bound = _signature(stock).bind(*args, **more)
        if iteration is None:
            session.watchdog.between()  # an evaluation goes on
            session.injector.enter("evaluate")
        else:
            session.watchdog.beat()
            session.injector.enter("forward", iteration.forwards)
            iteration.forwards += 1
            bound.arguments["num_microbatches"] = iteration.microbatches
        reported = bound.arguments["forward_data_store"]
        before = len(reported)
        output, num_tokens = stock(*bound.args, **bound.kwargs)
        last_stage = len(reported) > before
        if last_stage and not self._pass.next_loss_counts():
            reported.pop()
            return output * 0, num_tokens * 0
        return output, num_tokens

    def backward_step(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if (iteration := self._iteration) is not None:
            self._session.injector.enter("backward", iteration.backwards)
            iteration.backwards += 1
        return stock(*args, **more)


def model_chunks(call: dict[str, Any]) -> list[Any]:
    """The model that a schedule is called with, as a list."""
    model = call["model"]
    return model if isinstance(model, list) else [model]
