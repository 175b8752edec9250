"""The ids of a bytes corpus are those that Megatron's own flags give in training."""

import argparse
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longseq.data.tokenizer import (
    PACKAGE_OF_TYPE,
    TOKENIZER_FLAGS,
    ByteTokenizer,
    build_tokenizer,
    check_tokenizer_options,
    flags_of,
    quiet_import,
)
from megatron_longseq.errors import UserError


@pytest.fixture(scope="module")
def megatron_parser() -> argparse.ArgumentParser:
    with quiet_import():
        from megatron.training.arguments import add_megatron_arguments

        return add_megatron_arguments(argparse.ArgumentParser())


def megatron_arguments(
    megatron_parser: argparse.ArgumentParser, flags: Sequence[str]
) -> argparse.Namespace:
    arguments = megatron_parser.parse_args(flags)
    arguments.rank = 1
    return arguments


def megatron_tokenizer(arguments: argparse.Namespace) -> Any:
    with quiet_import():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build

        return build(arguments)


def test_training_flags_give_megatron_the_ids_of_bytes(
    byte_tokenizer: ByteTokenizer, megatron_parser: argparse.ArgumentParser
) -> None:
    arguments = megatron_arguments(megatron_parser, byte_tokenizer.training_flags)
    built = megatron_tokenizer(arguments)
    assert (built.vocab_size, built.eod) == (byte_tokenizer.vocab_size, byte_tokenizer.eod)
    assert built.eod == 256, "an end of document below 256 would be a byte of the text"
    assert built.tokenize("0 65 255 256") == [0, 65, 255, 256]
    assert arguments.padded_vocab_size == 384


def test_training_never_takes_a_byte_for_padding(
    byte_tokenizer: ByteTokenizer, megatron_parser: argparse.ArgumentParser
) -> None:
    built = megatron_tokenizer(megatron_arguments(megatron_parser, byte_tokenizer.training_flags))
    assert not 0 <= built.pad <= 256


def test_megatrons_byte_level_tokenizer_still_does_not_fit() -> None:
    with quiet_import():
        from megatron.core.tokenizers.text.libraries import ByteLevelTokenizer
        from megatron.core.tokenizers.utils.build_tokenizer import SUPPORTED_TOKENIZERS
    assert ByteLevelTokenizer().eod < 256
    assert not any("byte" in name.lower() for name in SUPPORTED_TOKENIZERS)


@settings(deadline=None)
@given(text=st.text())
def test_text_comes_back_from_its_bytes(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod]) == text


@settings(deadline=None)
@given(first=st.binary(), second=st.binary())
def test_bytes_of_joined_texts_are_joined(first: bytes, second: bytes) -> None:
    encode = ByteTokenizer().encode
    assert np.array_equal(encode(first + second), np.concatenate([encode(first), encode(second)]))


def test_decoding_survives_what_a_model_may_produce() -> None:
    decode = ByteTokenizer().decode
    assert decode([0x68, 0xC3]) == "h\ufffd"
    assert decode([0xFF, 256, 300, -1, 0x69]) == "\ufffdi"
    assert decode(np.array([], dtype=np.int64)) == ""


def test_every_tokenizer_flag_means_to_megatron_what_it_means_here(
    megatron_parser: argparse.ArgumentParser,
) -> None:
    example: dict[str, Any] = {"integer": 7, "list": ["<a>", "<b>"], "true": True, "false": False}
    for flag in TOKENIZER_FLAGS:
        value = example.get(flag.kind, "v1")
        arguments = megatron_arguments(
            megatron_parser, flags_of("NullTokenizer", {flag.field: value})
        )
        assert getattr(arguments, flag.field) == value, flag.flag


def test_every_tokenizer_type_is_one_of_megatrons() -> None:
    with quiet_import():
        from megatron.core.tokenizers.utils.build_tokenizer import SUPPORTED_TOKENIZERS
    assert set(PACKAGE_OF_TYPE) <= set(SUPPORTED_TOKENIZERS)


def test_a_tokenizer_of_megatrons_gives_its_ids_vocabulary_and_flags() -> None:
    tokenizer = build_tokenizer("NullTokenizer", {"vocab_size": 70_000})
    assert tokenizer.encode(b"3 1 4").tolist() == [3, 1, 4]
    assert (tokenizer.vocab_size, tokenizer.eod) == (70_000, 69_999)
    assert tokenizer.training_flags == [
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "70000",
    ]


@pytest.mark.parametrize(
    ("tokenizer_type", "package"),
    [(name, package) for name, package in PACKAGE_OF_TYPE.items() if package],
)
def test_a_missing_package_is_named(
    tokenizer_type: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"{tokenizer_type}.*{package}.*pip install {package}"):
        check_tokenizer_options(tokenizer_type, {})


@pytest.mark.parametrize(
    ("tokenizer_type", "options", "message"),
    [
        ("byte", {}, "did you mean bytes"),
        ("MultimodalTokenizer", {}, "not a tokenizer of plain text"),
        ("bytes", {"vocab_size": 300}, "--vocab-size.*bytes"),
        ("NullTokenizer", {}, "needs --vocab-size"),
        ("NullTokenizer", {"vocab_size": 0}, "--vocab-size 0"),
        ("NullTokenizer", {"vocab_size": 9, "vocab_file": "/no/v"}, "--vocab-file /no/v: no such"),
    ],
)
def test_options_that_do_not_fit_are_refused_without_megatron(
    tokenizer_type: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_tokenizer_options(tokenizer_type, options)


def test_what_megatron_refuses_is_told_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    options = {"tokenizer_model": "/no/such/model"}
    with pytest.raises(UserError, match=r"--tokenizer-model /no/such/model: .*could not build"):
        build_tokenizer("HuggingFaceTokenizer", options)
