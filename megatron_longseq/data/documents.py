"""Inputs of a corpus as documents of UTF-8 text: folders, text files, JSON lines, packages.

An input is surveyed first (which files, in which order, how large) without reading any; documents
are then read one by one. What the user named must be text, and an error says where it is not;
what was only found in a folder is skipped when it is binary, and counted.

A document longer than memory is never whole in memory unless its tokenizer needs it so: its text
comes in chunks.
"""

import codecs
import gzip
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from megatron_longseq.errors import UserError

CHUNK_BYTES = 1 << 20
JSON_LINES = (".jsonl", ".jsonl.gz")


class NotTextError(Exception):
    """A document that was found in a folder, not named, has no text: skip it.

    ``kind`` is the word under which it is counted.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Document:
    """One document of text."""

    name: str
    """Path, path and line, or package; for messages."""
    size: int
    """Bytes of the input it takes up; for a progress bar."""
    read: Callable[[], Iterator[bytes]]
    """Returns the text, UTF-8, in chunks of any length. Raises :class:`NotTextError` (the document
    is to be skipped) or :class:`UserError`, possibly after some chunks."""


class Source(Protocol):
    """A file, or a group of files, that holds documents."""

    @property
    def size(self) -> int:
        """Bytes to read."""
        ...

    def documents(self, key: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yields the documents in order; counts in ``skipped`` what it leaves out."""
        ...


@dataclass(frozen=True)
class Input:
    """One input as the user named it."""

    name: str
    sources: Sequence[Source]


@dataclass(frozen=True)
class TextFile:
    """A file that is one document."""

    path: Path
    size: int
    named: bool
    """Whether the user named the file itself, so that it must be text."""

    def documents(self, key: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yields the one document."""
        yield Document(str(self.path), self.size, self._read)

    def _read(self) -> Iterator[bytes]:
        try:
            yield from read_text(self.path)
        except NotTextError as error:
            if not self.named:
                raise
            remedy = "name a text file, .jsonl or .jsonl.gz"
            if error.kind != "empty":
                remedy += ", or convert it to UTF-8"
            raise UserError(f"{self.path}: {error}; {remedy}") from error


@dataclass(frozen=True)
class JsonLines:
    """A ``.jsonl`` or ``.jsonl.gz`` file: each line an object, with a document under one key."""

    path: Path
    size: int

    def documents(self, key: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yields the documents in the order of the lines; blank lines are nothing."""
        with readable(self.path), self.path.open("rb") as raw:
            packed = self.path.name.endswith(".gz")
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            consumed = 0
            for number, line in enumerate(_lines(self.path, stream), start=1):
                if not line.strip():
                    continue
                name = f"{self.path}:{number}"
                text = json_text(line, key, name, first=number == 1)
                if not text:
                    skipped["empty"] += 1
                    continue
                size = (raw.tell() if packed else consumed + len(line)) - consumed
                consumed += size
                yield Document(name, size, partial(iter, (text,)))


@dataclass(frozen=True)
class Package:
    """Source files that together are one document, in a fixed order."""

    name: str
    paths: Sequence[Path]
    size: int

    def documents(self, key: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yields the one document."""
        yield Document(self.name, self.size, lambda: self._read(skipped))

    def _read(self, skipped: Counter[str]) -> Iterator[bytes]:
        for path in self.paths:
            try:
                text = b"".join(read_text(path))
            except NotTextError as error:
                skipped[error.kind] += 1
                continue
            yield text if text.endswith(b"\n") else text + b"\n"


def read_text(path: Path) -> Iterator[bytes]:
    """Yields the bytes of the UTF-8 file ``path`` in chunks, unchanged.

    Raises:
        NotTextError: The file is empty, has a NUL byte (binary, or UTF-16) or is not UTF-8; maybe
            after some chunks.
        UserError: The file can't be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    with readable(path), path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            nul = chunk.find(b"\0")
            if nul >= 0:
                raise NotTextError("binary", f"binary: a NUL byte at offset {position + nul:,}")
            _decode(decoder, chunk, position, final=False)
            position += len(chunk)
            yield chunk
    if position == 0:
        raise NotTextError("empty", "empty: 0 bytes")
    _decode(decoder, b"", position, final=True)


def _decode(
    decoder: codecs.IncrementalDecoder, chunk: bytes, position: int, *, final: bool
) -> None:
    held = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
    if held == 0 and chunk.isascii():
        return
    try:
        decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        offset = position - held + error.start
        detail = f"not UTF-8: {error.reason} at offset {offset:,}"
        raise NotTextError("not UTF-8", detail) from error


def json_text(line: bytes, key: str, name: str, *, first: bool = False) -> bytes:
    """Returns the document, UTF-8, under ``key`` in one line of JSON.

    Args:
        line: The line, with or without its end.
        key: The key of the document.
        name: The file and line, for messages.
        first: Whether it is the first line, where a byte-order mark may stand.

    Raises:
        UserError: The line is not UTF-8, not JSON, not an object, or has no text under ``key``.
    """
    try:
        decoded = line.rstrip(b"\r\n").decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8: {error.reason} at byte {error.start + 1:,}") from error
    try:
        record = json.loads(decoded)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}: not JSON: {error.msg} at column {error.colno:,}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: JSON that can't be read: {error}") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{name}: {_json_type(record)}, not an object with the key {key!r}; a line looks like "
            f'{{"{key}": "..."}}'
        )
    if key not in record:
        keys = ", ".join(repr(found) for found in list(record)[:8]) or "none"
        raise UserError(f"{name}: no key {key!r}; its keys: {keys}; choose one with --key")
    text = record[key]
    if not isinstance(text, str):
        raise UserError(
            f"{name}: {key!r} is {_json_type(text)}, not a string; choose another with --key"
        )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name}: {key!r} holds half of a surrogate pair, at character {error.start + 1:,}, "
            "which no UTF-8 text can hold; mend or drop the line"
        ) from error


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names[type(value)]


def _lines(path: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    number = 0
    try:
        for number, line in enumerate(stream, start=1):  # noqa: B007
            yield line
    except EOFError as error:
        raise UserError(
            f"{path}: truncated: the compressed data end after line {number:,} without their end "
            "mark; fetch or compress the file again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: damaged, or not gzip, after line {number:,}: {error}; "
            "fetch or compress the file again"
        ) from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` of reading ``path`` into a :class:`UserError` that names it."""
    try:
        yield
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


class Survey:
    """Collects the files of all inputs, each file once, without reading them."""

    def __init__(self, excluded: Sequence[Path] = ()) -> None:
        """``excluded`` are files that are no input wherever they are found: the output's own."""
        self.skipped: Counter[str] = Counter()
        """What was found in folders and left out, by reason."""
        self._excluded = {_identity(path.stat()) for path in excluded if path.exists()}
        self._first_name: dict[tuple[int, int], tuple[int, Path]] = {}

    def inputs(self, paths: Sequence[Path]) -> list[Input]:
        """Returns the inputs in the order given; the files of a folder are ordered by name.

        Raises:
            UserError: An input is missing, unreadable, neither file nor folder, compressed in a
                way that isn't read, or the same file as another input.
        """
        return [
            Input(str(path), list(self._sources(number, path))) for number, path in enumerate(paths)
        ]

    def _sources(self, number: int, path: Path) -> Iterator[Source]:
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file or folder") from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if stat.S_ISDIR(status.st_mode):
            for found, found_status in self._walk(path):
                if self._is_new(number, found, found_status, in_folder=True):
                    yield self._source(found, found_status.st_size, named=False)
        elif stat.S_ISREG(status.st_mode):
            if path.suffix in (".gz", ".bz2", ".xz", ".zst", ".zip") and not is_json_lines(path):
                raise UserError(
                    f"{path}: of the compressed files only .jsonl.gz is read; unpack it first"
                )
            self._is_new(number, path, status, in_folder=False)
            yield self._source(path, status.st_size, named=True)
        else:
            raise UserError(f"{path}: neither a file nor a folder (a pipe or device can't be read)")

    @staticmethod
    def _source(path: Path, size: int, *, named: bool) -> Source:
        return JsonLines(path, size) if is_json_lines(path) else TextFile(path, size, named)

    def _is_new(self, number: int, path: Path, status: os.stat_result, *, in_folder: bool) -> bool:
        first = self._first_name.setdefault(_identity(status), (number, path))
        if first == (number, path):
            return True
        if in_folder and first[0] == number:
            self.skipped["repeated"] += 1
            return False
        raise UserError(
            f"{path} is the same file as {first[1]}: each file can be an input once; "
            "leave one of the two out"
        )

    def _walk(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        """Yields the regular files under ``folder``, ordered by name; follows links, but not twice
        into one folder, so that a loop of links ends."""
        # A link to a folder above would bring in what the user did not name.
        visited = {_identity(above.stat()) for above in folder.resolve().parents}
        pending = [folder]
        while pending:
            path = pending.pop()
            try:
                status = path.stat()
                if not stat.S_ISDIR(status.st_mode):
                    if not stat.S_ISREG(status.st_mode):
                        self.skipped["not a file"] += 1
                    elif _identity(status) not in self._excluded:
                        yield path, status
                    continue
                if _identity(status) in visited:
                    self.skipped["repeated"] += 1
                    continue
                visited.add(_identity(status))
                names = sorted(os.listdir(path), reverse=True)
            except OSError as error:
                if path.is_symlink() and not isinstance(error, PermissionError):
                    self.skipped["broken link"] += 1  # its target is gone, or is itself
                    continue
                raise UserError(f"cannot read {path}: {error.strerror}") from error
            for name in names:
                if name.startswith(".") or name == "__pycache__":
                    self.skipped["hidden"] += 1  # .git, editor files, compiled Python
                else:
                    pending.append(path / name)


def is_json_lines(path: Path) -> bool:
    """Returns whether ``path`` is read as one JSON object per line."""
    return path.name.endswith(JSON_LINES)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
