"""Text to Megatron's indexed dataset, read back with megatron-core."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recover_megatron import cli
from recover_megatron.data import prepare_c4


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


# --- what a file holds is found out (D1 to D9, R7, R11 of the cases) ------------------------------

LINES = b'{"text": "one"}\n{"text": "two"}\n'
ONE_TWO = [[*b"one", 256], [*b"two", 256]]


def zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


CONTENTS = {
    "corpus.jsonl": LINES,
    "corpus.json": LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "mark.jsonl": b"\xef\xbb\xbf" + LINES,
    "blank.jsonl": b"\n" + LINES.replace(b"\n", b"\n\n"),
    "no-end.jsonl": LINES[:-1],
    "array.json": b'[{"text": "one"}, {"text": "two"}]',
    "pretty.json": b'[\n {\n  "text": "one"\n },\n {"text": "two"}\n]\n',
    "corpus.jsonl.gz": gzip.compress(LINES, mtime=0),
    "two-members.json.gz": gzip.compress(LINES[:16], mtime=0) + gzip.compress(LINES[16:], mtime=0),
    "corpus.jsonl.bz2": bz2.compress(LINES),
    "corpus.jsonl.xz": lzma.compress(LINES),
    "corpus.jsonl.zst": zst(LINES),
    "two-frames.jsonl.zst": zst(LINES[:16]) + zst(LINES[16:]),
    "misnamed.jsonl": gzip.compress(LINES, mtime=0),
    "UPPER.JSONL": LINES,
}


@pytest.mark.parametrize("name", CONTENTS)
def test_d2_d3_two_records_are_two_documents_however_they_are_written(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(CONTENTS[name])
    assert prepare(tmp_path / name, "--output-prefix", tmp_path / "out") == 0
    assert read(tmp_path / "out") == ONE_TWO
    assert "read: 1 files of JSON" in capsys.readouterr().out


REFUSED = {
    "x.zip": (b"PK\x03\x04rest", "a ZIP archive"),
    "x.parquet": (b"PAR1rest", "a Parquet file"),
    "x.txt": ("one".encode("utf-16"), "UTF-16 text"),
    "x.jsonl": (LINES.decode().encode("utf-32-be"), "binary, or not in UTF-8"),
    "x.tar.gz": (gzip.compress(b"x" * 257 + b"ustar" + b"x" * 99, mtime=0), "a tar archive"),
    "x.jsonl.gz": (b"\x1f\x8b broken", "broken after line 0"),
    "x.json.zst": (zst(LINES)[:-3], "broken after line"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_d3_what_is_no_text_is_refused_by_name(name, tmp_path, capsys):
    content, sentence = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    assert prepare(tmp_path / name, "--output-prefix", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert name in error
    assert sentence in error
    assert not list(tmp_path.glob("out*"))


def test_d1_settings_of_a_tokenizer_file_do_not_cut_a_corpus(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[PAD]": 0, "a": 1, "?": 7}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(tmp_path / "cut.json"))
    (tmp_path / "long.txt").write_text("a " * 1000)
    (tmp_path / "short.txt").write_text("a b")
    files = (tmp_path / "long.txt", tmp_path / "short.txt")
    words = ("--tokenizer", tmp_path / "cut.json", "--output-prefix", tmp_path / "out")
    assert prepare(*files, *words) == 0
    # The end of a document is behind the largest id, which is not the number of ids here.
    assert read(tmp_path / "out") == [[1] * 1000 + [8], [1, 7, 8]]


BAD = (
    b'{"text": "good"}\n{"text": 3}\n{"tekst": "x"}\n["text"]\n{"te\n'
    b'{"text": "half \\ud83d"}\n{"text": "\xff"}\n'
)


def test_d4_a_bad_record_is_named_or_counted(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_bytes(BAD)
    words = (tmp_path / "bad.jsonl", "--output-prefix", tmp_path / "out")
    assert prepare(*words) == 2
    error = capsys.readouterr().err
    assert "bad.jsonl, line 2: expected a JSON object with the text field 'text'" in error
    assert "--on-error skip" in error
    assert not list(tmp_path.glob("out*"))
    assert prepare(*words, "--on-error", "skip") == 0
    replaced = "half \ufffd".encode()
    assert read(tmp_path / "out") == [[*b"good", 256], [*replaced, 256]]
    output = capsys.readouterr().out
    assert "1 documents with characters replaced, 1 files of JSON, 5 records skipped" in output
    for line in (2, 3, 4, 5, 7):
        assert f"bad.jsonl, line {line}: " in output


def test_text_is_kept_byte_by_byte_and_a_folders_other_files_are_counted(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (folder / "b.txt").write_bytes(b"no \xff text")
    (folder / "c.txt").write_bytes(b"\x00\x01")
    (folder / "d.png").write_bytes(b"\x89PNG")
    assert prepare(folder, "--output-prefix", tmp_path / "out") == 0
    assert read(tmp_path / "out") == [
        [*b"one\r\ntwo", 256],
        [*"no \ufffd text".encode(), 256],
    ]
    output = capsys.readouterr().out
    assert "1 documents with characters replaced" in output
    assert "1 files left out, being no text" in output
    assert "1 files left out, not being .py, .txt, .md" in output
    assert prepare(folder, "--suffix", ".rst", "--output-prefix", tmp_path / "out") == 2
    assert "none of its 4 files ends in .rst" in capsys.readouterr().err


def test_r7_the_locale_has_no_say(tmp_path):
    (tmp_path / "e.txt").write_bytes("hé".encode())
    (tmp_path / "e.jsonl").write_bytes('{"text": "hé"}\n'.encode())
    code = (
        "import locale, pathlib, sys\n"
        "from recover_megatron.data.text_source import TextSource\n"
        "locale.getpreferredencoding = lambda *a: 'ISO-8859-1'\n"
        "for name in sys.argv[1:]:\n"
        "    print(ascii(list(TextSource('text').documents(pathlib.Path(name)))))"
    )
    words = [sys.executable, "-X", "utf8=0", "-c", code, tmp_path / "e.txt", tmp_path / "e.jsonl"]
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.stdout.splitlines() == [r"['h\xe9']"] * 2, done.stderr


def test_d5_another_setting_makes_a_shard_anew(tmp_path):
    files = shards(tmp_path, 1)
    assert c4(tmp_path, files) == 0
    assert c4(tmp_path, files, "--field", "url") == 0
    assert read(tmp_path / "c4") == [[*b"http://x", 256]] * 5
    bad = tmp_path / "bad.json"
    bad.write_bytes(b'{"text": "one"}\n{"tex\n')
    assert c4(tmp_path, [bad], "--on-error", "skip") == 0
    assert c4(tmp_path, [bad]) == 2  # what was skipped then is an error now


def test_d9_a_killed_worker_costs_its_file_only(tmp_path, capsys, monkeypatch):
    """As for want of memory."""
    files = shards(tmp_path, 4)
    begin = prepare_c4.Worker.begin

    def killed_at_the_second(self, file, expected):
        begin(self, file, expected)
        if file == files[1]:
            self._process.kill()

    monkeypatch.setattr(prepare_c4.Worker, "begin", killed_at_the_second)
    assert c4(tmp_path, files, workers=2) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{files[1]}: its worker was killed by SIGKILL" in error
    assert "1 of 4 files could not be done" in error
    done = sorted(p.stem for p in (tmp_path / "c4.shards").glob("*.json"))
    assert done == [f"c4-train.{k:05d}-of-01024" for k in (0, 2, 3)]


def test_d6_megatrons_index_of_the_old_data_goes_with_it(tmp_path):
    (tmp_path / "t.txt").write_text("x")
    assert prepare(tmp_path / "t.txt", "--output-prefix", tmp_path / "out") == 0
    cache = tmp_path / "out" / "cache" / "GPTDataset_indices"
    cache.mkdir(parents=True)
    (cache / "x-GPTDataset-train-shuffle_index.npy").write_text("old")
    assert prepare(tmp_path / "t.txt", "--output-prefix", tmp_path / "out") == 0
    assert not cache.exists()


def test_a_full_disk_is_one_sentence(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("x")
    (tmp_path / "file").write_text("")
    assert prepare(tmp_path / "t.txt", "--output-prefix", tmp_path / "file" / "out") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
