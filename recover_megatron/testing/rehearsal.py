"""The small CPU job that the demo, the stress test, the paper's experiments and the tests share.

A LLaMA-style GPT of a few hundred thousand parameters on the text of Python's standard library.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import psutil

from recover_megatron.collectives.membership import watchdog
from recover_megatron.data import prepare_data
from recover_megatron.record.audit import AuditedRun
from recover_megatron.record.compare import Log, read_log

SCRIPT = str(Path(__file__).resolve().parent.parent / "examples" / "gpt" / "pretrain.py")
MEGATRON_LM_PATH = "MEGATRON_LM_PATH"
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+).*?lm loss: (\S+)")


@dataclass(frozen=True)
class Rehearsal:
    """The job's shape and size; `flags` and the two command lines follow from it."""

    data_prefix: str
    iterations: int
    global_batch_size: int
    tp: int = 1
    pp: int = 1
    dp: int = 1  # inside a replica
    hidden_size: int = 64
    seq_length: int = 64
    layers: int = 2
    micro_batch_size: int = 1
    script: str = SCRIPT
    extra: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()  # names of flags below to leave out
    platform: str = "cpu"

    @property
    def ranks_per_replica(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        return self.global_batch_size // self.micro_batch_size // self.dp

    @property
    def tokens_per_iteration(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def flags(self) -> list[str]:
        """Megatron's own names, understood by pretrain_gpt.py and pretrain.py alike."""
        values = {
            "num-layers": self.layers,
            "hidden-size": self.hidden_size,
            "ffn-hidden-size": 3 * self.hidden_size,
            "num-attention-heads": 4,
            "seq-length": self.seq_length,
            "max-position-embeddings": self.seq_length,
            "normalization": "RMSNorm",
            "position-embedding-type": "rope",
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "transformer-impl": "local",
            "tensor-model-parallel-size": self.tp,
            "pipeline-model-parallel-size": self.pp,
            "distributed-backend": "gloo",
            "micro-batch-size": self.micro_batch_size,
            "global-batch-size": self.global_batch_size,
            "train-iters": self.iterations,
            "lr": 1e-3,
            "min-lr": 1e-4,
            "lr-decay-style": "cosine",
            "lr-warmup-iters": 2,
            "clip-grad": 1.0,
            "weight-decay": 0.1,
            "log-interval": 1,
            "eval-interval": 1000,
            "eval-iters": 0,
            "num-workers": 0,
            "split": "98,1,1",
            "seed": 1234,
            "tokenizer-type": "NullTokenizer",
            # One more than before core_v0.18, and padded to the same size.
            "vocab-size": prepare_data.BYTE_VOCAB + 1,
            "make-vocab-size-divisible-by": 64,
            "data-path": self.data_prefix,
        }
        switches = (
            "swiglu untie-embeddings-and-output-weights disable-bias-linear "
            "no-gradient-accumulation-fusion no-masked-softmax-fusion no-persist-layer-norm "
            "no-rope-fusion no-bias-swiglu-fusion no-bias-dropout-fusion"
        ).split()
        kept = {name: value for name, value in values.items() if name not in self.drop}
        words = [word for name, v in kept.items() for word in (f"--{name}", str(v))]
        words += [f"--{name}" for name in switches if name not in self.drop]
        return [*words, "--recover-platform", self.platform, *self.extra]

    def plain(self, data_parallel: int = 1) -> list[str]:
        """Plain Megatron data parallelism over gloo, without recovery."""
        ranks = self.ranks_per_replica * data_parallel
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher = [*torchrun, "--nproc-per-node", str(ranks), "-m", "recover_megatron"]
        return [*launcher, self.script, *self.flags]

    def recover(self, replicas: int, run_dir: str | Path, *flags: str) -> list[str]:
        command = [sys.executable, "-m", "recover_megatron.cli", "launch"]
        recovery = ["--recover", "--recover-trace-dir", str(run_dir), *flags]
        if self.dp > 1:
            recovery += ["--recover-intra-replica-dp", str(self.dp)]
        if self.script != SCRIPT:
            recovery.append("--recover-allow-untested-megatron")
        return [*command, "--replicas", str(replicas), "--", self.script, *self.flags, *recovery]


def environment() -> dict[str, str]:
    """For many ranks on few cores, and quiet about GPU packages that are not there."""
    quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {**os.environ, **quiet}


def run_job(
    command: Sequence[str],
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    limit_s: float = 900.0,
) -> int:
    """Run to the end, its output into `log` and line by line to `on_line`; the exit code.

    A job that is not over after `limit_s` seconds hangs: it is killed, and the code is negative.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as copy,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment(),
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        limit = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            for line in process.stdout:
                copy.write(line)
                copy.flush()
                on_line(line)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # or its end would be waited for
            raise
        finally:
            limit.cancel()
    return process.returncode


def descendants(pid: int) -> list[int]:
    """The processes that `pid` and its descendants have started, without the ranks' watchdogs."""
    found = psutil.Process(pid).children(recursive=True)
    return sorted(process.pid for process in found if _name(process) != watchdog.NAME)


def _name(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


class Jobs:
    """Runs named jobs one after the other in a folder, with a progress line for each."""

    def __init__(self, out: Path):
        from rich.console import Console

        self.out = out
        self.console = Console()
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self.console.print(f"[{self.seconds:4.0f} s] {text}", markup=False, highlight=False)

    def run(
        self, name: str, command: Sequence[str], on_first: Callable[[], None] = lambda: None
    ) -> Path:
        """The job's log, OUT/NAME.log; `on_first` is called as the first iteration is logged. A job
        that fails ends the process with its last words."""
        log, started = self.out / f"{name}.log", False
        with self.console.status(f"{name}: starting") as status:

            def progress(line: str) -> None:
                nonlocal started
                if match := _ITERATION.search(line):
                    if not started:
                        started = True
                        on_first()
                    at, last, loss = int(match[1]), int(match[2]), float(match[3])
                    text = f"{name}: iteration {at}/{last}, loss {loss:.4f}"
                    status.update(text)
                    if not self.console.is_terminal and at % max(5, last // 20) == 0:
                        print(f"[{self.seconds:4.0f} s] {text}", flush=True)

            code = run_job(command, log, progress, limit_s=3600)
        if code:
            tail = "\n".join(log.read_text().splitlines()[-15:])
            sys.exit(f"{name} ended with exit code {code}; the end of {log}:\n{tail}")
        self.say(f"{name}: done")
        return log

    def plain(
        self,
        name: str,
        job: Rehearsal,
        data_parallel: int = 1,
        on_first: Callable[[], None] = lambda: None,
    ) -> Log:
        """Plain Megatron's console log."""
        return read_log(self.run(name, job.plain(data_parallel), on_first))

    def recover(
        self,
        name: str,
        job: Rehearsal,
        replicas: int,
        *flags: str,
        on_first: Callable[[], None] = lambda: None,
    ) -> AuditedRun:
        """The traces in OUT/NAME, made anew: what stood there was of an earlier rehearsal."""
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        self.run(name, job.recover(replicas, folder, *flags), on_first)
        return AuditedRun(folder)


def corpus(folder: Path) -> str:
    """The prefix of the standard library's text as an indexed dataset; made if it is not there."""
    prefix = folder / "stdlib"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stdlib.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two programs may start at once
        if not prefix.with_suffix(".idx").is_file():
            command = [sys.executable, "-m", "recover_megatron.cli", "prepare-data"]
            arguments = [prepare_data.STDLIB, "--output-prefix", str(prefix)]
            with redirect_stdout(sys.stderr):
                subprocess.run([*command, *arguments], check=True, env=environment())
    return str(prefix)
