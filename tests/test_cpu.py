"""The CPU platform's stand-ins, each in a process of its own: they change torch for good."""

from __future__ import annotations

import subprocess
import sys

GROUPS = """
from datetime import timedelta
from pathlib import Path
import torch
from recover_megatron.adapters.megatron import cpu

cpu.install_torch()
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
limit = timedelta(seconds=33)
groups = [torch.distributed.new_group([0], timeout=limit) for _ in range(5)]
total = torch.ones(3, device="cuda")
for group in groups:
    torch.distributed.all_reduce(total, group=group)
names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
backend = groups[4]._get_backend(torch.device("cpu"))
print(total.tolist(), names.count("gloo_tcp_loop"), backend.options._timeout == limit)
"""


def test_all_groups_of_a_rank_share_one_gloo_thread(env):
    done = subprocess.run(
        [sys.executable, "-c", GROUPS], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout == "[1.0, 1.0, 1.0] 1 True\n"
