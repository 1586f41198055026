"""Runs as YAML files: each key is checked, sizes are right, and the files in configs/ are runs."""

from __future__ import annotations

import gzip
import importlib
import json
import sysconfig
from pathlib import Path

import pytest

from recover_megatron import cli
from recover_megatron.errors import ConfigError
from recover_megatron.launch.model_size import model_size
from recover_megatron.launch.run_config import RunConfig, check_flags, load
from recover_megatron.record.audit import AuditedRun
from recover_megatron.testing.rehearsal import Rehearsal
from tests.conftest import checkout

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_becomes_a_command_line(tmp_path):
    text = "script: s.py\nreplicas: 3\nflags:\n  lr: 1.0e-3\n  bf16: true\n  swiglu: false\n"
    config = load(written(tmp_path, text + "  data-path: [a, b]\n  seed: null\n"))
    assert config.words == ["s.py", "--lr", "0.001", "--bf16", "--data-path", "a", "b"]
    assert config.replicas == 3


def test_a_setting_changes_a_key_or_a_flag(tmp_path):
    path = written(tmp_path, "script: s.py\nreplicas: 3\nflags: {train-iters: 5}\n")
    config = load(path, ["replicas=2", "train_iters=7", "bf16=true", "data-path=[x, y]"])
    assert config.replicas == 2
    assert config.flags == {"train-iters": 7, "bf16": True, "data-path": ["x", "y"]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("flags: {}", "script must name a training script"),
        ("script: s.py", "expected the keys script, replicas"),
        ("[1, 2]", "expected the keys script, replicas"),
        ("script: s.py\nflag: {}\nflags: {}", "unknown key 'flag'; did you mean flags?"),
        ("script: [", "while parsing"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        load(written(tmp_path, text))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"hiden-size": 3}, "Megatron has no --hiden-size; did you mean hidden-size?"),
        ({"recover-polcy": "exact"}, "no --recover-polcy; did you mean recover-policy?"),
        ({"bf16": 1}, "--bf16 takes no value"),
        ({"lr": True}, "--lr takes a value, got True"),
    ],
)
def test_each_flag_is_checked_against_the_scripts_own_parser(flags, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        check_flags(RunConfig("recover_megatron/examples/gpt/pretrain.py", flags))


def test_the_sizes_of_llama_7b():
    """6.738 B is the published number; a padded vocabulary adds a little."""
    flags = load(CONFIGS / "llama_7b_3d_512gpu.yaml").flags
    size = model_size(flags)
    assert size.parameters == pytest.approx(6.738e9, rel=2e-3)
    assert size.parameters_per_rank == pytest.approx(6.738e9 / 8, rel=0.01)
    assert size.state_bytes == 18 * size.parameters_per_rank
    sharded = {**flags, "recover-intra-replica-dp": 4, "use-distributed-optimizer": True}
    assert model_size(sharded).state_bytes == 9 * size.parameters_per_rank


def test_the_size_is_that_of_the_model_that_is_built(run, tmp_path, data_prefix):
    """Against the number of parameters in a checkpoint."""
    import torch.distributed.checkpoint as dcp

    save = tmp_path / "checkpoint"
    job = Rehearsal(data_prefix, 3, 1, extra=("--save", str(save), "--save-interval", "3"))
    code, output = run(job.plain())
    assert code == 0, output
    flags: dict = {}
    for word in job.flags:
        if word.startswith("--"):
            flags[name := word[2:]] = True
        else:
            flags[name] = word
    tensors = dcp.FileSystemReader(str(save / "iter_0000003")).read_metadata().state_dict_metadata
    numbers = [
        t.size.numel() for n, t in tensors.items() if hasattr(t, "size") and "optim" not in n
    ]
    assert sum(numbers) == model_size(flags).parameters


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_files_in_configs_are_complete_and_described(path: Path):
    text = path.read_text()
    head = text[: text.index("script:")]
    for word in ("Source: ", "Hardware: "):
        assert word in head, word
    assert "emory" in head or "MB a rank" in head
    config = load(path)
    assert config.flags["recover"] is True
    assert model_size(config.flags) is not None


@pytest.mark.megatron_lm
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("llama*.yaml")), ids=lambda p: p.stem)
def test_megatrons_own_parser_knows_every_flag(path: Path):
    if checkout() is None:
        pytest.skip("no Megatron-LM checkout")
    config = load(path, [f"script={checkout() / 'pretrain_gpt.py'}"])
    check_flags(config)


def test_from_files_of_c4_to_a_launched_config(run, tmp_path):
    """Modules of the standard library stand for web pages, in C4's own format."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    files = [tmp_path / f"c4-train.{k:05d}-of-00002.json.gz" for k in (0, 1)]
    for k, file in enumerate(files):
        with gzip.open(file, "wt") as lines:
            for module in modules[k::2]:
                lines.write(json.dumps({"text": module.read_text(), "url": "x"}) + "\n")
    words = ["prepare-c4", *files, "--output-prefix", tmp_path / "c4", "--workers", "1"]
    assert cli.main([str(word) for word in words]) == 0
    command = ["python", "-m", "recover_megatron.cli", "launch"]
    settings = {
        "data-path": tmp_path / "c4",
        "split": "1,0,0",  # too few documents for a validation set
        "train-iters": 4,
        "recover-inject": "1.1@3:sync.0",
        "recover-trace-dir": tmp_path / "run",
    }
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    code, output = run([*command, "--config", CONFIGS / "tiny_cpu.yaml"])
    assert code == 0, output
    record = AuditedRun(tmp_path / "run")
    assert record.violations(4, 8) == []
    assert record.survivors == [0]


def test_a_dry_run_tells_the_size(capsys, data_prefix):
    words = ["launch", "--config", str(CONFIGS / "tiny_cpu.yaml"), "--dry-run"]
    assert cli.main([*words, "--set", f"data-path={data_prefix}"]) == 0
    out = capsys.readouterr().out
    assert "B = 8 microbatches" in out
    assert "parameters; per rank" in out
    assert cli.main([*words, "--", "pretrain.py"]) == 2
    assert "not both" in capsys.readouterr().err


def test_the_demos_file_is_the_demos_job(monkeypatch):
    monkeypatch.syspath_prepend(str(CONFIGS.parent / "scripts"))
    demo = importlib.import_module("demo")
    job = demo.full("runs/data/stdlib")
    words = [*job.flags, "--recover", *demo.OPTIONS, "--recover-inject", demo.FAULTS]
    config = load(CONFIGS / "demo.yaml")
    assert [float(w) if _number(w) else w for w in config.words[1:]] == [
        float(w) if _number(w) else w for w in words
    ]


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
