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

import torch

from recover_megatron.adapters.megatron.data import EvaluationFeed, MicrobatchFeed
from recover_megatron.adapters.megatron.gradients import GradientBuckets
from recover_megatron.adapters.megatron.iteration import Evaluation, Iteration
from recover_megatron.adapters.megatron.randomness import BETWEEN, Randomness
from recover_megatron.adapters.megatron.replicas import any_in_replica
from recover_megatron.adapters.megatron.session import Session
from recover_megatron.adapters.megatron.statistics import Losses, Statistics, batch_counters
from recover_megatron.errors import Unrecoverable
from recover_megatron.workload.samples import sample_ids

Schedule = Callable[..., Losses]
_signature = functools.cache(inspect.signature)  # asked for with each microbatch


class Schedules:
    """Runs iterations and evaluations. One per process; the training thread alone uses it."""

    def __init__(self, session: Session):
        self.feed = MicrobatchFeed(session.replica_id)
        self.evaluation_feed = EvaluationFeed()
        self.randomness = Randomness()
        self._chunks: Sequence[Any] = ()  # of the model
        self._numbers: Sequence[int] = ()  # of the present pass's microbatches, padding included
        self._forwards_of: dict[int, int] = {}  # in the present pass, by model chunk
        self.shares_evaluation = False  # whether evaluation data comes from evaluation_feed
        self._session = session
        self._gradients: GradientBuckets | None = None
        self._microbatches: int | None = None  # B while training, None in evaluation
        self._weighted = 0  # microbatches of the present pass that count; the rest is padding
        self._losses_seen = 0  # in the present pass, where losses are computed
        self._captured: dict[str, Any] = {}  # what the schedule passed to finalize_model_grads
        self._forwards = self._backwards = 0
        self._stock_finalize: Callable[..., None] | None = None

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
        session, args = self._session, self._session.args
        model = _chunks(call)
        if self._gradients is None:
            self._gradients = GradientBuckets(model, session.config.bucket_bytes)
            session.injector.make_nan = self._gradients.make_nan
            session.trace.emit(
                "training",
                train_iters=args.train_iters,
                tokens_per_sample=call["seq_length"],
                samples_per_microbatch=call["micro_batch_size"] * args.data_parallel_size,
                policy=session.config.policy,
            )
        self._microbatches = microbatches = call["num_microbatches"]
        self._chunks = model
        self._forwards = self._backwards = 0
        number = args.curr_iteration + 1  # as Megatron logs it
        session.iteration = number
        session.injector.begin(number)
        session.injector.expect("sync", len(self._gradients.buckets))
        session.injector.expect("gradient", 2)  # the first pass, and what a lost replica owed
        self.feed.begin()
        statistics = Statistics(lambda: batch_counters(model))
        work = Iteration(
            model,
            self._gradients,
            statistics,
            microbatches,
            functools.partial(self._train_pass, schedule, call, number),
            any_in_replica,
            same_samples=session.config.policy == "exact",
            check_for_nan=getattr(args, "check_for_nan_in_loss_and_grad", True),
        )
        if session.console is not None:
            session.console.begin()
        self.feed.committed(session.driver.run_step(number, microbatches, work))
        session.holds_iteration = False  # the optimizer is about to change it
        session.watchdog.between()
        if session.console is not None:
            session.console.committed()
        if statistics.poisoned:
            raise Unrecoverable(self._poisoned(number))
        self.randomness.set(number, BETWEEN, 0, 0)
        self._finish_gradients(model, statistics)
        self._microbatches = None
        losses = statistics.losses(microbatches)
        self._trace(number, losses)
        return losses

    def skip_iteration(self, stock: Callable[..., Any], *args: Any, **more: Any) -> None:
        """Megatron leaves out an iteration that --iterations-to-skip names, the same at all ranks:
        its samples are not read, but count as consumed."""
        session, settings = self._session, self._session.args
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        session.watchdog.between()
        session.iteration = settings.curr_iteration + 1
        driver = session.driver
        self.feed.committed(driver.policy.plan(driver.world, get_num_microbatches()))
        session.trace.emit("skipped", iteration=session.iteration)

    def _train_pass(
        self, schedule: Schedule, call: dict[str, Any], number: int, microbatches: Sequence[int]
    ) -> tuple[Losses, float]:
        """One pass of the stock schedule over these ids, and the gradient sync in the replica."""
        session, extra, model = self._session, bool(self._captured), _chunks(call)
        padding = _padding(call, len(microbatches))
        consumed = session.args.consumed_train_samples
        self._numbers = self.feed.supply(microbatches, consumed, padding)
        self._forwards_of = {}
        session.watchdog.beat()
        if not extra:
            for phase in ("forward", "backward"):
                calls = (len(microbatches) + padding) * len(model)
                session.injector.expect(phase, calls)
        with self._extra_pass(model) if extra else contextlib.nullcontext():
            losses = self._pass(schedule, call, len(microbatches), padding)
            session.injector.enter("gradient", int(extra))
            for chunk in model:
                chunk.finish_grad_sync()  # a group of one rank by default
        session.watchdog.rest()
        session.trace.emit(
            "fetched",
            iteration=number,
            microbatches=list(microbatches),
            samples=self.feed.fetched,
        )
        tokens = self._captured.get("num_tokens")
        return losses, 0.0 if tokens is None else float(tokens)

    def _pass(self, schedule: Schedule, call: dict[str, Any], count: int, padding: int) -> Losses:
        self._weighted, self._losses_seen = count, 0
        return schedule(**{**call, "num_microbatches": count + padding})

    @contextlib.contextmanager
    def _extra_pass(self, model: list[Any]) -> Iterator[None]:
        """No timers, which assert when they are started twice in an iteration; and no NaN checks,
        which raise in the middle of the pipeline: Iteration looks for NaN itself."""
        from megatron.core.utils import get_model_config

        settings: list[tuple[Any, str, Any]] = [
            (get_model_config(model[0]), "timers", None),
            (self._session.args, "check_for_nan_in_loss_and_grad", False),
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
        args = self._session.args
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
            self._session.trace.emit("loss", iteration=number, losses=values)

    # --- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, schedule: Schedule, call: dict[str, Any]) -> Any:
        """Each replica computes its share; a dead one's is computed by the others.

        Not shared, but done whole by every replica: what does not read by microbatch (full
        validation), or has fewer microbatches than there are replicas; and what returns more than
        losses.
        """
        session, microbatches = self._session, call["num_microbatches"]
        size = call["micro_batch_size"] * session.args.data_parallel_size
        self.evaluation_feed.begin(microbatches * size)
        enough = microbatches >= len(session.driver.world.replicas)
        if not (self.shares_evaluation and enough) or call.get("collect_non_loss_data"):
            self.evaluation_feed.supply(range(microbatches))
            return self._pass(schedule, call, microbatches, 0)

        def run_pass(ids: Sequence[int]) -> tuple[Losses, float]:
            padding = _padding(call, len(ids))
            self.evaluation_feed.supply(ids, padding)
            session.watchdog.between()
            losses = self._pass(schedule, call, len(ids), padding)
            session.watchdog.rest()
            return losses, 0.0

        work = Evaluation(microbatches, run_pass)
        session.driver.run_evaluation(microbatches, work)
        session.watchdog.between()
        return work.statistics.losses(microbatches)

    # --- B: what follows the schedule ----------------------------------------------------------

    def finalize_model_grads(
        self, stock: Callable[..., Any], model: Any, num_tokens: Any = None, *args: Any, **more: Any
    ) -> None:
        """Called by the schedule at its end. Only noted: what follows must wait for the commit."""
        self._stock_finalize = stock
        self._captured = {"num_tokens": num_tokens, "args": args, "more": more}

    def _finish_gradients(self, model: list[Any], statistics: Statistics) -> None:
        """The rest of stock finalize_model_grads, on the committed gradient: all but the grad sync
        (done) and with the whole job's number of tokens."""
        assert self._stock_finalize is not None
        num_tokens = self._captured["num_tokens"]
        if num_tokens is not None:
            num_tokens = torch.full_like(num_tokens, statistics.tokens)
        for chunk in model:
            chunk.finish_grad_sync = lambda *args, **more: None
        try:
            more = self._captured["more"]
            self._stock_finalize(model, num_tokens, *self._captured["args"], **more)
        finally:
            for chunk in model:
                del chunk.finish_grad_sync
        self._captured = {}

    # --- C: one microbatch ---------------------------------------------------------------------

    def forward_step(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Around a microbatch's forward pass through one model chunk, data included."""
        if self._microbatches is not None:
            from megatron.core import parallel_state

            model = _signature(stock).bind(*args, **more).arguments["model"]
            chunk = next(k for k, one in enumerate(self._chunks) if one is model)
            number = self._forwards_of.get(chunk, 0)
            self._forwards_of[chunk] = number + 1
            dp_rank = parallel_state.get_data_parallel_rank()
            iteration = self._session.iteration
            self.randomness.set(iteration, self._numbers[number], dp_rank, chunk)
        return stock(*args, **more)

    def forward_step_calc_loss(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Every loss is scaled by the constant B, whatever number this replica computes. Padding
        weighs nothing."""
        session = self._session
        bound = _signature(stock).bind(*args, **more)
        if self._microbatches is None:
            session.watchdog.between()  # an evaluation goes on
            session.injector.enter("evaluate")
        else:
            session.watchdog.beat()
            session.injector.enter("forward", self._forwards)
            self._forwards += 1
            bound.arguments["num_microbatches"] = self._microbatches
        reported = bound.arguments["forward_data_store"]
        before = len(reported)
        output, num_tokens = stock(*bound.args, **bound.kwargs)
        if len(reported) > before:  # the last stage
            self._losses_seen += 1
            if self._losses_seen > self._weighted:
                reported.pop()
                return output * 0, num_tokens * 0
        return output, num_tokens

    def backward_step(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self._session.injector.enter("backward", self._backwards)
        self._backwards += 1
        return stock(*args, **more)


def _chunks(call: dict[str, Any]) -> list[Any]:
    model = call["model"]
    return model if isinstance(model, list) else [model]


def _padding(call: dict[str, Any], count: int) -> int:
    """How many microbatches of weight zero the stock schedule needs beside `count`."""
    model = _chunks(call)
    if len(model) == 1:
        return 0
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    group = get_model_config(model[0]).microbatch_group_size_per_vp_stage
    return interleaved_padding(count, stages, group)


def interleaved_padding(count: int, stages: int, group: int) -> int:
    """The least number to add so that the interleaved schedule takes `count` microbatches: at least
    one group, and a last group that is whole or no smaller than the number of stages (schedules.py,
    forward_backward_pipelining_with_interleaving)."""
    padded = max(count, group)
    rest = padded % group
    if 0 < rest < stages:
        padded += stages - rest
    return padded - count
