"""As ulfm_bugs.py, but over four hosts of testing/rig.py: three are killed, or their ranks.

    sudo python benchmarks/ulfm_bugs_rig.py --jobs 30
    sudo python benchmarks/ulfm_bugs_rig.py --jobs 30 --kill ranks --mb 16

hosts: 8 replicas of 2 ranks, two replicas on each host; three random hosts are killed one after the
other at random iterations, mpirun's own among them or not. The last host's two must be left.

ranks: 4 replicas of 2 ranks, one on each host; a rank of three of them is killed, each in an
all-reduce of `--mb` MB, so that much is under way to it. One replica must be left.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from recover_megatron.adapters.megatron.command_line import read_job
from recover_megatron.launch.host_job import HostJob, parse_hosts
from recover_megatron.launch.mpirun import mpirun_command, run_mpirun
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.run_record import RunRecord
from recover_megatron.testing.rehearsal import environment
from recover_megatron.testing.rig import Rig

HOSTS, HANGS_AFTER_S = 4, 120.0
REPLICAS = {"hosts": 8, "ranks": 4}
WORDS = (
    "--recover --micro-batch-size 1 --global-batch-size 12 --tensor-model-parallel-size 2".split()
)


def launch(remote_shell: str, run_dir: str, replicas: int, more: list[str]) -> int:
    """Inside the first host."""
    job, script = read_job(WORDS), str(Path(__file__).with_name("ulfm_bugs_job.py"))
    words = [script, *WORDS, "--recover-trace-dir", run_dir, *more]
    hosts = parse_hosts(",".join(f"h{k}" for k in range(HOSTS)), replicas, 2)
    with HostJob(hosts, Path(run_dir), remote_shell) as host_job:
        command = mpirun_command(job, replicas, words, host_job.arguments)
        at = command.index("-m", command.index("-n"))
        del command[at : at + 2]
        command[1:1] = ["-x", "BENCH_STEPS", "-x", "BENCH_SIZE"]
        env = {**os.environ, **host_job.environment}
        return run_mpirun(command, env, host_job.wait, Path(run_dir))


def one_job(kill: str, seed: int, mb: float, folder: Path) -> Counter[str]:
    run_dir, replicas = folder / "run", REPLICAS[kill]
    more = [str(replicas)]
    if kill == "ranks":
        more += ["--recover-inject", f"random:seed={seed}:every=3:count={HOSTS - 1}:phase=sync"]
    size = {"BENCH_STEPS": "400" if kill == "hosts" else "16", "BENCH_SIZE": str(int(mb * 2**18))}
    with Rig(folder / "rig", HOSTS) as rig, (folder / "log").open("wb") as log:
        me = [sys.executable, str(Path(__file__).resolve())]
        process = subprocess.Popen(
            rig.command("h0", [*me, "--inside", rig.remote_shell, str(run_dir), *more]),
            stdout=log,
            stderr=log,
            env={**environment(), **rig.environment("h0"), **size},
        )
        limit = time.monotonic() + HANGS_AFTER_S
        if kill == "hosts":
            _kill_hosts(rig, run_dir, seed, limit)
        while not (run_dir / "exit_code").exists() and time.monotonic() < limit:
            if kill == "ranks" and process.poll() is not None:
                break  # the launcher; of killed hosts, its own may be one, and the job goes on
            time.sleep(0.1)
        hung = not (run_dir / "exit_code").exists()
    process.wait()
    left = len(AuditedRun(run_dir).survivors)
    output = "".join(p.read_text() for p in run_dir.glob("log.*.txt"))
    return Counter(
        jobs=1,
        kills=HOSTS - 1,
        extra=max(0, replicas // HOSTS - left) if left else 0,
        none_left_or_hung=int(hung),
        aborts=(folder / "log").read_text().count("MPI_ERRORS_ARE_FATAL"),
        wrong_sums=output.count("AssertionError"),
        crashes=output.count("Signal: "),
    )


def _kill_hosts(rig: Rig, run_dir: Path, seed: int, limit: float) -> None:
    draw = random.Random(seed)
    for number, victim in enumerate(draw.sample(range(HOSTS), HOSTS - 1)):
        target = 20 + 60 * number + draw.randrange(40)
        while RunRecord.read(run_dir).iteration < target and time.monotonic() < limit:
            time.sleep(0.05)
        rig.kill(f"h{victim}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kill", choices=sorted(REPLICAS), default="hosts")
    parser.add_argument("--mb", type=float, default=1.0, help="of each of four all-reduces")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        remote_shell, run_dir, replicas, *more = args.inside
        return launch(remote_shell, run_dir, int(replicas), more)
    total: Counter[str] = Counter()
    for seed in range(args.first_seed, args.first_seed + args.jobs):
        with tempfile.TemporaryDirectory(prefix="ulfm-rig-") as folder:
            counts = one_job(args.kill, seed, args.mb, Path(folder))
        total += counts
        print(f"seed {seed:3d}  {dict(+counts)}", flush=True)
    print("total", dict(total))
    return 0


if __name__ == "__main__":
    sys.exit(main())
