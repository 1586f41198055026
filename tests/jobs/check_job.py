"""Replica 1 of 3 has loaded another iteration, or ends with one parameter off by one bit: it must
be named everywhere."""

from __future__ import annotations

import os
import sys

from recover_megatron.adapters.megatron.command_line import read_job
from recover_megatron.errors import ConfigError, Unrecoverable
from recover_megatron.session import leaving
from recover_megatron.session.exits import EXIT_CONFIG, EXIT_UNRECOVERABLE
from recover_megatron.session.start import start


def main() -> None:
    session = start(read_job(sys.argv[1:]))
    from recover_megatron.adapters.megatron import cpu

    cpu.install_torch()
    import torch

    from recover_megatron.session.peers import Peers

    peers = Peers(session)
    if "LOADED" in os.environ:
        at = int(os.environ["LOADED"]) + (session.replica_id == 1)
        try:
            peers.check_same_iteration(at)
        except ConfigError as error:
            print(f"verdict: {error}", flush=True)
            leaving.finish(session, EXIT_CONFIG)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    peers.check_parameters(model.parameters(), iteration=1)
    if (session.replica_id, session.position) == (1, 1):
        model.bias.data.view(torch.int32)[3] ^= 1
    try:
        peers.check_parameters(model.parameters(), iteration=2)
    except Unrecoverable as error:
        print(f"verdict: {error}", flush=True)
        leaving.finish(session, EXIT_UNRECOVERABLE)
    leaving.finish(session, 0)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:  # noqa: BLE001
        leaving.die(None, error)
