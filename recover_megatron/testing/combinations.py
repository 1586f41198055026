"""Megatron's settings inside a replica that are tried with a kill: one list for the tests and for
the support table that `scripts/support_table.py` makes from their results."""

from __future__ import annotations

from dataclasses import dataclass

from recover_megatron.testing.rehearsal import Rehearsal

_MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall"
)
_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
_RAMP = "--rampup-batch-size 4 4 24 --train-samples 56 --lr-warmup-samples 8"


@dataclass(frozen=True)
class Combination:
    """`loss` and `weights` are the largest differences to the run without failures that rounding
    explains: of any iteration's loss, of any weight at the end. That run is plain Megatron's, but
    where numbers are drawn at random, which --recover draws by microbatch, it is one of ours."""

    name: str
    flags: str = ""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    replicas: int = 2
    layers: int = 2
    batch: int = 6
    drop: str = ""  # flags of the rehearsal to leave out
    victim: str = "1.0"
    loss: float = 1e-5
    weights: float = 1e-5
    draws: bool = False
    stock_only: bool = False  # our pretrain.py does not know the flags

    @property
    def id(self) -> str:
        return self.name.replace(" ", "-")

    def job(self, data_prefix: str, script: str, *extra: str) -> Rehearsal:
        return Rehearsal(
            data_prefix,
            6,
            self.batch,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            layers=self.layers,
            script=script,
            extra=(*self.flags.split(), *extra),
            drop=tuple(self.drop.split()),
        )


COMBINATIONS = (
    Combination("tensor parallel", tp=2),
    Combination("pipeline parallel", pp=2, replicas=3, victim="1.1"),
    Combination(
        "interleaved pipeline",
        "--num-layers-per-virtual-pipeline-stage 1",
        pp=2,
        replicas=3,
        layers=4,
        victim="1.1",
    ),
    Combination(
        "tied embeddings over a pipeline", pp=2, drop="untie-embeddings-and-output-weights"
    ),
    Combination(
        "data parallel, distributed optimizer",
        "--use-distributed-optimizer --overlap-grad-reduce --calculate-per-token-loss",
        dp=2,
        batch=12,
        victim="0.1",
    ),
    Combination(
        "overlapped parameter gathering",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        dp=2,
        batch=12,
        stock_only=True,
    ),
    Combination("experts", _MOE),
    Combination(
        "expert parallel, expert bias",
        f"{_MOE} --expert-model-parallel-size 2 --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid",
        dp=2,
        batch=12,
        victim="1.1",
    ),
    Combination(
        "expert parallel, distributed optimizer",
        f"{_MOE} --expert-model-parallel-size 2 --use-distributed-optimizer",
        dp=2,
        batch=12,
        stock_only=True,
    ),
    Combination("bf16", "--bf16", loss=1e-4, weights=1e-3),
    Combination("bf16, gradients in bf16", "--bf16 --grad-reduce-in-bf16", loss=1e-2, weights=4e-3),
    Combination(
        "fp16, dynamic loss scale", "--fp16 --initial-loss-scale 131072", loss=3e-3, weights=4e-3
    ),
    Combination(
        "dropout, interleaved pipeline",
        f"{_DROPOUT} --num-layers-per-virtual-pipeline-stage 1",
        pp=2,
        replicas=3,
        layers=4,
        victim="1.1",
        drop="attention-dropout hidden-dropout",
        draws=True,
    ),
    Combination(
        "dropout, tensor parallel, recomputed",
        f"{_DROPOUT} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        tp=2,
        drop="attention-dropout hidden-dropout",
        draws=True,
        stock_only=True,
    ),
    Combination(
        "batch-size ramp-up", _RAMP, batch=12, drop="train-iters lr-warmup-iters", victim="0.0"
    ),
    Combination("multi-token prediction", "--mtp-num-layers 1", layers=2, stock_only=True),
    Combination(
        "recomputed activations",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        stock_only=True,
    ),
)

# What --recover leaves to the replica, but no CPU can run (name, reason).
NOT_ON_A_CPU = (
    ("context parallel", "needs transformer-engine's attention"),
    ("sequence parallel", "needs transformer-engine or apex"),
    ("experts with tensor parallel", "needs sequence parallel"),
    ("fp8", "needs transformer-engine"),
)
