"""The dataset of `--data-path`, its microbatches, and how a batch reaches all ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from torch.utils.data import default_collate

from recover_megatron.errors import ConfigError
from recover_megatron.examples.gpt.global_vars import get_args
from recover_megatron.examples.gpt.model import edges
from recover_megatron.workload.samples import sample_ids


def _reads_data(stage: int | None) -> bool:
    return any(edges(stage)) and parallel_state.get_tensor_model_parallel_rank() == 0


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Iterator[Any] | None:
    """Microbatches in Megatron's order: the data-parallel ranks take turns."""
    if dataset is None:
        return None
    args = get_args()
    dp_rank = parallel_state.get_data_parallel_rank()

    def microbatches() -> Iterator[Any]:
        microbatch = 0
        while True:
            ids = sample_ids(
                consumed_samples,
                microbatch,
                args.micro_batch_size,
                dp_rank,
                args.data_parallel_size,
            )
            # Several prefixes without weights are one epoch, unlike a single one: go round.
            yield default_collate([dataset[i % len(dataset)] for i in ids])
            microbatch += 1

    return microbatches()


def build_datasets(args: argparse.Namespace, stage: int | None) -> list[Any]:
    """Training and validation samples for one model chunk, None where it reads none. Rank 0 builds
    the index files; the others then read them."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    evaluations = args.train_iters // args.eval_interval * args.eval_iters
    _check_documents(config, wanted=(True, evaluations > 0, False))
    samples = [
        args.train_samples or args.train_iters * args.global_batch_size,
        evaluations * args.global_batch_size,
        0,
    ]
    reads = partial(_reads_data, stage)
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, reads, config).build()[:2]


_PARTS = ("training", "validation", "test")


def _check_documents(config: GPTDatasetConfig, wanted: Sequence[bool]) -> None:
    """Leaves out parts of --split that nobody reads. Raises ConfigError where a prefix has no
    document for one that is read: Megatron would loop for ever, or assert without a word."""
    matrix = config.split_matrix
    for part, name in enumerate(_PARTS):
        if not wanted[part]:
            matrix[part] = None
        if matrix[part] is None:
            continue
        for prefix in config.blend[0]:
            documents = len(IndexedDataset(prefix).document_indices) - 1
            first, behind = (round(edge * float(documents)) for edge in matrix[part])
            if first >= behind:
                raise ConfigError(
                    f"--split {config.split} leaves no document of --data-path {prefix} for "
                    f"{name}: it has {documents}; give it more, or that part a larger share"
                )


def get_batch(data_iterator: Iterator[Any] | None) -> dict[str, torch.Tensor]:
    """tokens, labels, position_ids int64 and loss_mask float32, each [micro_batch, seq]; tensor
    parallel rank 0 reads them and tells its peers (as Megatron's getget_batch)."""
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    device = torch.cuda.current_device()
    read = None if data_iterator is None else next(data_iterator)
    shape = (get_args().micro_batch_size, get_args().seq_length)
    batch = {}
    for name in ("tokens", "labels", "position_ids", "loss_mask"):
        dtype = torch.float32 if name == "loss_mask" else torch.int64
        if read is not None:
            batch[name] = read[name].to(device=device, dtype=dtype)
        else:
            batch[name] = torch.empty(shape, dtype=dtype, device=device)
        torch.distributed.broadcast(batch[name], source, group=group)
    if read is not None:
        mask = read["attention_mask"].to(device)
    else:
        mask = torch.ones((1, 1, shape[1], shape[1]), dtype=torch.bool, device=device).triu(1)
    batch["attention_mask"] = mask
    return batch
