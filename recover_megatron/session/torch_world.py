"""A torch.distributed world for each replica: the environment of `init_process_group("env://")`."""

from __future__ import annotations

import os
import socket
from typing import Protocol

from recover_megatron.hosts.addresses import address_for_mates, interface_of
from recover_megatron.session.session import OwnRank


class Sharing(Protocol):
    """What is needed of membership (UlfmMembership.share)."""

    def share(self, value: bytes, ranks: range) -> list[bytes]: ...


def own_torch_world(membership: Sharing, own: OwnRank) -> object | None:
    """Sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so that the host framework
    believes it runs alone. All ranks of a replica call it.

    The store's server listens on a port that the kernel chose and that is never free again in
    between, and on the loopback interface if the whole replica is on one host.

    Returns:
        The store's server, which position 0 must keep; None elsewhere.
    """
    mates = own.layout.ranks_of(own.replica_id)
    name = socket.gethostname()
    hosts = [each.decode() for each in membership.share(name.encode(), mates)]
    one_host = len(set(hosts)) == 1
    # Its own address is what position 0 knows best; its name may mean another one elsewhere.
    mine = "127.0.0.1" if one_host else address_for_mates([h for h in hosts if h != name])
    address = membership.share(mine.encode(), mates)[0].decode()
    listener, port = None, b""
    if own.position == 0:
        listener = socket.create_server((address, 0), backlog=1024)
        port = str(listener.getsockname()[1]).encode()
    port = membership.share(port, mates)[0]
    os.environ.update(
        RANK=str(own.position),
        WORLD_SIZE=str(own.layout.ranks_per_replica),
        LOCAL_RANK=os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        LOCAL_WORLD_SIZE=os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        MASTER_ADDR=address,
        MASTER_PORT=port.decode(),
        TORCHELASTIC_USE_AGENT_STORE="True",  # all ranks are clients of the server made here
    )
    if interface := "lo" if one_host else interface_of(mine):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if listener is None:
        return None
    import torch.distributed

    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
