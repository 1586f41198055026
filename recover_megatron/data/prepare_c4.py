"""`recover-megatron prepare-c4`: C4's public files (c4-train.*.json.gz) to one indexed dataset, in
parallel. Run again after an interruption it goes on where it was; a broken file is named, and the
others are done all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from recover_megatron.data import prepare_data
from recover_megatron.data.text_source import STOP, TextSource
from recover_megatron.errors import ConfigError
from recover_megatron.trace import write_atomically

_FORMAT = 2  # of what this program makes of the same file and settings


@dataclass(frozen=True)
class Settings:
    """Everything but a file that its shard depends on."""

    folder: Path
    tokenizer: str = ""  # tokenizer.json; empty: bytes
    field: str = "text"
    on_error: str = STOP

    def made_of(self, file: Path) -> dict[str, Any]:
        facts = file.stat()
        return {
            "source": str(file),
            "size": facts.st_size,
            "modified_ns": facts.st_mtime_ns,
            "tokenizer": _hash(self.tokenizer) if self.tokenizer else "",
            "field": self.field,
            "on_error": self.on_error,
            "format": _FORMAT,
        }


@dataclass(frozen=True)
class Shard:
    """What was made of one source file, and of what: where any of that is another, it is made
    anew."""

    source: str
    size: int  # bytes
    modified_ns: int
    tokenizer: str
    field: str
    on_error: str
    format: int  # _FORMAT
    sha256: str
    documents: int
    tokens: int
    counts: dict[str, int]
    skipped: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="c4-train.*.json.gz")
    parser.add_argument("--output-prefix", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("--tokenizer", metavar="JSON", help="tokenizer.json; default: bytes")
    parser.add_argument("--field", default="text", help="of each line (default: text)")
    prepare_data.add_on_error(parser)
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
    settings = Settings(folder, tokenizer, args.field, args.on_error)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("C4", total=sum(file.stat().st_size for file in files))
        for file, error in _each(files, min(args.workers, len(files)), settings, expected):
            progress.advance(task, file.stat().st_size)
            if error:
                broken.append(error)
                console.print(f"recover-megatron prepare-c4: {error}", markup=False, soft_wrap=True)
    if broken:
        raise ConfigError(
            f"{len(broken)} of {len(files)} files could not be done (named above); mend them and "
            "run the same command, which keeps what is done"
        )
    shards = merge([folder / shard_name(file) for file in files], args.output_prefix)
    documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
    source = TextSource(args.field)
    for shard in shards:
        source.counts.update(shard.counts)
        source.skipped += shard.skipped
    print(prepare_data.told(source))
    _, _, vocab_size, _ = prepare_data.tokenizer_of(args.tokenizer)
    advice = prepare_data.advice(args.output_prefix, documents, tokens, vocab_size)
    print(f"{len(files)} files; {advice}")
    return 0


def _each(
    files: list[Path], workers: int, settings: Settings, expected: dict[str, str]
) -> Iterator[tuple[Path, str | None]]:
    """Each file as it is done, with what is wrong with it."""
    if workers == 1:
        for file in files:
            yield file, _try(file, settings, expected.get(file.name))
        return
    waiting, busy = list(reversed(files)), [Worker(settings) for _ in range(workers)]
    while waiting or any(worker.file for worker in busy):
        for k, worker in enumerate(busy):
            if worker.file is None and waiting:
                file = waiting.pop()
                worker.begin(file, expected.get(file.name))
            if (done := worker.ended()) is not None:
                yield done
                if not worker.alive:
                    busy[k] = Worker(settings)
        wait([handle for worker in busy for handle in worker.handles], timeout=1)
    for worker in busy:
        worker.stop()


class Worker:
    """A process that makes one shard after the other. If it is killed, as for want of memory, it is
    known of which file, and the others are done all the same."""

    def __init__(self, settings: Settings):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, settings), daemon=True)
        self._process.start()
        other.close()
        self.file: Path | None = None
        self.alive = True

    @property
    def handles(self) -> list[Any]:
        return [self._pipe, self._process.sentinel] if self.file else []

    def begin(self, file: Path, expected: str | None) -> None:
        self.file = file
        with contextlib.suppress(OSError):  # it has died: `ended` tells
            self._pipe.send((file, expected))

    def ended(self) -> tuple[Path, str | None] | None:
        """The file that is done, with what is wrong with it; None if there is none."""
        if self.file is None:
            return None
        file, said = self.file, ""
        try:
            if not self._pipe.poll():
                if self._process.is_alive():
                    return None
                raise EOFError
            said = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.alive = False
            code = self._process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            said = f"{file}: its worker was {how} (out of memory?)"
        self.file = None
        return file, said or None

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(pipe: Any, settings: Settings) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            file, expected = pipe.recv()
            pipe.send(_try(file, settings, expected) or "")


def _try(file: Path, settings: Settings, expected: str | None) -> str | None:
    try:
        make_shard(file, settings, expected)
    except (ConfigError, OSError) as error:
        return str(error) if str(file) in str(error) else f"{file}: {error}"
    return None


def shard_name(file: Path) -> str:
    name = file.name
    for ending in (".gz", ".bz2", ".xz", ".zst", ".json", ".jsonl"):
        name = name.removesuffix(ending)
    return name


def make_shard(file: Path, settings: Settings, expected: str | None) -> Shard:
    """Tokenize one file, or find it done. Raises ConfigError for a broken file, or one whose
    checksum is not `expected`."""
    prefix = settings.folder / shard_name(file)
    note, made_of = prefix.with_name(prefix.name + ".json"), settings.made_of(file)
    done = _read(note)
    whole = all(Path(f"{prefix}{suffix}").is_file() for suffix in (".bin", ".idx"))
    if whole and done is not None and made_of.items() <= asdict(done).items():
        if expected not in (None, done.sha256):
            raise ConfigError(f"{file}: its SHA-256 is {done.sha256}, expected {expected}")
        return done
    found = _hash(file)
    if expected is not None and found != expected:
        raise ConfigError(f"{file}: its SHA-256 is {found}, expected {expected}")
    encode, eod, _, dtype = prepare_data.tokenizer_of(settings.tokenizer or None)
    source = TextSource(settings.field, settings.on_error)
    note.unlink(missing_ok=True)  # or it would vouch for what is now made
    try:
        texts = source.documents(file)
        documents, tokens = prepare_data.write_dataset(texts, encode, eod, dtype, prefix)
    except ConfigError as error:
        raise ConfigError(f"{error}" if str(file) in str(error) else f"{file}: {error}") from None
    counts, skipped = dict(source.counts), source.skipped
    shard = Shard(
        **made_of, sha256=found, documents=documents, tokens=tokens, counts=counts, skipped=skipped
    )
    write_atomically(note, json.dumps(asdict(shard)) + "\n")
    return shard


def merge(prefixes: Iterable[Path], output: Path) -> list[Shard]:
    """One dataset of all shards, in their order."""
    prefixes = list(prefixes)
    prepare_data.merge_datasets(prefixes, output)
    return [s for p in prefixes if (s := _read(p.with_name(p.name + ".json"))) is not None]


def _read(note: Path) -> Shard | None:
    try:
        return Shard(**json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _hash(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksums(path: Path) -> dict[str, str]:
    """By file name."""
    try:
        pairs = [
            line.split(maxsplit=1)
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        return {Path(name.lstrip("*")).name: digest for digest, name in pairs}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--checksums {path}: expected lines 'SHA256  NAME' ({error})") from None
