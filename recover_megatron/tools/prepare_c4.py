"""`recover-megatron prepare-c4`: C4's public files (c4-train.*.json.gz) to one indexed dataset, in
parallel. Run again after an interruption it goes on where it was; a broken file is named, and the
others are done all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from recover_megatron.errors import ConfigError
from recover_megatron.tools import prepare_data
from recover_megatron.trace import write_atomically


@dataclass(frozen=True)
class Shard:
    """What was made of one source file. It is made anew if the file or the tokenizer changes."""

    source: str
    size: int  # bytes
    modified_ns: int
    tokenizer: str
    sha256: str
    documents: int
    tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="c4-train.*.json.gz")
    parser.add_argument("--output-prefix", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("--tokenizer", metavar="JSON", help="tokenizer.json; default: bytes")
    parser.add_argument("--field", default="text", help="of each line (default: text)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--checksums", type=Path, help="of the files, as sha256sum prints them")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    files = sorted(set(args.files))
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: there is no such file")
    names = [shard_name(file) for file in files]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two files have the same name: {', '.join(sorted(twice))}")
    if args.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {args.workers}")
    expected = _checksums(args.checksums) if args.checksums else {}
    tokenizer = args.tokenizer or ""
    prepare_data.tokenizer_of(args.tokenizer)  # a wrong one is said before anything starts
    folder = args.output_prefix.with_name(args.output_prefix.name + ".shards")
    folder.mkdir(parents=True, exist_ok=True)
    broken: list[str] = []
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    facts = (folder, tokenizer, args.field, expected)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("C4", total=sum(file.stat().st_size for file in files))
        for file, error in _each(files, min(args.workers, len(files)), *facts):
            progress.advance(task, file.stat().st_size)
            if error:
                broken.append(error)
                console.print(f"recover-megatron prepare-c4: {error}", markup=False, soft_wrap=True)
    if broken:
        raise ConfigError(
            f"{len(broken)} of {len(files)} files are broken (named above); fetch them again and "
            "run the same command, which keeps what is done"
        )
    documents, tokens = merge([folder / shard_name(file) for file in files], args.output_prefix)
    _, _, vocab_size, _ = prepare_data.tokenizer_of(args.tokenizer)
    advice = prepare_data.advice(args.output_prefix, documents, tokens, vocab_size)
    print(f"{len(files)} files; {advice}")
    return 0


def _each(
    files: list[Path],
    workers: int,
    folder: Path,
    tokenizer: str,
    field: str,
    expected: dict[str, str],
) -> Iterator[tuple[Path, str | None]]:
    """Each file as it is done, with what is wrong with it."""
    if workers == 1:
        for file in files:
            yield file, _try(file, folder, tokenizer, field, expected.get(file.name))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {
            pool.submit(_try, file, folder, tokenizer, field, expected.get(file.name)): file
            for file in files
        }
        for job in as_completed(jobs):
            yield jobs[job], job.result()


def _try(file: Path, folder: Path, tokenizer: str, field: str, expected: str | None) -> str | None:
    try:
        make_shard(file, folder, tokenizer, field, expected)
    except ConfigError as error:
        return str(error)
    return None


def shard_name(file: Path) -> str:
    return file.name.removesuffix(".gz").removesuffix(".json")


def make_shard(file: Path, folder: Path, tokenizer: str, field: str, expected: str | None) -> Shard:
    """Tokenize one file into `folder`, or find it done. Raises ConfigError for a broken file, or
    one whose checksum is not `expected`."""
    prefix = folder / shard_name(file)
    note, facts = prefix.with_name(prefix.name + ".json"), file.stat()
    identity = (str(file), facts.st_size, facts.st_mtime_ns, _hash(tokenizer) if tokenizer else "")
    done = _read(note)
    if done is not None and identity == (done.source, done.size, done.modified_ns, done.tokenizer):
        return done
    found = _hash(file)
    if expected is not None and found != expected:
        raise ConfigError(f"{file}: its SHA-256 is {found}, expected {expected}")
    encode, eod, _, dtype = prepare_data.tokenizer_of(tokenizer or None)
    texts = prepare_data.lines_of(file, field)
    documents, tokens = prepare_data.write_dataset(texts, encode, eod, dtype, prefix)
    shard = Shard(*identity, found, documents, tokens)
    write_atomically(note, json.dumps(asdict(shard)) + "\n")
    return shard


def merge(prefixes: Iterable[Path], output: Path) -> tuple[int, int]:
    """One dataset of all shards, in their order; (documents, tokens)."""
    prefixes = list(prefixes)
    prepare_data.merge_datasets(prefixes, output)
    shards = [s for p in prefixes if (s := _read(p.with_name(p.name + ".json"))) is not None]
    return sum(s.documents for s in shards), sum(s.tokens for s in shards)


def _read(note: Path) -> Shard | None:
    try:
        return Shard(**json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _hash(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksums(path: Path) -> dict[str, str]:
    """By file name."""
    try:
        pairs = [line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip()]
        return {Path(name.lstrip("*")).name: digest for digest, name in pairs}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--checksums {path}: expected lines 'SHA256  NAME' ({error})") from None
