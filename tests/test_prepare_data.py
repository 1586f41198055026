"""Text to Megatron's indexed dataset, read back with megatron-core."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from recover_megatron.tools import cli


def read(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [np.array(dataset[i]).tolist() for i in range(len(dataset))]


def prepare(*arguments) -> int:
    return cli.main(["prepare-data", *map(str, arguments)])


def test_files_and_folders_become_documents_of_bytes(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("bé")
    (folder / "a.txt").write_text("a")
    (folder / "picture.png").write_bytes(b"\x89")
    assert prepare(folder, "--output-prefix", tmp_path / "out" / "text") == 0
    assert read(tmp_path / "out" / "text") == [[97, 256], [98, 195, 169, 256]]


def test_c4_lines_become_documents(tmp_path):
    file = tmp_path / "c4-train.00000-of-01024.json.gz"
    with gzip.open(file, "wt") as lines:
        for text in ("one", "two"):
            lines.write(json.dumps({"text": text, "url": "x"}) + "\n")
    assert prepare(file, "--output-prefix", tmp_path / "c4") == 0
    assert read(tmp_path / "c4") == [[*b"one", 256], [*b"two", 256]]


def test_a_tokenizer_file_sets_ids_and_end_of_document(tmp_path, capsys):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("world hello you")
    arguments = ("--tokenizer", tmp_path / "tokenizer.json", "--output-prefix", tmp_path / "t")
    assert prepare(tmp_path / "t.txt", *arguments) == 0
    assert read(tmp_path / "t") == [[1, 0, 2, 3]]
    assert "--vocab-size 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"tekst": "b"}\n', "line 2: expected a JSON object"),
        ("x.jsonl", b'{"text": "a"}\n{"te', "line 2: expected a JSON object"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9999)[:-9], "broken after line"),
        ("x.txt", b"", "the corpus is empty"),
    ],
    # Not made from the content: gzip's holds the time, and all of pytest's processes must agree.
    ids=["no text", "half a line", "half a file", "nothing"],
)
def test_a_broken_or_empty_file_is_one_sentence_and_leaves_nothing(
    name, content, sentence, tmp_path, capsys
):
    (tmp_path / name).write_bytes(content)
    assert prepare(tmp_path / name, "--output-prefix", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert name in error or "empty" in sentence
    assert not list(tmp_path.glob("out*"))


def test_missing_input_and_tokenizer_are_named(tmp_path, capsys):
    assert prepare("/nowhere/x", "--output-prefix", tmp_path / "o") == 2
    assert "/nowhere/x: there is no such file" in capsys.readouterr().err
    (tmp_path / "t.txt").write_text("x")
    arguments = ("--tokenizer", "/nowhere/t.json", "--output-prefix", tmp_path / "o")
    assert prepare(tmp_path / "t.txt", *arguments) == 2
    assert "not a readable tokenizer.json" in capsys.readouterr().err


# --- C4 ------------------------------------------------------------------------------------------


def shards(folder: Path, count: int = 3) -> list[Path]:
    """Files in C4's own format."""
    files = []
    for k in range(count):
        files.append(folder / f"c4-train.{k:05d}-of-01024.json.gz")
        with gzip.open(files[-1], "wt") as lines:
            for i in range(5):
                text = {"text": f"document {k}.{i}", "timestamp": "2019-04-25", "url": "http://x"}
                lines.write(json.dumps(text) + "\n")
    return files


def c4(folder: Path, files: list[Path], *more, workers: int = 1) -> int:
    words = ["prepare-c4", *files, "--output-prefix", folder / "c4", "--workers", workers, *more]
    return cli.main([str(word) for word in words])


def test_c4_becomes_one_dataset_in_the_files_order(tmp_path, capsys):
    files = shards(tmp_path)
    assert c4(tmp_path, list(reversed(files)), workers=2) == 0
    expected = [[*f"document {k}.{i}".encode(), 256] for k in range(3) for i in range(5)]
    assert read(tmp_path / "c4") == expected
    assert "15 documents" in capsys.readouterr().out


def test_an_interrupted_c4_goes_on_where_it_was(tmp_path):
    files = shards(tmp_path)
    assert c4(tmp_path, files[:2]) == 0
    made = tmp_path / "c4.shards"
    before = {p.name: p.stat().st_mtime_ns for p in made.glob("*.bin")}
    (made / "c4-train.00001-of-01024.json").unlink()  # killed before its note was written
    assert c4(tmp_path, files) == 0
    after = {p.name: p.stat().st_mtime_ns for p in made.glob("*.bin")}
    assert after["c4-train.00000-of-01024.bin"] == before["c4-train.00000-of-01024.bin"]
    assert after["c4-train.00001-of-01024.bin"] != before["c4-train.00001-of-01024.bin"]
    assert len(read(tmp_path / "c4")) == 15


def test_a_broken_file_of_c4_is_named_and_the_others_are_kept(tmp_path, capsys):
    files = shards(tmp_path)
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[: len(whole) // 2])
    assert c4(tmp_path, files) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{files[1].name}: broken after line" in error
    assert "1 of 3 files could not be done" in error
    assert not (tmp_path / "c4.idx").exists()
    files[1].write_bytes(whole)
    assert c4(tmp_path, files) == 0
    assert len(read(tmp_path / "c4")) == 15


def test_checksums_of_c4_are_checked(tmp_path, capsys):
    files = shards(tmp_path, 2)
    good = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}" for f in files]
    (tmp_path / "sums").write_text("\n".join(good))
    assert c4(tmp_path, files, "--checksums", tmp_path / "sums") == 0
    (tmp_path / "sums").write_text(good[0] + "\n" + "0" * 64 + f"  {files[1].name}")
    (tmp_path / "c4.shards" / "c4-train.00001-of-01024.json").unlink()
    assert c4(tmp_path, files, "--checksums", tmp_path / "sums") == 2
    assert f"{files[1].name}: its SHA-256 is" in " ".join(capsys.readouterr().err.split())
