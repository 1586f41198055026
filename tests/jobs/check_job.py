"""Replica 1 of 3 has loaded another iteration, or ends with one parameter off by one bit: it must
be named everywhere."""

from __future__ import annotations

import os
import sys

from recover_megatron.adapters.megatron import bootstrap
from recover_megatron.adapters.megatron.session import EXIT_CONFIG, EXIT_UNRECOVERABLE, start
from recover_megatron.errors import ConfigError, Unrecoverable


def main() -> None:
    session = start(sys.argv[1:])
    from recover_megatron.adapters.megatron import cpu

    cpu.install_torch()
    import torch

    from recover_megatron.adapters.megatron.replicas import check_replicas, check_same_iteration

    if "LOADED" in os.environ:
        at = int(os.environ["LOADED"]) + (session.replica_id == 1)
        facts = (session.driver, session.communicator, session.layout, session.replica_id)
        try:
            check_same_iteration(*facts, at)
        except ConfigError as error:
            print(f"verdict: {error}", flush=True)
            session.finish(EXIT_CONFIG)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model = [torch.nn.Linear(8, 8)]
    facts = (session.driver, session.communicator, session.layout, session.replica_id, model)
    check_replicas(*facts, iteration=1)
    if (session.replica_id, session.position) == (1, 1):
        model[0].bias.data.view(torch.int32)[3] ^= 1
    try:
        check_replicas(*facts, iteration=2)
    except Unrecoverable as error:
        print(f"verdict: {error}", flush=True)
        session.finish(EXIT_UNRECOVERABLE)
    session.finish(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:  # noqa: BLE001
        bootstrap.die(None, error)
