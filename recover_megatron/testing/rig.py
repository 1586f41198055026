"""Hosts on one machine: Linux namespaces on a bridge, each with a real sshd. Needs root.

A host is a process that has its own pid, network, host name, IPC and mount namespaces; killing it
kills all that runs there, and its kernel closes their connections, as when a machine is reset. With
its link down it lives on and nothing reaches it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SSHD = "/usr/sbin/sshd"
_PREFIX = "10.77"


def missing() -> str | None:
    """Why this machine cannot have a rig; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a rig of hosts needs Linux and root"
    for tool in ("ip", "tc", "nsenter", "unshare", "taskset", "ssh", "ssh-keygen", SSHD):
        if shutil.which(tool) is None:
            return f"a rig of hosts needs {tool} (Debian: iproute2, util-linux, openssh-server)"
    bridge = "ip link add rigtry type bridge"  # in a network namespace of its own
    separate = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork"]
    tried = subprocess.run([*separate, *bridge.split()], capture_output=True)
    return None if tried.returncode == 0 else "namespaces or bridges are not allowed here"


class Rig:
    """`with Rig(folder, 4) as rig:` makes h0..h3. `folder` is seen by all of them."""

    def __init__(self, folder: Path, hosts: int):
        self._folder = folder
        self._net = os.getpid() % 250  # so that two rigs can stand side by side
        self._bridge = f"rig{self._net}"
        self.names = [f"h{k}" for k in range(hosts)]
        self._inits: dict[str, int] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def address(self, host: str) -> str:
        return f"{_PREFIX}.{self._net}.{self.names.index(host) + 1}"

    def __enter__(self) -> Rig:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keys()
        _do("ip", "link", "add", self._bridge, "type", "bridge")
        _do("ip", "link", "set", self._bridge, "up")
        for host in self.names:
            self._boot(host)
        for host in self.names:
            until(functools.partial(self._answers, host), f"sshd on {host}")
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self._inits):
            self.kill(host)
        for process in self._started:
            process.wait()
        for host in self.names:
            subprocess.run(["ip", "link", "del", self._veth(host)], capture_output=True)
        for bridge in (self._bridge, f"{self._bridge}i"):
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)

    # --- what a test does to hosts ---------------------------------------------------------------

    def kill(self, host: str) -> None:
        os.kill(self._inits.pop(host), signal.SIGKILL)

    def kill_process(self, host: str, pid: int) -> None:
        """SIGKILL to the process that has this number on the host."""
        subprocess.run(self.command(host, ["kill", "-9", str(pid)]), check=True)

    def link(self, host: str, up: bool) -> None:
        _do("ip", "link", "set", self._veth(host), "up" if up else "down")

    def partition(self, hosts: Sequence[str]) -> None:
        """These hosts reach each other, and none of the others."""
        island = f"{self._bridge}i"
        _do("ip", "link", "add", island, "type", "bridge")
        _do("ip", "link", "set", island, "up")
        for host in hosts:
            _do("ip", "link", "set", self._veth(host), "master", island)

    def heal(self) -> None:
        for host in self._inits:
            _do("ip", "link", "set", self._veth(host), "master", self._bridge)

    def slow(self, host: str, kbit_s: int) -> None:
        """At most so much goes to this host."""
        shape = f"tbf rate {kbit_s}kbit burst 16kb latency 400ms".split()
        _do("tc", "qdisc", "add", "dev", self._veth(host), "root", *shape)

    def processes(self, host: str) -> list[str]:
        """Command lines of what runs on the host, but for sshd and the host itself."""
        own = os.readlink(f"/proc/{self._inits[host]}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns" / "pid") == own:
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words and not words.startswith(("sleep infinity", "sshd:")):
                        found.append(words)
        return found

    def temporary(self, host: str) -> Path:
        """The host's own folder for temporary files."""
        return self._folder / f"tmp_{host}"

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` on the host, from outside."""
        own = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        enter = ["nsenter", "--target", str(self._inits[host]), *own, f"--wd={os.getcwd()}"]
        return ["taskset", "-c", self._core(host), *enter, *words]

    def environment(self, host: str) -> Mapping[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary(host))}

    @property
    def remote_shell(self) -> str:
        return f"ssh -F {self._folder}/ssh_config {{host}}"

    # --- how hosts are made ----------------------------------------------------------------------

    def _boot(self, host: str) -> None:
        tmp = self.temporary(host)
        tmp.mkdir()
        address = self.address(host)
        boot = f"""
            hostname {host}
            mount --make-rprivate /
            mount -t proc proc /proc
            mount -t tmpfs -o size=4g tmpfs /dev/shm
            mount --bind {self._folder}/hosts /etc/hosts
            mount --bind {self._folder}/resolv.conf /etc/resolv.conf
            mkdir -p /run/sshd
            ip link set lo up
            until ip link show e0 2>/dev/null; do sleep 0.02; done
            ip addr add {address}/24 dev e0
            ip link set e0 up
            {SSHD} -f {self._folder}/sshd_config -E {tmp}/sshd.log -o ListenAddress={address} \
                -o SetEnv=TMPDIR={tmp}
            exec sleep infinity"""
        separate = ["--fork", "--pid", "--net", "--uts", "--ipc", "--mount"]
        log = (tmp / "boot.log").open("wb")
        process = subprocess.Popen(
            ["taskset", "-c", self._core(host), "unshare", *separate, "sh", "-ec", boot],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        self._started.append(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: children.read_text().split(), f"the first process of {host}")
        self._inits[host] = int(children.read_text().split()[0])
        pid, veth = str(self._inits[host]), self._veth(host)
        _do("ip", "link", "add", veth, "type", "veth", "peer", "name", "e0", "netns", pid)
        _do("ip", "link", "set", veth, "master", self._bridge)
        _do("ip", "link", "set", veth, "up")

    def _keys(self) -> None:
        folder = self._folder
        for name in ("host_key", "user_key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        hosts = [f"{self.address(h)} {h}" for h in self.names]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (folder / "resolv.conf").write_text("")  # no name server is in reach; do not wait for one
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\n"
            "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
        )
        (folder / "ssh_config").write_text(
            f"IdentityFile {folder}/user_key\nStrictHostKeyChecking no\nBatchMode yes\n"
            f"UserKnownHostsFile {folder}/known_hosts\nLogLevel ERROR\n"
        )

    def _answers(self, host: str) -> bool:
        words = ["ssh", "-F", f"{self._folder}/ssh_config", host, "true"]
        return subprocess.run(self.command(host, words), capture_output=True).returncode == 0

    def _core(self, host: str) -> str:
        """Every host has one core, so that ranks know that they must share."""
        cores = sorted(os.sched_getaffinity(0))
        return str(cores[self.names.index(host) % len(cores)])

    def _veth(self, host: str) -> str:
        return f"{self._bridge}{host}"


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def until(condition: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + 30
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"no {what}")
        time.sleep(0.05)
