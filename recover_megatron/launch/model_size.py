"""Parameters and memory of a GPT from Megatron's flags: arithmetic for `launch --dry-run`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSize:
    """Bytes are of the fullest rank of a replica. Activations are an estimate: with selective
    recomputation or flash attention (Korthikanti et al., 2022), for the first pipeline stage, which
    holds one microbatch of each stage."""

    parameters: int
    parameters_per_rank: int
    state_bytes: int  # weights, float32 gradients, optimizer
    activation_bytes: int

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"{self.parameters / 1e9:.3g} B parameters; per rank "
            f"{self.parameters_per_rank / 1e9:.3g} B, {self.state_bytes / gib:.1f} GiB of weights, "
            "gradients and optimizer, about "
            f"{self.activation_bytes / gib:.1f} GiB of activations"
        )


def model_size(flags: Mapping[str, Any]) -> ModelSize | None:
    """`flags` by Megatron's names without dashes in front. None if the model's shape is not there,
    or has experts (not counted here)."""

    def number(name: str, default: int | None = None) -> int | None:
        value = flags.get(name, default)
        return None if value is None else int(value)

    shape = [number(n) for n in ("num-layers", "hidden-size", "num-attention-heads", "seq-length")]
    vocabulary = number("vocab-size")
    if None in shape or vocabulary is None or flags.get("num-experts"):
        return None
    layers, hidden, heads, sequence = (int(x or 0) for x in shape)
    tp = number("tensor-model-parallel-size", 1) or 1
    pp = number("pipeline-model-parallel-size", 1) or 1
    cp = number("context-parallel-size", 1) or 1
    dp = number("recover-intra-replica-dp", 1) or 1
    ffn = number("ffn-hidden-size") or 4 * hidden
    groups = (number("num-query-groups") if flags.get("group-query-attention") else None) or heads
    multiple = (number("make-vocab-size-divisible-by") or 128) * tp
    vocabulary = -(-(vocabulary + 1) // multiple) * multiple

    attention = 2 * hidden * hidden + 2 * hidden * hidden * groups // heads
    mlp = (3 if flags.get("swiglu") else 2) * hidden * ffn
    layer = attention + mlp + 2 * hidden
    embedding = vocabulary * hidden
    untied = bool(flags.get("untie-embeddings-and-output-weights"))
    total = layers * layer + embedding * (2 if untied else 1) + hidden
    # The first stage holds the embedding, the last one the output weights.
    edge = embedding * (2 if untied and pp == 1 else 1)
    rank = (layers // pp * layer + edge) // tp
    half = bool(flags.get("bf16") or flags.get("fp16"))
    shards = dp * cp if flags.get("use-distributed-optimizer") else 1
    state = rank * ((2 if half else 4) + 4) + rank * (12 if half else 8) // shards
    micro = number("micro-batch-size", 1) or 1
    per_layer = sequence * micro * hidden // cp
    per_layer *= 34 if half else 68
    if flags.get("sequence-parallel"):
        per_layer //= tp
    else:
        per_layer = per_layer * (10 * tp + 24) // (34 * tp)
    return ModelSize(total, rank, state, per_layer * (layers // pp) * pp)
