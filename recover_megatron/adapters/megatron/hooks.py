"""The hooks in Megatron's training loop: every name that is replaced, in one table.

`MegatronModules` names those that hold them: Megatron-LM's own `megatron.training`, or
`recover_megatron.examples.gpt`, whose modules and functions bear the same names. Hook letters as in
docs/megatron-seams.md, section 1.1. What a hook does stands here if it is about arguments or
data, else in schedule.py (A, B, C), checkpoints.py and exits.py (E), and logs.py.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recover_megatron.adapters.megatron.checkpoints import Checkpoints
from recover_megatron.adapters.megatron.exits import Exits
from recover_megatron.adapters.megatron.index_cache import one_at_a_time, sweep
from recover_megatron.adapters.megatron.logs import Logs
from recover_megatron.adapters.megatron.modules import MegatronModules
from recover_megatron.adapters.megatron.schedule import Schedules
from recover_megatron.adapters.megatron.support import (
    check_version,
    own_faults,
    refuse_unsupported,
)
from recover_megatron.errors import ConfigError
from recover_megatron.session.arguments import add_recovery_arguments
from recover_megatron.session.feeds import EvaluationLoader
from recover_megatron.session.peers import Peers
from recover_megatron.session.session import Session
from recover_megatron.session.streams import load_streams, streams_to_start_with

logger = logging.getLogger(__name__)


class Hooks:
    """Holds what the hooks share. `install` replaces the names, `uninstall` restores them."""

    def __init__(self, session: Session, megatron: MegatronModules):
        self._session = session
        self._megatron = megatron
        self._stock: dict[tuple[Any, str], Any] = {}  # by module or class, and name
        self._peers = Peers(session)
        self._schedules = Schedules(session, megatron)
        self._checkpoints = Checkpoints(session, megatron, self._schedules.feed)
        self._exits = Exits(session, megatron, self._checkpoints, self._peers)
        self._logs = Logs(session, megatron)

    def install(self) -> None:
        import megatron.core.pipeline_parallel.schedules as schedules
        from megatron.core import tensor_parallel
        from megatron.core.datasets import utils as dataset_utils
        from megatron.core.package_info import __version__ as version

        check_version(version, self._session.config.allow_untested_megatron)
        modules, training, replace = self._megatron, self._megatron.training, self._replace
        run, keep, logs = self._schedules, self._checkpoints, self._logs
        replace(training, "get_forward_backward_func", run.get_forward_backward_func)  # A
        replace(training, "finalize_model_grads", run.finalize_model_grads)  # B
        replace(schedules, "forward_step", run.forward_step)  # C
        replace(schedules, "forward_step_calc_loss", run.forward_step_calc_loss)
        replace(tensor_parallel, "model_parallel_cuda_manual_seed", self._seed)
        replace(training, "build_pretraining_data_loader", self._build_data_loader)  # D
        replace(training, "build_train_valid_test_data_loaders", self._build_data_loaders)
        replace(dataset_utils, "compile_helpers", one_at_a_time)
        if hasattr(training, "dummy_train_step"):  # --iterations-to-skip
            replace(training, "dummy_train_step", run.skip_iteration)
        replace(training, "save_checkpoint", keep.save_checkpoint)  # E
        replace(training, "checkpoint_and_decide_exit", self._exits.checkpoint_and_decide_exit)
        replace(modules.checkpointing, "get_checkpoint_tracker_filename", keep.tracker_filename)
        if hasattr(training, "maybe_finalize_async_save"):
            replace(training, "maybe_finalize_async_save", keep.finalize_async_save)
        self._defer_failed_writes()
        replace(modules.arguments, "add_megatron_arguments", self._add_arguments)  # F
        for module in modules.validators:
            replace(module, "validate_args", self._validate_args)
        replace(training, "training_log", logs.training_log)
        replace(training, "print_rank_last", logs.print_rank_last)
        replace(modules.writers, "_set_tensorboard_writer", logs.set_tensorboard_writer)
        if hasattr(modules.writers, "_set_wandb_writer"):
            replace(modules.writers, "_set_wandb_writer", logs.set_wandb_writer)
        for name in (
            "append_to_progress_log",
            "compute_throughputs_and_append_to_progress_log",
        ):
            for module in (training, modules.checkpointing):
                if hasattr(module, name):
                    replace(module, name, logs.only_by_leader)
        if self._session.injector.plans("backward"):
            replace(schedules, "backward_step", run.backward_step)
        if self._session.injector.plans("optimizer"):
            self._watch_optimizer()

    def _defer_failed_writes(self) -> None:
        """Where these names are looked up differs: by 0.17 they had moved."""
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import common, state_dict_saver
        from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

        for owner, name in (
            (state_dict_saver, "save_state_dict_async_finalize"),
            (torch_strategies, "save_state_dict_async_finalize"),
            (serialization, "save_config"),
            (serialization, "save_common"),
            (getattr(common, "TorchCommonSaveStrategy", None), "save_common"),
        ):
            if hasattr(owner, name):
                self._replace(owner, name, self._checkpoints.deferring)

    def uninstall(self) -> None:
        for (module, name), stock in self._stock.items():
            setattr(module, name, stock)
        self._stock.clear()

    def _replace(self, module: Any, name: str, hook: Callable[..., Any]) -> None:
        stock = getattr(module, name, None)
        if stock is None:
            raise ConfigError(
                f"{module.__name__} has no {name}: this version of Megatron is not supported"
            )
        self._stock[module, name] = stock

        @functools.wraps(stock)
        def hooked(*args: Any, **more: Any) -> Any:
            return hook(stock, *args, **more)

        setattr(module, name, hooked)

    def _watch_optimizer(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def inside_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._session.injector.enter("optimizer")

        register_optimizer_step_pre_hook(inside_step)

    # --- F: arguments --------------------------------------------------------------------------

    def _add_arguments(self, stock: Callable[..., Any], parser: Any) -> Any:
        return add_recovery_arguments(stock(parser))

    def _validate_args(self, stock: Callable[..., Any], args: Any, *rest: Any, **more: Any) -> Any:
        result = stock(args, *rest, **more)
        args = args if result is None else result
        refuse_unsupported(args)
        own_faults(args, self._session.layout, self._session.replica_id)
        if getattr(args, "rerun_mode", "disabled") != "disabled":
            # Its decision to repeat a step is one replica's: the others would wait for it.
            if self._session.speaks:
                logger.warning("--rerun-mode %s is set to disabled", args.rerun_mode)
            args.rerun_mode = "disabled"
        if getattr(args, "num_workers", 0) and self._session.speaks:
            self._session.terminal.warn(
                "workers",
                f"--num-workers {args.num_workers} has no effect with --recover: samples are read "
                "by the training process",
            )
        self._exits.take_over(args)
        return result

    def _seed(self, stock: Callable[..., Any], *args: Any, **more: Any) -> None:
        stock(*args, **more)
        self._schedules.randomness.seeded()

    # --- D: data -------------------------------------------------------------------------------

    def _build_data_loader(self, stock: Callable[..., Any], dataset: Any, consumed: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.datasets.utils import Split

        split = getattr(dataset, "index_split", getattr(dataset, "split", None))
        args, run = self._megatron.args, self._schedules
        shared = run.shares_evaluation or split == Split.train
        if dataset is None or split is None or not shared:
            return stock(dataset, consumed)
        micro_batch_size = args.micro_batch_size
        dp = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        if split != Split.train:
            micro_batch_size = getattr(args, "eval_micro_batch_size", None) or micro_batch_size
            return EvaluationLoader(run.evaluation_feed, dataset, micro_batch_size, dp, consumed)
        return run.feed.loader(dataset, micro_batch_size, dp)

    def _build_data_loaders(self, stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """The leader first: every replica's rank 0 would write the same index cache files."""
        session, built = self._session, None
        settings, driver = self._megatron.args, session.driver
        self._peers.check_same_iteration(getattr(settings, "iteration", 0))
        self._start_streams()
        turn = None
        while turn != driver.world.leader:  # or the leader died in its turn: it is the next one's
            turn = driver.world.leader
            if built is None and session.leading:
                self._sweep_index_caches()
                built = (stock(*args, **more),)
            driver.guarded("build data loaders", lambda: None)
        if built is None:
            built = (stock(*args, **more),)
        driver.guarded("build data loaders", lambda: None)
        return built[0]

    def _sweep_index_caches(self) -> None:
        """By one rank: Megatron's others wait for it before they look."""
        args = self._megatron.args
        if self._session.position:
            return
        words = [
            word
            for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path")
            for word in getattr(args, name, None) or ()
        ]
        if path := getattr(args, "data_args_path", None):
            words += Path(path).read_text(encoding="utf-8").split()
        if path := getattr(args, "per_split_data_args_path", None):
            parts = json.loads(Path(path).read_text(encoding="utf-8"))
            words += [word for part in parts.values() for word in part or ()]
        prefixes = [word for word in map(str, words) if os.path.isfile(f"{word}.idx")]
        for said in sweep(list(dict.fromkeys(prefixes)), getattr(args, "data_cache_path", None)):
            self._session.terminal.say(said)

    def _start_streams(self) -> None:
        """At every rank, also those that read no data: all know all streams."""
        session, args = self._session, self._megatron.args
        size = args.micro_batch_size * args.data_parallel_size
        found = load_streams(args.load, getattr(args, "iteration", 0), size)
        streams = streams_to_start_with(
            found,
            session.config.policy,
            getattr(args, "consumed_train_samples", 0),
            session.layout.replicas,
            size,
        )
        changed = streams not in (None, found)
        if found is not None and changed and found.skipped and session.speaks:
            session.terminal.warn(
                "streams",
                f"the checkpoint's {len(found.positions)} sample streams of {found.size} samples a "
                f"microbatch are other ones than this job's: {found.skipped} samples that lost "
                "replicas had yet to read are left out",
            )
        self._schedules.feed.streams = streams
