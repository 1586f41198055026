"""Text files as documents: what a file holds is found out from the file, and said or refused.

All text is UTF-8, whatever the locale says. A document is the whole of a text file, one line of a
file of JSON lines, or one object of a JSON array.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from recover_megatron.errors import ConfigError

STOP, SKIP = "stop", "skip"
_HEAD = 1 << 16
# By the first bytes of a file: what we read ...
_COMPRESSED: tuple[tuple[bytes, Callable[..., Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\x00", lzma.open),
    (b"\x28\xb5\x2f\xfd", lambda path, mode: _Zstd(path)),
)
# ... and what we do not.
_REFUSED = (
    (b"PK\x03\x04", "a ZIP archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x04\x22\x4d\x18", "compressed by lz4"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"%PDF", "a PDF file"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
_ENDINGS = (".gz", ".bz2", ".xz", ".zst")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


class NotText(ConfigError):
    """A file holds something that is not read."""


class TextSource:
    """Reads documents and counts what it reads, leaves out and mends.

    With `on_error` "stop" the first bad record is a ConfigError with file and line; with "skip" it
    is counted and named in `skipped`, and so is the rest of a file that is broken.
    """

    NAMED = 5  # of what is skipped

    def __init__(self, field: str, on_error: str = STOP):
        self._field = field
        self._on_error = on_error
        self.counts: Counter[str] = Counter()
        self.skipped: list[str] = []

    def documents(self, path: Path, in_folder: bool = False) -> Iterator[str]:
        """The documents of one file. What is no text is refused, or, if it was only found
        `in_folder`, left out and counted."""
        try:
            head = head_of(path)
        except NotText as error:
            if not in_folder:
                raise
            self.counts["files left out, being no text"] += 1
            self._name(str(error))
            return
        if is_json(path):
            self.counts["files of JSON"] += 1
            yield from self._of_json(path, head)
            return
        self.counts["text files"] += 1
        if _object(head.split(b"\n", 1)[0]) is not None:
            self._name(f"{path}: read as one text, though its first line is JSON; call it .jsonl")
        with open_any(path) as file:
            try:
                data = file.read()
            except _BROKEN as error:
                raise ConfigError(f"{path}: broken ({error})") from None
        yield self._mended(data.removeprefix(b"\xef\xbb\xbf").decode(errors="replace"), "\ufffd")

    def _of_json(self, path: Path, head: bytes) -> Iterator[str]:
        first = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        whole_line = b"\n" in first or len(head) < _HEAD
        if first.startswith(b"[") or (
            first.startswith(b"{")
            and whole_line
            and _object(first.split(b"\n", 1)[0]) is None
            and not _named_lines(path)
        ):
            yield from self._of_one_value(path)
        else:
            yield from self._of_lines(path)

    def _of_lines(self, path: Path) -> Iterator[str]:
        number = 0
        try:
            with open_any(path) as file:
                for line in file:
                    number += 1
                    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                    if line.strip():
                        yield from self._of_record(line, f"{path}, line {number}")
        except _BROKEN as error:
            self._bad(f"{path}: broken after line {number} ({error})")

    def _of_one_value(self, path: Path) -> Iterator[str]:
        try:
            with open_any(path) as file:
                value = json.load(io.TextIOWrapper(file, "utf-8-sig"))
        except (*_BROKEN, ValueError):
            yield from self._of_lines(path)  # it names the line that is bad
            return
        for number, record in enumerate(value if isinstance(value, list) else [value], 1):
            yield from self._of_record(record, f"{path}, record {number}")

    def _of_record(self, record: Any, where: str) -> Iterator[str]:
        try:
            value = json.loads(record) if isinstance(record, bytes) else record
            text = value[self._field]
            if not isinstance(text, str):
                raise TypeError(f"the field holds {type(text).__name__}")
        except (ValueError, KeyError, TypeError) as error:
            self._bad(
                f"{where}: expected a JSON object with the text field {self._field!r} "
                f"({type(error).__name__}: {error})"
            )
            return
        mended = _SURROGATE.sub("\ufffd", text)  # half of a character, as "\ud83d" is
        self.counts["documents with characters replaced"] += mended != text
        yield mended

    def _mended(self, text: str, mark: str) -> str:
        self.counts["documents with characters replaced"] += mark in text
        return text

    def _bad(self, said: str) -> None:
        if self._on_error == STOP:
            raise ConfigError(f"{said}; mend it, or go on without it by --on-error skip")
        self.counts["records skipped"] += 1
        self._name(said)

    def _name(self, said: str) -> None:
        if len(self.skipped) < self.NAMED:
            self.skipped.append(said)


def open_any(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed if need be."""
    with path.open("rb") as file:
        head = file.read(8)
    for magic, opener in _COMPRESSED:
        if head.startswith(magic):
            return io.BufferedReader(opener(path, "rb"))
    return path.open("rb")


def head_of(path: Path) -> bytes:
    """The first bytes of the text. Raises NotText, saying what the file is."""
    with open_any(path) as file:
        try:
            head = file.read(_HEAD)
        except _BROKEN as error:
            raise NotText(f"{path}: broken after line 0 ({error})") from None
    for magic, name in _REFUSED:
        if head.startswith(magic):
            raise NotText(f"{path}: is {name}; expected text in UTF-8, or JSON lines")
    if head[257:262] == b"ustar":
        raise NotText(f"{path}: is a tar archive; expected text in UTF-8, or JSON lines")
    if b"\x00" in head:
        raise NotText(f"{path}: is binary, or not in UTF-8; expected text or JSON lines")
    return head


def is_json(path: Path) -> bool:
    return _plain_name(path).endswith((".jsonl", ".ndjson", ".json"))


def _named_lines(path: Path) -> bool:
    return _plain_name(path).endswith((".jsonl", ".ndjson"))


def _plain_name(path: Path) -> str:
    name = path.name.lower()
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class _Zstd(io.RawIOBase):
    """All frames of a file. The library's own reader ends without a word where one is cut short, or
    where the second one begins."""

    def __init__(self, path: Path):
        self._blocks = self._decompressed(path)
        self._rest = b""

    def _decompressed(self, path: Path) -> Iterator[bytes]:
        frame = None
        with path.open("rb") as file:
            while data := file.read(_HEAD):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(data)
                    data = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("it ends in the middle of a frame")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                self._rest = next(self._blocks)
            except StopIteration:
                return 0
        taken = self._rest[: len(buffer)]
        self._rest = self._rest[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)
