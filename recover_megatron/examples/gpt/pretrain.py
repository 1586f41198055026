"""Pre-train a GPT on megatron-core alone: the demo's, the tests' and CI's training script.

    torchrun --nproc-per-node 4 -m recover_megatron \
        recover_megatron/examples/gpt/pretrain.py <Megatron flags>
    recover-megatron launch --replicas 4 -- \
        recover_megatron/examples/gpt/pretrain.py <Megatron flags> --recover
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from recover_megatron.examples.gpt.data import get_batch
from recover_megatron.examples.gpt.model import edges
from recover_megatron.examples.gpt.training import pretrain


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    report = torch.stack([loss.detach().clone(), tokens.float()])
    return loss, tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    if not any(edges(model.vp_stage)):
        return model(None, None, None, labels=None), None
    batch = get_batch(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(_loss, batch["loss_mask"])


if __name__ == "__main__":
    pretrain(forward_step)
