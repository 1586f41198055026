"""`recover-megatron prepare-data`: text to Megatron's indexed dataset (.bin and .idx).

Every text file, and every record of a file of JSON lines (field "text", C4's own format), is one
document and ends with the end-of-document token.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from recover_megatron.data.text_source import SKIP, STOP, TextSource
from recover_megatron.errors import ConfigError

BYTE_VOCAB = 256
STDLIB = "stdlib"
Encode = Callable[[str], "np.ndarray"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        help="text files, folders, files of JSON lines, plain or compressed (gzip, bzip2, xz, "
        "zstd); the word 'stdlib' stands for the source text of this Python's standard library",
    )
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer", help="a Hugging Face tokenizer.json (default: bytes)")
    parser.add_argument("--suffix", default=".py,.txt,.md", help="of the files taken from folders")
    parser.add_argument("--field", default="text", help="of the objects in JSON files")
    add_on_error(parser)


def add_on_error(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-error",
        choices=(STOP, SKIP),
        default=STOP,
        help="at a record that cannot be read: stop, with its file and line, or skip and count it "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    suffixes = tuple(args.suffix.split(","))
    source = TextSource(args.field, args.on_error)
    documents = _documents(args.inputs, suffixes, source)
    encode, eod, vocab_size, dtype = tokenizer_of(args.tokenizer)
    count, tokens = write_dataset(documents, encode, eod, dtype, Path(args.output_prefix))
    print(told(source))
    print(advice(args.output_prefix, count, tokens, vocab_size))
    return 0


def told(source: TextSource) -> str:
    """What was read, skipped and left out."""
    counts = ", ".join(f"{n} {what}" for what, n in sorted(source.counts.items()) if n)
    return "\n".join([f"read: {counts}", *(f"note: {said}" for said in source.skipped)])


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
        # Megatron's index of what was there before, which it would take for this one's.
        for cache in prefix.glob("cache/*_indices"):
            shutil.rmtree(cache, ignore_errors=True)
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
                continue  # an empty document would be an end of a document alone
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
    # The file's own settings for a model's inputs, which would cut a corpus, and fill it up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = 1 + max(tokenizer.get_vocab().values(), default=0)  # ids need not be without gaps
    dtype = np.uint16 if size < 65535 else np.int32

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    return encode, size, size, dtype


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def _documents(
    inputs: Sequence[str], suffixes: tuple[str, ...], source: TextSource
) -> Iterator[str]:
    for name in inputs:
        path = Path(sysconfig.get_path("stdlib")) if name == STDLIB else Path(name)
        if not path.exists():
            raise ConfigError(f"{name}: there is no such file or folder")
        for file in [path] if path.is_file() else _files(path, suffixes, source):
            yield from source.documents(file, in_folder=path.is_dir())


def _files(folder: Path, suffixes: tuple[str, ...], source: TextSource) -> list[Path]:
    """Sorted, so that the dataset is the same on every machine; installed packages are left out."""
    files = [f for f in folder.rglob("*") if f.is_file() and "site-packages" not in f.parts]
    found = sorted(file for file in files if file.suffix in suffixes)
    source.counts[f"files left out, not being {', '.join(suffixes)}"] += len(files) - len(found)
    if not found:
        raise ConfigError(
            f"{folder}: none of its {len(files)} files ends in {', '.join(suffixes)}; name other "
            "endings with --suffix"
        )
    return found
