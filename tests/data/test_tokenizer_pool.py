"""Several processes give the same tokens in the same order as one, or say what went wrong."""

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

from megatron_longseq.data.pool import UNDER_WAY_PER_WORKER, tokenize_in_order
from megatron_longseq.errors import UserError


def slow_for_long_texts(text: bytes) -> np.ndarray:
    time.sleep(len(text) / 1000)
    return np.frombuffer(text, dtype=np.uint8)


def tokens(
    texts: list[bytes], workers: int, encode: Callable[[bytes], np.ndarray] = slow_for_long_texts
) -> list[tuple[int, bytes]]:
    results = tokenize_in_order(enumerate(texts), encode, workers, lambda tag: f"document {tag}")
    return [(tag, ids.tobytes()) for tag, ids in results]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_order_is_that_of_the_texts_for_any_number_of_workers(workers: int) -> None:
    texts = [b"x" * length for length in (60, 1, 0, 30, 2, 2, 50, 1, 1, 1, 1, 1, 1, 1, 20)]
    assert tokens(texts, workers) == list(enumerate(texts))
    assert tokens([], workers) == []


def test_texts_larger_than_a_pipe_pass_both_ways() -> None:
    texts = [bytes([n]) * (3 << 20) for n in range(4)]
    assert tokens(texts, 2, lambda text: np.frombuffer(text, dtype=np.uint8)) == [*enumerate(texts)]


def test_few_texts_are_under_way_at_once() -> None:
    read = 0

    def texts():  # type: ignore[no-untyped-def]
        nonlocal read
        for number in range(100):
            read += 1
            yield number, b"x" * (200 if number == 0 else 0)

    results = tokenize_in_order(texts(), slow_for_long_texts, 2, str)
    assert next(results)[0] == 0
    assert read <= 2 * UNDER_WAY_PER_WORKER + 1
    results.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_the_tokenizer_refuses_is_named(workers: int) -> None:
    def encode(text: bytes) -> np.ndarray:
        if text == b"bad":
            raise KeyError("no such word")
        return np.zeros(1, dtype=np.uint8)

    with pytest.raises(UserError, match=r"document 3: .*KeyError: 'no such word'"):
        tokens([b"a", b"b", b"c", b"bad", b"d"], workers, encode)


def test_a_process_that_dies_is_told_and_the_others_end() -> None:
    mine = os.getpid()
    seen = []

    def encode(text: bytes) -> np.ndarray:
        assert os.getpid() != mine
        if text == b"die":
            os._exit(9)
        return np.array([os.getpid()])

    with pytest.raises(UserError, match=r"died .exit code 9.*fewer --workers"):
        for _, ids in tokenize_in_order([(0, b"a"), (1, b"die")], encode, 2, str):
            seen.append(int(ids[0]))
    for process in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
