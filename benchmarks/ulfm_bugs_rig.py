"""As ulfm_bugs.py, but whole hosts die: four hosts of tests/rig.py, three of them killed.

    sudo python benchmarks/ulfm_bugs_rig.py --jobs 30

8 replicas of 2 ranks, two replicas on each host; three random hosts are killed one after the other
at random iterations, mpirun's own among them or not. The last host's two replicas must be left.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recover_megatron.adapters.megatron.arguments import read_job  # noqa: E402
from recover_megatron.tools.launch import mpirun_command, run_mpirun  # noqa: E402
from recover_megatron.tools.launch_hosts import HostJob, parse_hosts  # noqa: E402
from recover_megatron.tools.rehearsal import environment  # noqa: E402
from recover_megatron.tools.run_record import RunRecord, last_iteration  # noqa: E402
from tests.rig import Rig  # noqa: E402

REPLICAS, HOSTS, HANGS_AFTER_S = 8, 4, 120.0
WORDS = (
    "--recover --micro-batch-size 1 --global-batch-size 12 --tensor-model-parallel-size 2".split()
)


def launch(remote_shell: str, run_dir: str) -> int:
    """Inside the first host."""
    job, script = read_job(WORDS), str(Path(__file__).with_name("ulfm_bugs_job.py"))
    words = [script, *WORDS, "--recover-trace-dir", run_dir]
    hosts = parse_hosts(",".join(f"h{k}" for k in range(HOSTS)), REPLICAS, 2)
    with HostJob(hosts, Path(run_dir), remote_shell) as host_job:
        command = mpirun_command(job, REPLICAS, words, host_job.arguments)
        at = command.index("-m", command.index("-n"))
        del command[at : at + 2]
        more = ["-x", "BENCH_STEPS"]
        command[1:1] = more
        env = {**os.environ, **host_job.environment}
        return run_mpirun(command, env, host_job.wait, Path(run_dir))


def one_job(seed: int, folder: Path) -> Counter[str]:
    draw, run_dir = random.Random(seed), folder / "run"
    victims = draw.sample(range(HOSTS), HOSTS - 1)
    with Rig(folder / "rig", HOSTS) as rig, (folder / "log").open("wb") as log:
        me = [sys.executable, str(Path(__file__).resolve())]
        process = subprocess.Popen(
            rig.command("h0", [*me, "--inside", rig.remote_shell, str(run_dir)]),
            stdout=log,
            stderr=log,
            env={**environment(), **rig.environment("h0"), "BENCH_STEPS": "400"},
        )
        limit = time.monotonic() + HANGS_AFTER_S
        for number, victim in enumerate(victims):
            target = 20 + 60 * number + draw.randrange(40)
            while last_iteration(run_dir) < target and time.monotonic() < limit:
                time.sleep(0.05)
            rig.kill(f"h{victim}")
        while not (run_dir / "exit_code").exists() and time.monotonic() < limit:
            time.sleep(0.1)
        hung = not (run_dir / "exit_code").exists()
    process.wait()
    record = RunRecord(run_dir)
    output = "".join(p.read_text() for p in run_dir.glob("log.*.txt"))
    return Counter(
        jobs=1,
        host_kills=len(victims),
        extra=max(0, 2 - len(record.survivors)) if record.survivors else 0,
        none_left_or_hung=int(hung),
        wrong_sums=output.count("AssertionError"),
        crashes=output.count("Signal: "),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return launch(*args.inside)
    total: Counter[str] = Counter()
    for seed in range(args.first_seed, args.first_seed + args.jobs):
        with tempfile.TemporaryDirectory(prefix="ulfm-rig-") as folder:
            counts = one_job(seed, Path(folder))
        total += counts
        print(f"seed {seed:3d}  {dict(+counts)}", flush=True)
    print("total", dict(total))
    return 0


if __name__ == "__main__":
    sys.exit(main())
