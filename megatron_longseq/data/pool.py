"""Tokenises texts in several processes; results come in the order of the texts.

Workers are forked, so that each inherits the built tokenizer instead of importing Megatron again.
A text goes to whichever worker is free; results wait until it is their turn, so the output is the
same for any number of workers. At most a few texts per worker are under way, which bounds memory.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait

import numpy as np

from megatron_longseq.errors import UserError

UNDER_WAY_PER_WORKER = 4


def tokenize_in_order[Tag](
    texts: Iterable[tuple[Tag, bytes]],
    encode: Callable[[bytes], np.ndarray],
    workers: int,
    name: Callable[[Tag], str],
) -> Iterator[tuple[Tag, np.ndarray]]:
    """Yields each tag with ``encode`` of its text, [tokens], in the order of ``texts``.

    Args:
        texts: Pairs of a tag and a text.
        encode: The tokenizer; runs in ``workers`` forked processes, or here when ``workers`` is 1.
        workers: Number of processes, at least 1.
        name: Gives the name of a tag's document, for messages.

    Raises:
        UserError: ``encode`` raised, or a worker died.
    """
    if workers == 1:
        for tag, text in texts:
            try:
                here = encode(text)
            except Exception as error:  # tokenizer libraries raise whatever they like
                raise _failed(name(tag), f"{type(error).__name__}: {error}") from error
            yield tag, here
        return
    crew = _Crew(encode, workers)
    try:
        waiting: dict[int, tuple[Tag, np.ndarray | None]] = {}
        sent = yielded = 0
        texts = iter(texts)
        more = True
        while more or yielded < sent:
            while more and crew.idle and sent - yielded < UNDER_WAY_PER_WORKER * workers:
                try:
                    tag, text = next(texts)
                except StopIteration:
                    more = False
                    break
                waiting[sent] = (tag, None)
                crew.send(sent, text)
                sent += 1
            if crew.busy:
                for number, ids, failure in crew.receive():
                    tag = waiting[number][0]
                    if ids is None:
                        raise _failed(name(tag), failure)
                    waiting[number] = (tag, ids)
            while yielded in waiting and (ready := waiting[yielded][1]) is not None:
                yield waiting.pop(yielded)[0], ready
                yielded += 1
    finally:
        crew.stop()


def _failed(name: str, failure: str) -> UserError:
    return UserError(f"{name}: the tokenizer can't read it: {failure}")


class _Crew:
    """Forked workers, each with one text at a time."""

    def __init__(self, encode: Callable[[bytes], np.ndarray], workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.idle: list[Connection] = []
        self.busy: dict[Connection, int] = {}
        self._processes = {}
        try:
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, ours, encode), daemon=True)
                process.start()
                theirs.close()
                self.idle.append(ours)
                self._processes[ours] = process
        except OSError as error:
            self.stop()
            raise UserError(
                f"--workers {workers}: cannot start process {len(self._processes) + 1}: "
                f"{error.strerror}; try fewer"
            ) from error

    def send(self, number: int, text: bytes) -> None:
        connection = self.idle.pop()
        self.busy[connection] = number
        try:
            connection.send_bytes(text)
        except OSError as error:
            raise self._died(connection) from error

    def receive(self) -> Iterator[tuple[int, np.ndarray | None, str]]:
        """Waits for one result at least; yields text number, ids or None, and what failed."""
        for connection in wait(list(self.busy)):
            assert isinstance(connection, Connection)
            try:
                ids, failure = connection.recv()
            except (EOFError, OSError) as error:
                raise self._died(connection) from error
            number = self.busy.pop(connection)
            self.idle.append(connection)
            yield number, ids, failure

    def _died(self, connection: Connection) -> UserError:
        process = self._processes[connection]
        process.join(timeout=5)
        return UserError(
            f"a tokenizer process died (exit code {process.exitcode}), maybe for lack of memory; "
            "try fewer --workers"
        )

    def stop(self) -> None:
        for process in self._processes.values():
            # Not SIGTERM: a process that has only just been forked may lose it.
            process.kill()
        for connection, process in self._processes.items():
            process.join()
            connection.close()


def _work(
    connection: Connection, parents_end: Connection, encode: Callable[[bytes], np.ndarray]
) -> None:
    parents_end.close()  # or the end of a killed parent would never be seen here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library don't survive a fork
    while True:
        try:
            text = connection.recv_bytes()
        except EOFError:
            return
        reply: tuple[np.ndarray | None, str]
        try:
            reply = (encode(text), "")
        except Exception as error:
            reply = (None, f"{type(error).__name__}: {error}")
        connection.send(reply)
