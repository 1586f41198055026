"""The part of `recover-megatron launch` for several hosts: placement, mpirun's agent, the watch."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.console import say
from recover_megatron.errors import ConfigError
from recover_megatron.hosts.addresses import address_of, address_towards
from recover_megatron.hosts.agent import SETTINGS, remote_words
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.hosts.witness import Witness
from recover_megatron.launch.mpirun import wait_until_over
from recover_megatron.session.exits import EXIT_UNRECOVERABLE

REMOTE_SHELL = "ssh -o BatchMode=yes {host}"
# What ranks on other hosts get of the launcher's environment, beside what is asked for.
FORWARDED = (
    *("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_"),
    *("NCCL_", "GLOO_", "UCX_", "TORCH", "PYTORCH_", "NVTE_", "TRITON_", "XDG_CACHE_HOME"),
    *("HF_", "TRANSFORMERS_", "TIKTOKEN_", "TENSORBOARD_", "WANDB_", "MEGATRON_"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy"),
    *("all_proxy", "no_proxy", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "LANG", "LC_", "TZ"),
)
FORWARDED_NAMES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
# How long mpirun may take to see by itself that all ranks have ended.
_GRACE_S = 1.5
ANSWER_S = 60.0  # for a host to show that it is there


@dataclass(frozen=True)
class Host:
    name: str
    slots: int


def parse_hosts(
    text: str, replicas: int, ranks_per_replica: int, spares: int = 0
) -> tuple[Host, ...]:
    """`h0,h1` or `h0:8,h1:4` (ranks on each). Without numbers, whole replicas are spread evenly
    over all but `spares` of them, or each replica evenly over the same number of hosts.

    Raises ConfigError for a host named twice, for too few slots, and where no even spread uses all
    the hosts.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not 0 <= spares < max(len(words), 1):
        raise ConfigError(f"--spare-hosts {spares}: of {len(words)} hosts one at least must work")
    names = [word.partition(":")[0] for word in words]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        raise ConfigError(f"--hosts {text!r}: " + (f"{twice[0]} twice" if twice else "no host"))
    hosts = []
    for word in words:
        name, colon, slots = word.partition(":")
        if colon and not (slots.isdigit() and int(slots)):
            raise ConfigError(f"--hosts: expected NAME or NAME:SLOTS, got {word!r}")
        even = 0 if colon else _evenly(len(words) - spares, replicas, ranks_per_replica)
        hosts.append(Host(name, int(slots) if colon else even))
    needed = replicas * ranks_per_replica
    offered = sum(sorted(host.slots for host in hosts)[: len(hosts) - spares])
    if offered < needed:
        raise ConfigError(f"--hosts offers {offered} slots, but the job has {needed} ranks")
    return tuple(hosts)


def _evenly(hosts: int, replicas: int, ranks_per_replica: int) -> int:
    """The ranks on each of `hosts`."""
    if hosts <= replicas:
        return -(-replicas // hosts) * ranks_per_replica
    together = hosts // replicas  # hosts that share a replica
    if hosts % replicas or ranks_per_replica % together:
        raise ConfigError(
            f"--hosts: {replicas} replicas of {ranks_per_replica} ranks do not spread evenly over "
            f"{hosts} hosts; say how many ranks each is to have, NAME:RANKS"
        )
    return ranks_per_replica // together


def without_spares(hosts: Sequence[Host], spares: int, remote_shell: str) -> tuple[Host, ...]:
    """All but `spares` of the hosts: the first that answer. With spares, every host is asked, at
    once, to run `true` within ANSWER_S.

    Raises ConfigError naming those that do not answer, if too few do.
    """
    if not spares:
        return tuple(hosts)
    own = _this_host([host.name for host in hosts])[0]
    asked = {
        host.name: subprocess.Popen(
            remote_words(shlex.split(remote_shell), host.name, "true"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for host in hosts
        if host.name != own
    }
    limit = time.monotonic() + ANSWER_S
    silent = {name: said for name, p in asked.items() if (said := _no_answer(p, limit)) is not None}
    for name, said in silent.items():
        say(f"host {name} does not answer: {said}")
    chosen = [host for host in hosts if host.name not in silent][: len(hosts) - spares]
    if len(chosen) < len(hosts) - spares:
        raise ConfigError(
            f"--hosts: {', '.join(silent)} of {len(hosts)} hosts do not answer, and there are only "
            f"{spares} spares; mend them or start fewer replicas"
        )
    return tuple(chosen)


def _no_answer(process: subprocess.Popen[bytes], limit: float) -> str | None:
    """What was said instead; None for an answer."""
    try:
        said = process.communicate(timeout=max(0.1, limit - time.monotonic()))[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"nothing within {ANSWER_S:.0f} s"
    return None if process.returncode == 0 else said.decode(errors="replace").strip()


def placement(hosts: Sequence[Host], replicas: int, ranks_per_replica: int) -> str:
    """Which replica goes where, a line a host; ranks fill the hosts in order."""
    lines, rank = [], 0
    for host in hosts:
        last = min(rank + host.slots, replicas * ranks_per_replica)
        found = sorted({r // ranks_per_replica for r in range(rank, last)})
        lines.append(f"{host.name}: replicas {', '.join(map(str, found)) or 'none'}")
        rank = last
    return "\n".join(lines)


class HostJob(AbstractContextManager["HostJob"]):
    """What has to stand on the launcher's host before mpirun starts, and as long as it runs."""

    def __init__(
        self,
        hosts: Sequence[Host],
        run_dir: Path,
        remote_shell: str,
        orphaned: Mapping[str, Sequence[str]] | None = None,
        forward: Sequence[str] = (),
    ):
        """`orphaned` is for a job that ends after this host was lost: the command that is run then
        in the launcher's place, by exit code; that of "" for all others. `forward` are variables
        of the environment that ranks on other hosts get, beside FORWARDED."""
        self._forward = frozenset(forward)
        self._hosts = hosts
        self._orphaned = {code: list(words) for code, words in (orphaned or {}).items()}
        self._logs = run_dir / "hosts"
        self._remote_shell = shlex.split(remote_shell)
        if not any("{host}" in word for word in self._remote_shell):
            raise ConfigError(f"--remote-shell {remote_shell!r} must hold {{host}}")

    def __enter__(self) -> HostJob:
        self._logs.mkdir(parents=True, exist_ok=True)
        # Where something still writes into it, the job has not failed for that.
        self._temporary = tempfile.TemporaryDirectory(prefix="recover-", ignore_cleanup_errors=True)
        self.folder = HostFolder(self._temporary.name)
        self.name, address = _this_host([host.name for host in self._hosts])
        password = secrets.token_hex(16)
        self.witness = Witness(self.name, address, self.folder, password)
        self.witness.start(None)
        settings = {
            "folder": str(self.folder.path),
            "logs": str(self._logs.resolve()),
            "launcher": [address, self.witness.port, self.name],
            "password": password,
            "python": sys.executable,
            "remote_shell": self._remote_shell,
            "directory": str(Path.cwd()),
            "orphaned": self._orphaned,
            "temporary": {k: v for k, v in os.environ.items() if k == "TMPDIR"},
        }
        self.folder.write("settings", json.dumps(settings))
        self.folder.write("hostfile", "".join(f"{h.name} slots={h.slots}\n" for h in self._hosts))
        return self

    def __exit__(self, *_: object) -> None:
        self.witness.stop()
        self._temporary.cleanup()

    @property
    def environment(self) -> Mapping[str, str]:
        """Of mpirun, and so of the ranks on its own host."""
        settings = {SETTINGS: str(self.folder.path / "settings")}
        return settings | self.folder.environment(self.name)

    @property
    def arguments(self) -> list[str]:
        """For mpirun: docs/ulfm.md, the command line."""
        agent = f"{sys.executable} -m recover_megatron.hosts.agent"
        if " " in sys.executable or ":" in sys.executable:
            raise ConfigError(
                f"Open MPI cannot start {sys.executable!r} on other hosts; install into a folder "
                "without blanks and colons"
            )
        settings = {
            "plm": "ssh",
            "plm_ssh_agent": agent,
            "plm_ssh_no_tree_spawn": "1",
            "oob_tcp_disable_ipv6_family": "1",
            "state_base_recoverable": "1",
            "rml_base_radix": str(max(64, len(self._hosts) + 1)),
        }
        words = ["--hostfile", str(self.folder.path / "hostfile"), "--map-by", "slot"]
        for name, value in settings.items():
            words += ["--prtemca", name, value]
        for name in sorted(os.environ):
            named = name in FORWARDED_NAMES or name in self._forward
            if named or name.startswith(FORWARDED):
                words += ["-x", name]
        return words

    def wait(self, mpirun: subprocess.Popen[bytes]) -> int:
        """mpirun's code; 0 if it had to be killed because it cannot know that the job is over (it
        takes the ranks of hosts whose loss was hidden from it for alive); EXIT_UNRECOVERABLE if
        this host's ranks had to leave."""
        code = wait_until_over(mpirun, lambda: self.witness.over, _GRACE_S)
        if code is not None:
            return code
        if not self.folder.has("no_quorum"):
            return 0
        say(
            f"the ranks on {self.name} had to leave, being no majority; hosts out of reach may go "
            "on without it"
        )
        return EXIT_UNRECOVERABLE


def _this_host(names: Sequence[str]) -> tuple[str, str]:
    """This host's name, as among `names` if it is one of them, and its address towards them."""
    own = socket.gethostname()
    others = [name for name in names if name not in (own, own.partition(".")[0], "localhost")]
    name = next((name for name in names if name not in others), None)
    for other in others:
        there, address = address_of(other), address_towards(other)
        if there != address:
            return name or own, address
        name = name or other
    return name or own, "127.0.0.1"
