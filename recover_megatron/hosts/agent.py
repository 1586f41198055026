"""The launch agent: mpirun runs it, in ssh's place, once for each other host.

    python -m recover_megatron.hosts.agent HOST WORDS-OF-THE-DAEMON'S-COMMAND

It starts `relay.py` on the host with the daemon's command, and stays as long as mpirun must believe
that the host is there: mpirun takes the end of its agent, or of the daemon's connection, for the
loss of the host and ends the job. What it needs to know stands in the launcher's settings file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recover_megatron.console import say
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.hosts.tunnel import Tunnel

SETTINGS = "RECOVER_AGENT_SETTINGS"
# Where a daemon finds its parent: `prte_hnp_uri "prterun-h0-1@0.0;tcp://10.0.0.1:3456:24"`.
URI = re.compile(
    r'((?:prte_hnp_uri|prte_parent_uri) "?[^";]+);tcp://([0-9.]+)(?:,[0-9.,]+)?:(\d+):([0-9,]+)'
)

_GRACE_S = 2.0  # for the relay to see its daemon's end


def main(argv: list[str]) -> int:
    settings = json.loads(Path(os.environ[SETTINGS]).read_text(encoding="utf-8"))
    host, command = argv[0], " ".join(argv[1:])
    folder = HostFolder(settings["folder"])
    log = Path(settings["logs"]) / f"host.{host}.log"
    found = URI.search(command)
    if found is None:
        say(f"no address of mpirun in the command for host {host}")
        return 1
    address, port = found[2], int(found[3])
    tunnel = Tunnel(
        address,
        (address, port),
        protect="target",
        fenced=lambda: host in folder.lines("fenced"),
        admit=settings["password"],
    )
    order = {
        "host": host,
        "command": command,
        "tunnel": [address, tunnel.port],
        "launcher": settings["launcher"],
        "password": settings["password"],
        "orphaned": settings["orphaned"],
    }
    with log.open("ab") as output:
        remote = start_remote(settings, host, order, output)
        while remote.poll() is None and not tunnel.ended.wait(0.1):
            pass
    if tunnel.joined.is_set():
        # The job has ended, or the host is lost, which mpirun must not see. It ends this process
        # when it ends, or the launcher ends both.
        tunnel.ended.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            remote.wait(_GRACE_S)
        remote.kill()  # it would wait for a host that is out of reach
        os._exit(0)  # a code would be taken for the host's loss
    code = remote.wait()
    say(f"host {host} did not start (code {code}): {_last(log)}")
    return code or 1


def remote_words(remote_shell: Sequence[str], host: str, command: str) -> list[str]:
    """The user's remote shell, running a command line on `host`."""
    return [*(word.replace("{host}", host) for word in remote_shell), command]


def start_remote(
    settings: dict[str, Any], host: str, order: dict[str, Any], output: Any
) -> subprocess.Popen[bytes]:
    """The relay on `host`, by the user's remote shell; the order goes to its standard input, so
    that no password stands in a list of processes."""
    words = [settings["python"], "-m", "recover_megatron.hosts.relay"]
    quoted = shlex.join(words)  # ssh gives one string to the remote user's shell
    # What mpirun's TMPDIR names is this host's folder, and goes with it; srun would hand it on.
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    remote = subprocess.Popen(
        remote_words(settings["remote_shell"], host, quoted),
        env=environment | settings["temporary"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=settings["directory"],
    )
    assert remote.stdin is not None
    with remote.stdin as pipe:
        pipe.write(json.dumps(order).encode() + b"\n")
    return remote


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
