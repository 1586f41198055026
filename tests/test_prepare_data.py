"""Text to Megatron's indexed dataset, read back with megatron-core."""

from __future__ import annotations

import gzip
import json

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
