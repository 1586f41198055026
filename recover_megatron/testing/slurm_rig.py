"""A real Slurm over the hosts of rig.py: slurmctld on the last, slurmd on each of the others.

Needs root and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from recover_megatron.testing.rig import Rig, missing, until

TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "munged", "mungekey")
_CONF = """\
ClusterName=rig
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdTimeout=10
KillWait=5
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def slurm_missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"no {tool} here (Debian: slurm-wlm, munge)"
    return missing()


class Slurm:
    """`with Rig(...) as rig, Slurm(rig, folder) as slurm:`"""

    def __init__(self, rig: Rig, folder: Path):
        self._rig, self._folder = rig, folder
        *self.nodes, self.controller = rig.names
        self._munged: subprocess.Popen | None = None

    def __enter__(self) -> Slurm:
        folder, rig = self._folder, self._rig
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        nodes = "\n".join(
            f"NodeName={h} NodeAddr={rig.address(h)} CPUs=4 RealMemory=2000 State=UNKNOWN"
            for h in self.nodes
        )
        where = {"controller": self.controller, "address": rig.address(self.controller)}
        conf = _CONF.format(**where, folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(conf)
        subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        words = [f"--{name}={folder}/munge.{kind}" for name, kind in files.items()]
        words += [f"--log-file={folder}/munge.log", "--foreground", "--force"]
        log = (folder / "munged.txt").open("wb")
        self._munged = subprocess.Popen(["munged", *words], stdout=log, stderr=log)
        until((folder / "munge.socket").exists, "munged")
        self("slurmctld")
        for host in self.nodes:
            self("slurmd", "-N", host, host=host)
        until(self._all_idle, "idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait()

    def _all_idle(self) -> bool:
        states = self("sinfo", "-h", "-N", "-o", "%t").split()
        return states == ["idle"] * len(self.nodes)

    @property
    def environment(self) -> dict[str, str]:
        """Of the controller's host."""
        return {**self._rig.environment(self.controller), "SLURM_CONF": self._conf}

    @property
    def _conf(self) -> str:
        return f"{self._folder}/slurm.conf"

    def __call__(self, *words: str, host: str | None = None) -> str:
        """Runs a command of Slurm's, on the controller or another host; what it says."""
        host = host or self.controller
        env = {**self._rig.environment(host), "SLURM_CONF": self._conf}
        command = self._rig.command(host, list(words))
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, ..."""
        shown = self("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]
