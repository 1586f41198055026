"""The other host's side of the launch agent: started there by agent.py, its order on stdin.

Runs mpirun's daemon behind a tunnel of its own, so that the daemon does not see the loss of
mpirun's host, which would be the end of all ranks here; and is this host's witness.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recover_megatron.console import say
from recover_megatron.hosts.addresses import address_towards
from recover_megatron.hosts.agent import URI
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.hosts.tunnel import Tunnel
from recover_megatron.hosts.witness import Witness

_END_S = 10.0  # from the end of this host's ranks to that of all others


def main() -> None:
    order = json.loads(sys.stdin.readline())
    # The shell that started this may go, with mpirun's host; nobody reads the output then.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="recover-", ignore_cleanup_errors=True) as path:
        code = _serve(order, HostFolder(path))
    os._exit(code)


def _serve(order: dict[str, Any], folder: HostFolder) -> int:
    host, password = order["host"], order["password"]
    mpirun, port = order["tunnel"]
    launcher_address, launcher_port, launcher_name = order["launcher"]
    here = address_towards(mpirun)
    witness = Witness(host, here, folder, password)
    witness.start((launcher_address, launcher_port))

    def mpirun_is_fenced() -> bool:
        return launcher_name in folder.lines("fenced")

    tunnel = Tunnel(
        here,
        (mpirun, port),
        protect="client",
        fenced=mpirun_is_fenced,
        present=password,
    )
    command = URI.sub(lambda found: f"{found[1]};tcp://{here}:{tunnel.port}:24", order["command"])
    command = command.replace(" --daemonize ", " ", 1)  # its end is to be seen here
    daemon = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env={**os.environ, **folder.environment(host)},
        start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: _kill_group(daemon))
    say(f"daemon {daemon.pid}, witness at {here}:{witness.port}", f"relay on {host}")
    try:
        code = _wait(daemon, tunnel, witness, mpirun_is_fenced)
    except BaseException:
        _kill_group(daemon)  # it must not live on without a witness
        raise
    if code is None:
        code = daemon.wait()
        # The end of mpirun alone proves nothing: the launcher ends it when the job is over.
        if launcher_name in folder.lines("dead") | folder.lines("silent"):
            _in_the_launchers_place(order["orphaned"], witness, launcher_name)
    witness.stop()
    say(f"ends, daemon's code {code}", f"relay on {host}")
    return code


def _wait(
    daemon: subprocess.Popen[bytes],
    tunnel: Tunnel,
    witness: Witness,
    mpirun_is_fenced: Callable[[], bool],
) -> int | None:
    """Until the daemon has ended, by mpirun's order: its code. None if mpirun is lost and nothing
    is left to do here: the daemon has been killed."""
    while True:
        try:
            return daemon.wait(0.1)
        except subprocess.TimeoutExpired:
            pass
        cut = tunnel.far_lost.is_set() or mpirun_is_fenced()
        if nothing_is_left(witness.left, cut, witness.folder.has("no_quorum")):
            say("mpirun is out of reach and no rank is left here", "relay")
            _kill_group(daemon)
            return None


def nothing_is_left(ranks: int | None, mpirun_is_cut: bool, no_quorum: bool) -> bool:
    """True if the daemon here waits for orders that will not come: all of this host's ranks have
    ended (None: they have not begun), and mpirun is out of reach, or they had to leave."""
    return ranks == 0 and (mpirun_is_cut or no_quorum)


def duty(orphaned: Mapping[str, Sequence[str]], code: str, no_quorum: bool) -> Sequence[str] | None:
    """What is to be done in the lost launcher's place after a job that ended with `code` (empty if
    it is not known), by the code, or "" for all others. Nothing on hosts that had to leave: the job
    goes on elsewhere."""
    if no_quorum or not code:
        return None
    return orphaned.get(code) or orphaned.get("") or None


def _in_the_launchers_place(
    orphaned: dict[str, list[str]], witness: Witness, launcher: str
) -> None:
    """The launcher's host was lost and the job has ended all the same: its last duty, such as to
    end the Slurm job, is done from one of the hosts that are left."""
    limit = time.monotonic() + _END_S
    while not witness.over and time.monotonic() < limit:
        time.sleep(0.1)
    (code,) = witness.folder.lines("done") or ("",)
    command = duty(orphaned, code, witness.folder.has("no_quorum"))
    if command and witness.take_duty(launcher):
        say(f"in the launcher's place: {' '.join(command)}", "relay")
        with contextlib.suppress(OSError):
            subprocess.run(command, timeout=_END_S, check=False)


def _kill_group(daemon: subprocess.Popen[bytes]) -> None:
    """The daemon; its ranks end with it. Also on SIGTERM: the host is being shut down."""
    try:
        os.killpg(daemon.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
