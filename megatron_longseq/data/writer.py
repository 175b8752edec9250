"""Writes a corpus in Megatron's format, whole or not at all.

The files are written by Megatron's own ``IndexedDatasetBuilder``, under temporary names beside
their final ones, and take their names only when all of them are safely on the disk. A mistake in
the input, a full disk, Ctrl-C or SIGTERM leave nothing behind.

Note [One document, one sequence, in chunks]

A GPT dataset treats each *sequence* of the index as a document, so a document has to be one
sequence however long it is. The builder takes a sequence as one array, and would hold three copies
of it. So a document whose tokenizer lets it stream goes to the builder's file chunk by chunk, and
only its end-of-document token goes through ``add_document``, together with the true length.
"""

import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from megatron_longseq.data.documents import NotTextError
from megatron_longseq.data.sidecar import Sidecar, write_sidecar
from megatron_longseq.data.tokenizer import quiet_import
from megatron_longseq.errors import UserError

ENDINGS = (".bin", ".idx", ".json")
LONGEST_SEQUENCE = 2**31 - 1
"""Tokens; the index holds lengths as int32."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CorpusWriter:
    """``PREFIX.bin``, ``.idx`` and ``.json`` under temporary names until :meth:`commit`.

    Use :meth:`open`, :meth:`add` for each document, :meth:`commit`; and :meth:`discard` whenever
    one of them, or what happens between them, raises anything at all.
    """

    def __init__(self, prefix: str, vocab_size: int, eod: int) -> None:
        self.lengths: list[int] = []
        """Tokens of each document, its end included."""
        self.tokens = 0
        self.largest = eod
        self.longest = 0
        self.longest_name = ""
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._eod = eod
        folder, name = os.path.split(prefix)
        unfinished = os.path.join(folder, f".{name}.{os.getpid()}.unfinished")
        # In the order in which they take their names: an index without data would be worse than
        # data without an index.
        self._files = {ending: Path(unfinished + ending) for ending in ENDINGS}
        self._placed: list[Path] = []
        self._builder: Any = None
        self._dtype = np.dtype(np.uint16)

    def open(self) -> None:
        """Starts ``PREFIX.bin``; imports Megatron (seconds)."""
        with quiet_import():
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
        dtype = DType.optimal_dtype(self._vocab_size)
        self._dtype = np.dtype(dtype)
        self._builder = IndexedDatasetBuilder(str(self._files[".bin"]), dtype=dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return self._dtype.itemsize

    def add(self, name: str, chunks: Iterable[np.ndarray]) -> bool:
        """Adds one document from its token ids; returns whether it had any.

        An exception out of ``chunks`` takes the part that was written back.
        """
        data = self._builder.data_file
        start = data.tell()
        length = 0
        try:
            for ids in chunks:
                self._check_ids(name, ids)
                data.write(np.ascontiguousarray(ids, dtype=self._dtype))
                length += ids.size
                if length >= LONGEST_SEQUENCE:
                    raise UserError(
                        f"{name}: one document of more than {LONGEST_SEQUENCE - 1:,} tokens, the "
                        "most that Megatron's index can hold; cut it in several"
                    )
        except NotTextError:
            data.seek(start)
            data.truncate()
            raise
        if length == 0:
            return False
        end = np.array([self._eod], dtype=self._dtype)
        self._builder.add_document(end, [length + 1])
        self.lengths.append(length + 1)
        self.tokens += length + 1
        if length + 1 > self.longest:
            self.longest, self.longest_name = length + 1, name
        return True

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        if ids.dtype == np.uint8 or ids.size == 0:
            return
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self._vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise UserError(
                f"{name}: the tokenizer gave id {wrong:,}, outside its vocabulary of "
                f"{self._vocab_size:,}"
            )
        self.largest = max(self.largest, largest)

    def commit(self, sidecar: Sidecar) -> int:
        """Writes the index and ``sidecar``, and gives the files their names.

        Returns:
            The size of the index in bytes.
        """
        self._builder.finalize(str(self._files[".idx"]))
        write_sidecar(self._files[".json"], sidecar)
        for path in self._files.values():
            _sync(path)
        idx_bytes = self._files[".idx"].stat().st_size
        with signals_deferred():
            for stale in stale_caches(self._prefix):
                stale.unlink()
            # Between two renames, an old index must not describe new data.
            for ending in (".json", ".idx"):
                Path(self._prefix + ending).unlink(missing_ok=True)
            for ending, path in self._files.items():
                final = Path(self._prefix + ending)
                os.replace(path, final)
                self._placed.append(final)
            self._placed.clear()
            with suppress(OSError):  # some network disks can't do it for a folder
                _sync(Path(self._prefix).parent)
        return idx_bytes

    def discard(self) -> None:
        """Removes what is not committed; does nothing after :meth:`commit`."""
        with signals_deferred(), ExitStack() as stack:
            for path in (*self._files.values(), *self._placed):
                stack.callback(path.unlink, missing_ok=True)
            if self._builder is not None:
                # Closing flushes what is buffered, which fails again on a full disk.
                stack.callback(_close, self._builder.data_file)


def _close(stream: Any) -> None:
    with suppress(OSError):  # the file is closed all the same, and is to be removed
        stream.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stale_caches(prefix: str) -> list[Path]:
    """Returns the sample indices that Megatron keeps for a corpus at ``prefix``.

    Megatron finds them by the path and the flags, not by the content: with a new corpus under an
    old name, they would make it read past the end of documents or skip text.
    """
    name = re.compile(r"[0-9a-f]{32}-\w+-(train|valid|test)-\w+\.(npy|txt)")
    found = Path(prefix).glob("cache/*_indices/*")
    return sorted(path for path in found if name.fullmatch(path.name) and path.is_file())


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Holds Ctrl-C, SIGTERM and SIGHUP back until the block is done; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    previous = {number: signal.signal(number, note) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)
