"""This host's addresses and interfaces. IPv4 only: Open MPI's run-time is told to use it alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

import psutil

from recover_megatron.errors import ConfigError


def address_towards(host: str) -> str:
    """This host's own address on the way to `host` (nothing is sent). Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def address_for_mates(others: Sequence[str]) -> str:
    """This host's address as the hosts named `others` can reach it. Debian gives a host's own name
    127.0.1.1, which leads nowhere from elsewhere."""
    for other in others:
        with contextlib.suppress(OSError):
            found = address_towards(other)
            if not found.startswith("127."):
                return found
    own = sorted(own_addresses())
    return own[0] if own else socket.gethostbyname(socket.gethostname())


def address_of(host: str) -> str:
    """Of another host, by its name. Raises ConfigError if it has none, or one of IPv6 only."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, None, socket.AF_INET6)
            raise ConfigError(
                f"--hosts: {host} has an address of IPv6 only; a job over several hosts needs one "
                "of IPv4 for each, which is all that Open MPI's run-time uses here"
            ) from None
        raise ConfigError(f"--hosts: cannot find the address of {host!r}: {error}") from None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return name
    return None


def own_addresses() -> frozenset[str]:
    """All IPv4 addresses of this host but the loopback ones."""
    found = (a for addresses in psutil.net_if_addrs().values() for a in addresses)
    own = {a.address for a in found if a.family == socket.AF_INET}
    return frozenset(address for address in own if not address.startswith("127."))
