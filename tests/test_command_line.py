"""Bad input gets one clear sentence and a code that is not 0, before anything starts."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recover_megatron import cli
from recover_megatron.adapters.megatron.command_line import read_job
from recover_megatron.adapters.megatron.support import check_version, refuse_unsupported
from recover_megatron.config import RecoveryConfig, flag_name
from recover_megatron.errors import ConfigError
from recover_megatron.events import Committed, Died, Started
from recover_megatron.hosts import addresses
from recover_megatron.launch import mpirun, verdict
from recover_megatron.launch.host_job import Host, parse_hosts, placement, without_spares
from recover_megatron.launch.start import orphaned, restart
from recover_megatron.session.arguments import add_recovery_arguments, recovery_config
from recover_megatron.session.exits import EXIT_NOBODY, EXIT_TOO_FEW
from recover_megatron.testing.rehearsal import SCRIPT
from recover_megatron.trace import Trace

FLAGS = "--recover --micro-batch-size 1 --global-batch-size 12".split()


def error_of(argv, capsys) -> str:
    assert cli.main(argv) == 2
    return capsys.readouterr().err.strip()


def launching(*flags, replicas=2):
    job = [SCRIPT, *FLAGS, *flags]
    return ["launch", "--replicas", str(replicas), "--dry-run", "--", *job]


def test_dry_run_prints_the_mpirun_line(capsys):
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"]
    assert cli.main(launching(*flags, replicas=3)) == 0
    line, comment = capsys.readouterr().out.strip().splitlines()
    words = shlex.split(line)
    assert words[words.index("-n") + 1] == "12"
    for setting in (
        "--with-ft ulfm",
        "--mca pml ob1",
        "--mca coll ^han",
        "--mca mpi_ft_detector 1",
    ):
        assert setting in " ".join(words)
    assert "thread" not in line  # mpi_ft_detector_thread crashes Open MPI 5.0.11
    assert "3 replicas x 4 ranks; B = 12 microbatches of 1 samples" in comment


def test_ranks_per_replica_follow_from_all_parallel_sizes():
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"
    sizes += " --context-parallel-size 2 --recover-intra-replica-dp 2"
    job = read_job([*FLAGS, *sizes.split()])
    assert (job.ranks_per_replica, job.microbatches) == (24, 6)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--recover-hang-timeout", "700"], "longer than the 600 s after which a replica's own"),
        (["--recover-policy", "lucky"], "invalid choice: 'lucky'"),
        (["--recover-min-replicas", "0"], "--recover-min-replicas must be at least 1, got 0"),
        (["--recover-min-replicas", "9", "--save", "x"], "more than the 2 replicas"),
        (["--recover-min-replicas", "2"], "needs --save"),
        (["--recover-hang-timeout", "soon"], "invalid float value: 'soon'"),
        (["--recover-hang-timeout", "-1"], "--recover-hang-timeout must be at least 0"),
        (["--recover-bucket-mb", "0"], "--recover-bucket-mb must be more than 0"),
        (["--recover-inject", "5.0@1:sync"], "replica 5 is not in 0..1"),
        (["--micro-batch-size", "5"], "12 is not a multiple of 5"),
        (["--global-batch-size", "1"], "fewer than 2 replicas"),
        (["--use-distributed-optimizer"], "must not be spread across replicas"),
        (["--num-distributed-optimizer-instances", "2"], "must not be spread across replicas"),
        (["--rampup-batch-size", "1", "1", "9"], "--rampup-batch-size 1 / 1 samples) are fewer"),
        (["--rampup-batch-size", "few", "1", "9"], "must begin with the number of samples"),
        (["--data-path", "/nowhere/text"], "there is no file /nowhere/text.bin"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags, sentence, capsys):
    error = error_of(launching(*flags), capsys)
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_an_empty_corpus_is_named(tmp_path, capsys):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").touch()
    error = error_of(launching("--data-path", str(tmp_path / "text")), capsys)
    assert "text.bin is empty" in error


def test_weights_in_a_data_path_are_not_files(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").write_text("x")
    assert read_job([*FLAGS, "--data-path", "0.3", str(tmp_path / "text")]).microbatches == 12


def test_a_missing_script_missing_recover_and_a_missing_batch_are_named(capsys):
    assert "nowhere.py" in error_of(["launch", "--", "nowhere.py", "--recover"], capsys)
    assert "--recover is not among" in error_of(["launch", "--", SCRIPT], capsys)
    only = ["launch", "--replicas", "2", "--", SCRIPT, "--recover", "--micro-batch-size", "1"]
    assert "needs --global-batch-size" in error_of(only, capsys)


def test_a_missing_mpirun_is_named(monkeypatch, capsys):
    monkeypatch.setattr(mpirun.shutil, "which", lambda name: None)
    monkeypatch.setattr(mpirun.sys, "executable", "/nowhere/python")
    assert "mpirun is missing; install it with `pip install" in error_of(launching(), capsys)


def test_ranks_that_are_no_whole_replicas_are_refused():
    with pytest.raises(ConfigError, match="7 ranks are not a whole number of replicas of 2"):
        read_job([*FLAGS, "--tensor-model-parallel-size", "2"]).layout(7)


def test_without_mpirun_recover_says_how_to_start(env):
    command = [sys.executable, "-m", "recover_megatron", SCRIPT, *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "was not started by Open MPI's mpirun" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.mpi
def test_mpirun_without_ulfm_says_what_to_add(env):
    words = [mpirun.find_mpirun(), "--oversubscribe", "-n", "2"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    command = [*words, sys.executable, "-m", "recover_megatron", SCRIPT, *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("fault tolerance (ULFM) is not switched on") == 1


def test_every_flag_of_the_config_is_parsed_into_it():
    parser = add_recovery_arguments(argparse.ArgumentParser())
    words = "--recover --recover-min-replicas 2 --recover-hang-timeout 7 --recover-trace-dir t"
    config = recovery_config(parser.parse_args(words.split()))
    assert config == RecoveryConfig(min_replicas=2, hang_timeout_s=7.0, trace_dir="t")
    assert recovery_config(parser.parse_args(["--recover"])) == RecoveryConfig()
    assert flag_name("hang_timeout_s") == "--recover-hang-timeout"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dataloader_type", "cyclic"), ("qk_clip", True), ("non_persistent_ckpt_type", "local")],
)
def test_what_would_diverge_is_refused_with_its_reason(setting, value):
    with pytest.raises(ConfigError, match=setting.replace("_", "-")):
        refuse_unsupported(argparse.Namespace(**{setting: value}))
    refuse_unsupported(argparse.Namespace())


def test_without_recover_the_script_runs_as_it_is(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint(sys.argv[1:], 'torch' in sys.modules, __name__)\nsys.exit(5)"
    )
    command = [sys.executable, "-m", "recover_megatron", str(script), "--flag"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "['--flag'] False __main__\n")


def test_install_starts_the_script_over_under_the_package(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import recover_megatron; recover_megatron.install()\n"
        "import sys; print('started', sys.argv[1:], 'torch' in sys.modules)"
    )
    asked = [sys.executable, str(script), "--recover-platform", "cpu"]
    done = subprocess.run([*asked, "--x"], capture_output=True, text=True)
    assert "started" in done.stdout or "megatron.training" in done.stderr
    plain = subprocess.run([sys.executable, str(script), "--x"], capture_output=True, text=True)
    assert plain.stdout == "started ['--x'] False\n"


@pytest.mark.parametrize(
    ("training", "signals", "code"),
    [(False, ["SIGTERM"], 9), (True, ["SIGINT"], 8), (True, ["SIGTERM", "SIGTERM"], 9)],
)
def test_the_launcher_asks_once_then_hands_signals_on(tmp_path, training, signals, code):
    if training:
        Trace(str(tmp_path), 0, 0).emit(Committed(iteration=1))
    expected = code
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(9))\n"
        f"signal.signal(signal.SIGUSR1, lambda *a: {len(signals)} > 1 or sys.exit(8))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    parent = (
        "import os, pathlib, sys\n"
        "from recover_megatron.launch.mpirun import run_mpirun, wait_until_over\n"
        f"command, folder = [sys.executable, '-c', {code!r}], pathlib.Path({str(tmp_path)!r})\n"
        "wait = lambda mpirun: wait_until_over(mpirun, lambda: False, 1)\n"
        "sys.exit(run_mpirun(command, os.environ, wait, folder))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for name in signals:
            process.send_signal(getattr(signal, name))
            time.sleep(0.5)  # two signals at once may arrive as one
        assert process.wait(timeout=30) == expected


def test_an_mpirun_that_outlives_its_ranks_is_killed(monkeypatch, capsys):
    monkeypatch.setattr(mpirun, "_GRACE_S", 0.2)
    hung = subprocess.Popen(["sh", "-c", "sleep 1.5 & wait; exec sleep 600"])
    assert mpirun.wait_for_mpirun(hung) == 0
    assert hung.returncode == -signal.SIGKILL
    assert "all ranks have ended, but mpirun has not" in capsys.readouterr().err
    ended = subprocess.Popen(["sh", "-c", "sleep 1.5 & wait; exit 7"])
    assert mpirun.wait_for_mpirun(ended) == 7


def test_a_job_in_which_nobody_reached_the_end_is_a_failure(tmp_path: Path, capsys):
    Trace(str(tmp_path), 1, 0).emit(Died(reason="ValueError: of me"))
    assert verdict.exit_code(0, tmp_path / "exit_code") == 1
    error = capsys.readouterr().err
    assert "no replica reached its end" in error
    assert "the first to die was replica 1, position 0: ValueError: of me" in error
    (tmp_path / "exit_code").write_text("3\n")
    assert verdict.exit_code(0, tmp_path / "exit_code") == 3


def restarted(tmp_path: Path, command: str) -> int:
    return restart(command, EXIT_NOBODY, tmp_path)


def test_a_job_that_has_lost_all_replicas_is_started_again(tmp_path: Path, capfd):
    Trace(str(tmp_path), 0, 0).emit(Committed(iteration=1))
    code = "import os, sys; print(os.environ['RECOVER_RUN_DIR']); sys.exit(7)"
    assert restarted(tmp_path, f'{sys.executable} -c "{code}"') == 7
    out, error = capfd.readouterr()
    assert out == f"{tmp_path}\n"
    assert "recover: restarting: " in error
    assert restarted(tmp_path, "/no/such/program") == EXIT_NOBODY


def test_a_job_that_has_committed_nothing_is_not_started_again(tmp_path: Path, capfd):
    Trace(str(tmp_path), 0, 0).emit(Started())
    assert restarted(tmp_path, sys.executable) == EXIT_NOBODY
    assert "not restarted, since no iteration was committed" in capfd.readouterr().err


@pytest.mark.parametrize("version", ["0.16.1", "0.19.0", "0.15.3rc1"])
def test_a_tried_version_of_megatron_is_accepted(version):
    check_version(version, allow_untested=False)


@pytest.mark.parametrize("version", ["0.14.0", "0.20.0rc0", "1.16.1"])
def test_an_untried_version_of_megatron_is_refused(version):
    with pytest.raises(ConfigError, match=f"Megatron {version} was not tried .*try_megatron.sh"):
        check_version(version, allow_untested=False)
    check_version(version, allow_untested=True)


def test_nan_in_several_replicas_at_once_is_said_to_be_no_hardware_fault(tmp_path: Path, capsys):
    for replica in (0, 1):
        reason = "RuntimeError: Rank 0: found NaN in local grad norm"
        Trace(str(tmp_path), replica, 0).emit(Died(reason=reason))
    assert verdict.exit_code(0, tmp_path / "exit_code") == 1
    assert "2 replicas found NaN at once, so the data or the model" in capsys.readouterr().err


def test_hosts_are_read_and_replicas_placed_whole():
    hosts = parse_hosts("a,b,c", 5, 4)
    assert hosts == (Host("a", 8), Host("b", 8), Host("c", 8))
    assert placement(hosts, 5, 4) == "a: replicas 0, 1\nb: replicas 2, 3\nc: replicas 4"
    assert parse_hosts("a:4,b:2", 3, 2) == (Host("a", 4), Host("b", 2))


def test_spares_stand_in_for_hosts_that_do_not_answer(capsys):
    hosts = parse_hosts("127.0.0.2,127.0.0.3,127.0.0.4,127.0.0.5", 4, 2, spares=1)
    assert [host.slots for host in hosts] == [4, 4, 4, 4]
    shell = "sh -c 'test {host} != 127.0.0.3 || { echo no route >&2; false; }'"
    chosen = without_spares(hosts, 1, shell)
    assert [host.name for host in chosen] == ["127.0.0.2", "127.0.0.4", "127.0.0.5"]
    assert "recover: host 127.0.0.3 does not answer: no route" in capsys.readouterr().err
    assert without_spares(hosts, 0, shell) == hosts
    assert len(without_spares(hosts, 1, "true {host}")) == 3
    with pytest.raises(ConfigError, match="there are only 1 spares"):
        without_spares(hosts, 1, "false {host}")


def test_what_another_host_does_in_the_launchers_place(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert orphaned("") == {}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert orphaned("scontrol requeue $SLURM_JOB_ID") == {
        "": ["scancel", "7"],
        str(EXIT_TOO_FEW): ["scontrol", "requeue", "7"],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:x", "expected NAME or NAME:SLOTS, got 'a:x'"),
        ("a,b,a", "a twice"),
        (",", "no host"),
        ("a:2,b:1", "offers 3 slots, but the job has 4 ranks"),
    ],
)
def test_a_wrong_list_of_hosts_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_hosts(text, 2, 2)


def test_a_host_with_an_address_of_ipv6_only_is_refused_with_a_sentence(monkeypatch):
    def no_ipv4(host):
        raise OSError(-5, "No address associated with hostname")

    monkeypatch.setattr(addresses.socket, "gethostbyname", no_ipv4)
    with pytest.raises(ConfigError, match="::1 has an address of IPv6 only; a job over several"):
        addresses.address_of("::1")
    with pytest.raises(ConfigError, match="cannot find the address of 'no-such-host.invalid'"):
        addresses.address_of("no-such-host.invalid")
