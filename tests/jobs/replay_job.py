"""Plain Megatron over the very samples that another run committed: the oracle of `versatile`.

torchrun ... replay_job.py SAMPLES.json <Megatron flags>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recover_megatron.adapters.megatron import cpu
from recover_megatron.adapters.megatron.command_line import PLATFORM_FLAG


def main() -> None:
    samples = json.loads(Path(sys.argv[1]).read_text())
    at = sys.argv.index(PLATFORM_FLAG)
    sys.argv[1:] = sys.argv[2:at] + sys.argv[at + 2 :]
    cpu.install_torch()
    cpu.install_core()
    from torch.utils.data import default_collate

    from recover_megatron.examples.gpt import pretrain, training

    def in_order(dataset, consumed_samples):
        return (default_collate([dataset[i % len(dataset)]]) for i in samples)

    training.build_pretraining_data_loader = in_order
    training.pretrain(pretrain.forward_step)


if __name__ == "__main__":
    main()
