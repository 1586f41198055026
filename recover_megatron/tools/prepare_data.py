"""`recover-megatron prepare-data`: text to Megatron's indexed dataset (.bin and .idx).

Every file, and every line of a .jsonl or .jsonl.gz file (field "text", C4's own format), is one
document and ends with the end-of-document token.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from recover_megatron.errors import ConfigError

BYTE_VOCAB = 256
STDLIB = "stdlib"
Encode = Callable[[str], "np.ndarray"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        help="text files, folders, .jsonl or .jsonl.gz files; the word 'stdlib' stands for the "
        "source text of this Python's standard library",
    )
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer", help="a Hugging Face tokenizer.json (default: bytes)")
    parser.add_argument("--suffix", default=".py,.txt,.md", help="of the files taken from folders")
    parser.add_argument("--field", default="text", help="of the objects in .jsonl files")


def run(args: argparse.Namespace) -> int:
    suffixes = tuple(args.suffix.split(","))
    documents = _documents(args.inputs, suffixes, args.field)
    encode, eod, vocab_size, dtype = tokenizer_of(args.tokenizer)
    count, tokens = write_dataset(documents, encode, eod, dtype, Path(args.output_prefix))
    print(advice(args.output_prefix, count, tokens, vocab_size))
    return 0


def advice(prefix: str | Path, documents: int, tokens: int, vocab_size: int) -> str:
    """What was made, and Megatron's flags to train on it."""
    return (
        f"{prefix}.bin/.idx: {documents} documents, {tokens} tokens; train with "
        f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size {vocab_size}"
        f" ({vocab_size + 1} from core_v0.18 on, which counts the end of a document)"
    )


def merge_datasets(prefixes: Sequence[Path], prefix: Path) -> None:
    """Copies indexed datasets of the same dtype one after the other into one, which is there only
    when it is whole."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    dtype = IndexedDataset(str(prefixes[0])).index.dtype
    with _whole_or_not_at_all(prefix) as partial:
        builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=dtype)
        for one in prefixes:
            builder.add_index(str(one))
        builder.finalize(f"{partial}.idx")


@contextlib.contextmanager
def _whole_or_not_at_all(prefix: Path) -> Iterator[Path]:
    """A prefix to write to; what is there at the end without an error becomes `prefix`."""
    partial = prefix.with_name(prefix.name + ".partial")
    try:
        yield partial
        for suffix in (".bin", ".idx"):
            Path(f"{partial}{suffix}").replace(f"{prefix}{suffix}")
    finally:
        for suffix in (".bin", ".idx"):
            Path(f"{partial}{suffix}").unlink(missing_ok=True)


def write_dataset(
    documents: Iterator[str], encode: Encode, eod: int, dtype: type, prefix: Path
) -> tuple[int, int]:
    """Returns the numbers of documents and tokens. The files appear whole or not at all.

    Raises ConfigError if there is not one document with text in it.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    count = tokens = 0
    with _whole_or_not_at_all(prefix) as partial:
        builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=dtype)
        for text in documents:
            if not text:
                continue
            ids = np.append(encode(text), eod)
            builder.add_document(ids, [len(ids)])  # it takes arrays as well as tensors
            count, tokens = count + 1, tokens + len(ids)
        if not count:
            raise ConfigError("the corpus is empty: no document with text in it was found")
        builder.finalize(f"{partial}.idx")
    return count, tokens


def tokenizer_of(path: str | None) -> tuple[Encode, int, int, type]:
    """Encoder, end-of-document id, --vocab-size for Megatron's NullTokenizer (whose own
    end-of-document id is that number; from core_v0.18 on one less), and the ids' dtype on disk."""
    if path is None:
        return _encode_bytes, BYTE_VOCAB, BYTE_VOCAB, np.uint16
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises bare Exception for a missing or broken file
        raise ConfigError(f"--tokenizer {path}: not a readable tokenizer.json ({error})") from None
    size = tokenizer.get_vocab_size()
    dtype = np.uint16 if size < 65535 else np.int32

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    return encode, size, size, dtype


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def _documents(inputs: Sequence[str], suffixes: tuple[str, ...], field: str) -> Iterator[str]:
    for name in inputs:
        path = Path(sysconfig.get_path("stdlib")) if name == STDLIB else Path(name)
        if not path.exists():
            raise ConfigError(f"{name}: there is no such file or folder")
        files = [path] if path.is_file() else _files(path, suffixes)
        for file in files:
            if file.name.endswith((".jsonl", ".json.gz", ".jsonl.gz")):
                yield from lines_of(file, field)
            else:
                yield file.read_text(errors="replace")


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Sorted, so that the dataset is the same on every machine; installed packages are left out."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.suffix in suffixes and "site-packages" not in file.parts
    )


def lines_of(file: Path, field: str) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield json.loads(line)[field]
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: broken after line {number} ({error})") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}, line {number}: expected a JSON object with the field {field!r} "
            f"({type(error).__name__}: {error})"
        ) from None
