"""The cases of `../shared/cases` that need no job, by their names there, and more of their kind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recover_megatron import cli
from recover_megatron.adapters.megatron.command_line import read_job, split_arguments
from recover_megatron.adapters.megatron.index_cache import sweep
from recover_megatron.adapters.megatron.support import own_faults, refuse_unsupported
from recover_megatron.collectives.guard import SUBJECTS, GuardedCommunicator
from recover_megatron.collectives.membership.quorum import (
    Evidence,
    Place,
    own_place,
    parse_place,
    running,
)
from recover_megatron.config import RecoveryConfig
from recover_megatron.errors import ConfigError, InvariantViolation
from recover_megatron.events import Committed, Died, Finished, Skipped, Started
from recover_megatron.examples.gpt.arguments import add_megatron_arguments, validate_args
from recover_megatron.hosts import addresses
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.hosts.witness import Witness
from recover_megatron.launch import mpirun, slurm, verdict
from recover_megatron.launch.host_job import FORWARDED, HostJob, parse_hosts, placement
from recover_megatron.record.run_folder import fresh_run_folder, newest_run
from recover_megatron.session import leaving
from recover_megatron.session.peers import fingerprint
from recover_megatron.testing.rehearsal import SCRIPT
from recover_megatron.testing.scripted import ScriptedJob
from recover_megatron.trace import Trace, read_traces, trace_path
from recover_megatron.tracker import checkpoint_folder
from recover_megatron.world import ReplicaLayout, World

FLAGS = "--recover --micro-batch-size 1 --global-batch-size 8".split()
SHAPE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 9 --lr 1 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 8 --data-path x"
).split()


# --- agreements that say what they are about --------------------------------------------------


def communicators(job: ScriptedJob, body):
    """`body(communicator)` in every rank of a scripted job that has begun."""
    config = RecoveryConfig(settle_s=1e-9, settle_limit_s=1e-9)

    def rank_main(membership, fabric):
        communicator = GuardedCommunicator(membership, fabric, job.layout, config, job.proven_dead)
        communicator.begin(World.initial(job.layout))
        return body(communicator, membership.rank)

    return job.run(rank_main)


@pytest.mark.parametrize("other", [s for s in SUBJECTS if s != "iteration"])
def test_two_ranks_in_different_agreements_find_out_at_once(other):
    job = ScriptedJob(ReplicaLayout(2, 1), {}, seed=1)
    said = {}

    def body(communicator, rank):
        about = ("iteration", other)[rank]
        with pytest.raises(InvariantViolation, match="agreement about") as caught:
            communicator.agree(True, about)
        said[rank] = str(caught.value)

    communicators(job, body)
    assert said[0] == f"rank 0 is in an agreement about 'iteration', another about {other!r}"
    assert said[1] == f"rank 1 is in an agreement about {other!r}, another about 'iteration'"


def test_e3_a_rank_that_leaves_while_others_train_dies_and_they_hear_a_no():
    job = ScriptedJob(ReplicaLayout(3, 1), {}, seed=1)

    def body(communicator, rank):
        if rank == 1:
            communicator.leave("left by sys.exit(0)")
        return communicator.agree(True, "end" if rank == 1 else "iteration")

    assert communicators(job, body) == {0: False, 2: False}
    assert job.failed() == {1}


def test_ranks_that_all_leave_end_in_order():
    job = ScriptedJob(ReplicaLayout(3, 1), {}, seed=1)

    def body(communicator, rank):
        communicator.leave("left by sys.exit(0)")
        return communicator.agree(True, "end")

    assert communicators(job, body) == {0: True, 1: True, 2: True}


# --- side outputs -------------------------------------------------------------------------------


def test_8a_a_rank_dies_by_sigkill_even_if_it_cannot_say_why():
    code = "from recover_megatron.session.leaving import die; die(None, OSError('x'))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stderr=full, stdout=full)
    assert done.returncode == -signal.SIGKILL


def test_a_trace_that_cannot_be_written_is_written_later(tmp_path):
    warned: list[str] = []
    (tmp_path / "run").write_text("a file where the folder should be")
    trace = Trace(str(tmp_path / "run"), 1, 0, lambda subject, text: warned.append(text))
    for number in range(5):
        trace.emit(Committed(iteration=number))
    assert warned
    assert "training goes on" in warned[0]
    (tmp_path / "run").unlink()
    trace.emit(Committed(iteration=5))
    assert [e.iteration for e in read_traces(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]


def test_a_trace_keeps_so_many_events_and_no_more(tmp_path):
    (tmp_path / "run").write_text("")
    trace = Trace(str(tmp_path / "run"), 1, 0)
    for number in range(Trace.KEPT + 10):
        trace.emit(Committed(iteration=number))
    (tmp_path / "run").unlink()
    trace.emit(Skipped(iteration=0))
    assert len(list(read_traces(tmp_path / "run"))) == Trace.KEPT


def test_lines_of_a_trace_that_are_no_events_are_skipped(tmp_path):
    path = trace_path(tmp_path, 0, 0)
    path.write_bytes(b'{"event": "started"}\n3\n"text"\n\xff\xfe\n{"event": "com')
    assert [e.KIND for e in read_traces(tmp_path)] == ["started"]


SLOW_READER = """
import sys, time, os, subprocess
from pathlib import Path
from recover_megatron.launch import mpirun
mpirun.Pump._BLOCKS = 4
mpirun.Pump._END_S = 0.5
code = mpirun.run_mpirun(
    [sys.executable, "-c", "import sys\\nfor i in range(30000): print('x' * 60, i)"],
    os.environ, lambda process: process.wait(), Path("."))
print("code", code, file=sys.stderr)
os._exit(0)
"""


def test_11_nobody_waits_for_a_console_that_does_not_read():
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_READER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert process.stderr.readline() == b"code 0\n"  # nothing of its output was read
    process.wait(20)


# --- how a job has ended --------------------------------------------------------------------------


def test_e4_the_code_is_known_from_whatever_is_left(tmp_path, capsys):
    marker, folder = tmp_path / "run" / "exit_code", tmp_path / "job"
    folder.mkdir()
    for replica in (0, 1):
        for position in (0, 1):
            trace = Trace(str(tmp_path / "run"), replica, position)
            trace.emit(Started(pid=1))
            if (replica, position) != (0, 0):  # killed before it could
                trace.emit(Finished(code=4))
    assert verdict.exit_code(0, marker, folder) == 4  # of replica 1, whose ranks all say so
    (folder / "done").write_text("5\n")
    assert verdict.exit_code(0, marker, folder) == 5
    marker.write_text("0\n")
    assert verdict.exit_code(137, marker, folder) == 0
    marker.write_text("")  # the disk was full
    assert verdict.exit_code(0, marker, folder) == 5
    assert capsys.readouterr().err == ""


def died(folder: Path, replica: int, begun: int, **facts) -> None:
    trace = Trace(str(folder), replica, 0)
    trace.emit(Started(pid=1))
    for number in range(1, begun):
        trace.emit(Committed(iteration=number))
    trace.emit(Died(**facts))


def error(kind="IndexError", where="data.py:7", iteration=5):
    words = f"{kind}: out of bounds"
    return {"reason": words, "exception": kind, "where": where, "iteration": iteration}


@pytest.mark.parametrize(
    ("deaths", "code"),
    [
        ([error(), error()], 3),
        ([error(), error(where="data.py:9")], 1),
        ([error(), error("ValueError")], 1),
        ([error(), {"reason": "killed by SIGKILL"}], 1),
        ([error()], 1),  # one replica alone may well have bad hardware
    ],
)
def test_w_the_same_error_everywhere_is_no_hardware_fault(tmp_path, capsys, deaths, code):
    for replica, death in enumerate(deaths):
        died(tmp_path, replica, 5, **death)
    assert verdict.exit_code(0, tmp_path / "exit_code") == code
    said = capsys.readouterr().err
    assert ("met the same error in iteration 5: IndexError" in said) == (code == 3)
    assert len(said.strip().splitlines()) == 1


def test_an_error_before_the_first_iteration_is_that_error(tmp_path, capsys):
    died(tmp_path, 0, 0, **error(iteration=0))
    assert verdict.exit_code(0, tmp_path / "exit_code") == 3
    assert "before the first iteration: IndexError: out of bounds (data.py:7)" in (
        capsys.readouterr().err
    )


def test_a_bare_assertion_says_its_line():
    try:
        assert 1 == 2  # noqa: PLR0133
    except AssertionError as caught:
        caught.args = (";",)
        words = leaving._last_words(caught, 3)
    assert words.reason.startswith("AssertionError: assert 1 == 2")
    assert words.where.startswith(__file__)


# --- settings and files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--train-iters 2 --lr-warmup-iters 2", "--lr-warmup-iters 2 must be less than --train-i"),
        ("--train-iters 9 --lr-warmup-iters 4 --lr-decay-iters 3", "less than --lr-decay-iters 3"),
        ("--train-samples 9 --lr-warmup-samples 9", "must be less than --train-samples 9"),
        ("--train-iters 9 --min-lr 2", "--min-lr 2 must not be more than --lr 1"),
        ("--train-iters 9 --eval-interval 0", "--eval-interval must be at least 1, got 0"),
        ("--train-iters 9 --save-interval -1", "--save-interval must be at least 1"),
        (
            "--train-iters 9 --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            "give one of --override-opt",
        ),
        ("", "give one of --train-iters and --train-samples"),
    ],
)
def test_17_what_megatron_only_asserts_is_a_sentence(flags, sentence):
    parser = add_megatron_arguments(argparse.ArgumentParser())
    with pytest.raises(ConfigError) as caught:
        validate_args(parser.parse_args([*SHAPE, *flags.split()]))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", ["", "release", "999", "-3", "4\n5", "\x00"])
def test_18_a_tracker_file_that_names_no_checkpoint_is_one_sentence(tmp_path, text):
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ConfigError, match="latest_checkpointed_iteration.txt.*iter_0000004"):
        checkpoint_folder(tmp_path)
    with pytest.raises(ConfigError, match="latest_checkpointed_iteration.txt"):
        read_job([*FLAGS, "--load", str(tmp_path)])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(" 4\n")
    assert checkpoint_folder(tmp_path) == tmp_path / "iter_0000004"
    read_job([*FLAGS, "--load", str(tmp_path)])


def test_18_a_mistyped_load_does_not_start_from_scratch(tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        read_job([*FLAGS, "--load", str(tmp_path / "mistyped"), "--save", str(tmp_path)])
    same = str(tmp_path / "new")
    read_job([*FLAGS, "--load", same, "--save", same])  # a job that resumes itself, its first start


def test_a_used_save_folder_that_is_not_loaded_is_warned_of(tmp_path):
    save = ["--save", str(tmp_path)]
    assert read_job([*FLAGS, *save]).warning == ""
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert "it will overwrite them" in read_job([*FLAGS, *save]).warning
    assert read_job([*FLAGS, *save, "--load", str(tmp_path)]).warning == ""


def test_b17_a_parameter_without_dimensions_has_a_fingerprint():
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.ones(()))
    model.empty = torch.nn.Parameter(torch.ones(0))
    model.narrow = torch.nn.Parameter(torch.ones((2, 2), dtype=torch.bfloat16).T)
    before = fingerprint(model.parameters())
    model.scale.data += 1
    assert fingerprint(model.parameters()) != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ddp_param_name_patterns_for_fp32_local_accumulation", ["all"]),
        ("fim_data", True),
        ("perform_rl_step", True),
        ("adlr_autoresume", True),
        ("log_straggler", True),
        ("ckpt_convert_format", "torch_dist"),
        ("save_params_interval", 5),
        ("step_batch_size_schedule", "0:8 100:16"),
        ("logits_load_dir", "x"),
    ],
)
def test_b3_settings_that_make_replicas_differ_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.*not supported"):
        refuse_unsupported(argparse.Namespace(**{name: value}))


def test_dropout_is_refused_where_it_cannot_be_drawn_by_microbatch():
    overlap = {"overlap_moe_expert_parallel_comm": True}
    refuse_unsupported(argparse.Namespace(hidden_dropout=0.0, attention_dropout=0.0, **overlap))
    refuse_unsupported(argparse.Namespace(hidden_dropout=0.1))
    with pytest.raises(ConfigError, match="--attention-dropout is not supported.*by microbatch"):
        refuse_unsupported(argparse.Namespace(attention_dropout=0.1, **overlap))


def test_megatrons_own_faults_strike_the_ranks_that_are_meant():
    layout = ReplicaLayout(3, 2)

    def of(replica: int, **given):
        args = argparse.Namespace(**given)
        own_faults(args, layout, replica)
        return args

    named = [of(r, fault_injector_ranks="3,4,5").fault_injector_ranks for r in range(3)]
    assert named == [None, "1", "0,1"]
    numbers = [of(r, fault_injector_num_ranks=1).fault_injector_num_ranks for r in range(3)]
    assert numbers == [None, None, 1]
    with pytest.raises(ConfigError, match="rank 6 is not in 0..5"):
        of(0, fault_injector_ranks="6")
    with pytest.raises(ConfigError, match="expected numbers"):
        of(0, fault_injector_ranks="all")


# --- the launcher -------------------------------------------------------------------------------


def test_15_flags_with_an_equals_sign_are_seen(tmp_path, capsys):
    words = [SCRIPT, *FLAGS, f"--recover-trace-dir={tmp_path}/mine", "--recover-platform=cpu"]
    assert cli.main(["launch", "--replicas", "2", "--dry-run", "--", *words]) == 0
    output = capsys.readouterr().out
    assert f"run folder {tmp_path}/mine" in output
    assert split_arguments(words)[2] == "cpu"
    code = "import recover_megatron, os, sys; os.execv = lambda *a: print('again')\n"
    code += "sys.argv[1:] = ['--recover-platform=cpu']; recover_megatron.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "again\n"
    with pytest.raises(ConfigError, match="expected one argument"):
        split_arguments([SCRIPT, "--recover-platform"])


def test_7_a_folder_that_holds_a_run_is_left_alone(tmp_path, capsys):
    asked = tmp_path / "run"
    assert fresh_run_folder(asked) == asked
    assert newest_run(asked) == asked
    assert fresh_run_folder(Path(f"{asked}/")) == asked  # however it is written
    Trace(str(asked), 0, 0).emit(Started())
    assert fresh_run_folder(asked) == asked / "restart-1"
    (asked / "restart-1" / "log.r0.p0.txt").write_text("its ranks died at once")
    assert fresh_run_folder(asked) == asked / "restart-2"
    assert newest_run(asked) == asked / "restart-1"
    assert f"the last run in {asked} is {asked}/restart-1" in capsys.readouterr().err
    (asked / "restart-12").mkdir()  # restarts of Slurm that came to nothing leave gaps
    Trace(str(asked / "restart-12"), 0, 0).emit(Started())
    assert newest_run(asked) == asked / "restart-12"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        fresh_run_folder(tmp_path / "file" / "run")


def test_16_flags_of_slurm_that_would_have_no_effect_are_refused(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOBID", raising=False)
    job = ["--replicas", "2", "--dry-run", "--", SCRIPT, *FLAGS]

    def refused(*flags: str) -> str:
        assert cli.main(["launch", *flags, *job]) == 2
        return capsys.readouterr().err

    assert "--nodes and --sbatch go with --slurm" in refused("--nodes", "2")
    assert "--hosts names nodes of an allocation" in refused("--slurm", "--hosts", "a,b")
    monkeypatch.setenv("SLURM_JOBID", "7")
    assert "inside Slurm job 7" in refused("--slurm", "--sbatch=--partition=x")


def test_16_mpirun_takes_no_hosts_from_the_environment():
    assert "--prtemca ras ^slurm" in " ".join(mpirun.mpirun_prefix())


@pytest.mark.parametrize(
    ("text", "replicas", "size", "ranks"),
    [
        ("h0,h1,h2,h3", 2, 16, [8, 8, 8, 8]),
        ("h0,h1", 4, 2, [4, 4]),
        ("h0,h1,h2", 5, 4, [8, 8, 8]),
        ("h0:16,h1:16,h2", 2, 16, None),
        ("h0,h1,h2", 2, 16, None),
        ("h0,h1,h2,h3,h4,h5", 2, 16, None),
    ],
)
def test_20_replicas_are_spread_evenly_or_refused(text, replicas, size, ranks):
    if ranks is None:
        with pytest.raises(ConfigError, match="do not spread evenly.*NAME:RANKS"):
            parse_hosts(text, replicas, size)
        return
    hosts = parse_hosts(text, replicas, size)
    assert [host.slots for host in hosts] == ranks
    assert "none" not in placement(hosts, replicas, size)


def test_20_mates_get_an_address_that_leads_somewhere(monkeypatch):
    monkeypatch.setattr(addresses.socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(addresses, "own_addresses", lambda: frozenset({"192.0.2.7"}))
    assert addresses.address_for_mates(["no-such-host.invalid"]) == "192.0.2.7"
    monkeypatch.setattr(addresses, "address_towards", lambda host: "10.0.0.3")
    assert addresses.address_for_mates(["h1"]) == "10.0.0.3"
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("203.0.113.9") is None


def test_r4_blanks_in_options_of_sbatch_stand_in_quotes(tmp_path):
    script = slurm.batch_script(2, ["--comment=two words"], ["launch"], tmp_path / "my dir")
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert f"#SBATCH --output='{tmp_path}/my dir/slurm-%j.log'" in options
    assert "#SBATCH --comment='two words'" in options
    assert "#SBATCH --nodes=2" in options


def test_r5_the_runs_environment_reaches_other_hosts(monkeypatch, tmp_path):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "WANDB_API_KEY", "TRITON_CACHE_DIR", "HTTPS_PROXY"):
        assert name.startswith(FORWARDED)
    monkeypatch.setenv("MY_DATA", "x")
    monkeypatch.setenv("NOT_MINE", "x")
    job = HostJob(parse_hosts("a,b", 2, 1), tmp_path, "ssh {host}", forward=["MY_DATA"])
    job.folder = HostFolder(tmp_path)
    words = job.arguments
    forwarded = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert "MY_DATA" in forwarded
    assert "NOT_MINE" not in forwarded


# --- index caches ---------------------------------------------------------------------------------


def test_9_an_index_is_kept_as_long_as_it_fits(tmp_path):
    import numpy as np

    prefix, cache = str(tmp_path / "data"), tmp_path / "cache"
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).write_bytes(b"as it was")
    cache.mkdir()

    def build(name: str, path: str) -> None:
        description = json.dumps({"dataset_path": path})
        (cache / f"{name}-GPTDataset-train-description.txt").write_text(description)
        np.save(cache / f"{name}-GPTDataset-train-shuffle_index.npy", np.arange(100))

    build("mine", prefix)
    build("others", str(tmp_path / "other"))
    assert sweep([prefix], str(cache)) == []
    assert sweep([prefix], str(cache)) == []
    assert len(list(cache.glob("mine*"))) == 2
    Path(prefix + ".idx").write_bytes(b"something else")
    (said,) = sweep([prefix], str(cache))
    assert "is of an earlier data set" in said
    assert not list(cache.glob("mine*"))
    build("mine", prefix)
    assert sweep([prefix], str(cache)) == []
    os.truncate(cache / "mine-GPTDataset-train-shuffle_index.npy", 200)
    (said,) = sweep([prefix], str(cache))
    assert "was not whole" in said
    assert len(list(cache.glob("others*"))) == 2


# --- hosts ----------------------------------------------------------------------------------------


def test_a_number_that_is_used_again_proves_nothing():
    mine = own_place("here")
    assert parse_place(str(mine)) == mine
    assert running(os.getpid(), mine.started)
    assert not running(os.getpid(), "1")  # another process had this number
    places = [mine, Place("here", mine.pid, "1", mine.namespace), Place("here", 1 << 30)]
    assert Evidence(places, "here")() == {1, 2}
    # In another container the number means another process, or none.
    elsewhere = Place("here", 1 << 30, "1", "pid:[1]")
    assert Evidence([elsewhere], "here")() == frozenset()
    assert Evidence([elsewhere], "here", lambda: frozenset({elsewhere.name}))() == {0}


def test_one_host_acts_in_the_launchers_place(tmp_path, monkeypatch):
    """Three hosts are left; all relays ask."""
    monkeypatch.setattr("recover_megatron.hosts.witness._DUTY_S", 5.0)
    names = ("h0", "h1", "h2", "h3")
    folders = {name: HostFolder(tmp_path / name) for name in names}
    for folder in folders.values():
        folder.path.mkdir()
    witnesses = [Witness(name, "127.0.0.1", folders[name], "secret") for name in names]
    witnesses[0].start(None)
    for witness in witnesses[1:]:
        witness.start(("127.0.0.1", witnesses[0].port))
    limit = time.monotonic() + 30
    while any(len(w.peers) < 3 for w in witnesses):
        assert time.monotonic() < limit
        time.sleep(0.02)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        taken = list(pool.map(lambda w: w.take_duty("h0"), witnesses[1:]))
    assert taken == [True, False, False]
    for witness in witnesses:
        witness.stop()


def test_a_relay_whose_shell_has_gone_lives_on():
    code = "from recover_megatron.console import say; say('x' * 99); print('alive')"
    words = [sys.executable, "-c", code]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stderr=full, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "alive\n"
