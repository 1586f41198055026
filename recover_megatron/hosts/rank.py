"""A rank's dealings with the witness of its host."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable

from recover_megatron.collectives.membership.quorum import running, started
from recover_megatron.hosts.folder import FOLDER, HOST, WITNESS_PID, HostFolder


class RankOnHost:
    """Made by every rank of a job on several hosts, before it starts MPI."""

    def __init__(self) -> None:
        self.host = os.environ[HOST]
        self.folder = HostFolder(os.environ[FOLDER])
        self._witness_pid = int(os.environ[WITNESS_PID])
        self._witness_began = started(self._witness_pid) or "?"
        self.folder.write(f"ranks/{os.getpid()}", started(os.getpid()) or "?")

    @classmethod
    def if_any(cls) -> RankOnHost | None:
        """None in a job on one host, which needs no witness."""
        return cls() if FOLDER in os.environ else None

    def has_witness(self) -> bool:
        return running(self._witness_pid, self._witness_began)

    def silent(self) -> frozenset[str]:
        """The hosts that the witness has not heard of for long."""
        return self.folder.lines("silent")

    def cut_off(self, hosts: frozenset[str]) -> None:
        """End this rank's connections with other hosts: MPI then sees all their ranks fail."""
        cut_off(self._addresses(hosts))

    def fence(self, hosts: Iterable[str]) -> None:
        """After a repair: nothing that lost hosts may still send is to be heard. If a partition
        heals, what their ranks believed of ours would make the run-time take ours for dead."""
        lost = frozenset(hosts)
        self.folder.write_lines("fenced", lost)
        self.cut_off(lost)

    def proven_dead(self) -> frozenset[str]:
        """Hosts, and processes as `host pid`, of which the witness has proof."""
        return self.folder.lines("dead")

    def had_no_quorum(self) -> None:
        self.folder.write("no_quorum")

    def done(self, code: int) -> None:
        self.folder.write("done", f"{code}\n")

    def _addresses(self, hosts: frozenset[str]) -> frozenset[str]:
        known = (line.split() for line in self.folder.lines("addresses"))
        return frozenset(address for host, address in known if host in hosts)


class HostWatch:
    """What a rank on one of several hosts looks for all the time: a reason to leave, or None.

    Other hosts take the end of this host's witness for proof that no rank runs here. Of hosts that
    the witness has not heard of for long, the majority cuts off the others: MPI then sees all their
    ranks fail at once, where its own heartbeat finds them one after the other, each after a
    time-out. A minority leaves before it has called anyone failed: what it said would reach the
    majority if the link healed, and end it.

    Args:
        on_host: This rank's dealings with its witness.
        has_quorum_without: Whether the ranks of all hosts but these may go on.
    """

    def __init__(self, on_host: RankOnHost, has_quorum_without: Callable[[frozenset[str]], bool]):
        self._on_host, self._has_quorum_without = on_host, has_quorum_without
        self._cut: frozenset[str] = frozenset()

    def __call__(self) -> str | None:
        """By the watcher thread."""
        if not self._on_host.has_witness():
            return "its host's witness has ended"
        silent = self._on_host.silent()
        if silent - self._cut:
            if not self._has_quorum_without(silent):
                self._on_host.had_no_quorum()
                names = ", ".join(sorted(silent))
                return (
                    f"no sign of life from {names}, and the ranks that are left are no majority: "
                    "the others may go on, so this side must not"
                )
            self._on_host.cut_off(silent - self._cut)
            self._cut |= silent
        return None


def cut_off(addresses: frozenset[str]) -> None:
    """Shut down all of this process's TCP connections with these addresses, whoever owns them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                peer = connection.getpeername()
                if isinstance(peer, tuple) and peer[0].removeprefix("::ffff:") in addresses:
                    connection.shutdown(socket.SHUT_RDWR)
