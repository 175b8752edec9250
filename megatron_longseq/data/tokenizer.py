"""Token ids of a corpus: bytes, or any text tokenizer that Megatron itself can build.

Note [The bytes tokenizer]

Training must read a ``bytes`` corpus through Megatron's own flags, so that a user's own
``pretrain_gpt.py`` can read it as well. Two of Megatron's tokenizers come into question:

* ``ByteLevelTokenizer`` can't be reached: ``--tokenizer-type`` has no value for it. It would not
  fit either: its end of document is id 0 and its padding id 1, which are bytes of the text.
* ``NullTokenizer`` keeps ids as they are, so ids 0 to 255 are the bytes of UTF-8 text, and its end
  of document is the last id of its vocabulary: 256 in a vocabulary of 257. It has no padding id
  that could hide a byte of the text from the loss.

So ``bytes`` is ``NullTokenizer`` with 257 ids, and a training run says
``--tokenizer-type NullTokenizer --vocab-size 257``. Megatron pads the embedding from 257 to 384
rows by its default (a multiple of 128 times the tensor-parallel size). Releases in which
``--vocab-size`` leaves out the end of document need ``--vocab-size 256`` for the same ids:
:func:`byte_training_flags` asks the Megatron that is installed.

``NullTokenizer`` spells ids as decimal numbers where text is wanted. What turns ids back into text
is :meth:`ByteTokenizer.decode` here, which needs no Megatron.
"""

import argparse
import contextlib
import difflib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from megatron_longseq.errors import UserError

BYTES = "bytes"
BYTES_VOCAB_SIZE = 257
BYTES_END_OF_DOCUMENT = 256


class CorpusTokenizer(Protocol):
    """What writing a corpus asks of a tokenizer."""

    @property
    def tokenizer_type(self) -> str:
        """The value of Megatron's ``--tokenizer-type`` that reads the corpus in training."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of document included, before any padding."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends each document."""
        ...

    @property
    def training_flags(self) -> Sequence[str]:
        """Megatron's flags, and their values, that build this tokenizer in training."""
        ...

    @property
    def files(self) -> Mapping[str, Path]:
        """Files that define the tokenizer, by flag."""
        ...

    @property
    def joins(self) -> bool:
        """Whether ``encode(a + b)`` is ``encode(a)`` then ``encode(b)``: text can stream."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids, [tokens], any integer dtype, of UTF-8 ``text``."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One id per byte of UTF-8 text; see Note [The bytes tokenizer]."""

    training_flags: Sequence[str] = ()
    tokenizer_type: str = "NullTokenizer"
    vocab_size: int = BYTES_VOCAB_SIZE
    eod: int = BYTES_END_OF_DOCUMENT
    files: Mapping[str, Path] = field(default_factory=dict)
    joins: bool = True

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the bytes of ``text``, [tokens], uint8; a view, not a copy."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids``, any integers; ids that are no byte are left out.

        A model may end in the middle of a character or produce bytes that are not UTF-8: such
        bytes become U+FFFD.
        """
        values = np.asarray(ids, dtype=np.int64).reshape(-1)
        kept = values[(values >= 0) & (values < 256)]
        return kept.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class MegatronTokenizer:
    """A text tokenizer that Megatron built."""

    built: Any
    tokenizer_type: str
    vocab_size: int
    eod: int
    training_flags: Sequence[str]
    files: Mapping[str, Path]
    joins: bool = False

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids, [tokens], int64."""
        return np.asarray(self.built.tokenize(text.decode("utf-8")), dtype=np.int64).reshape(-1)


@dataclass(frozen=True)
class TokenizerFlag:
    """One of Megatron's tokenizer flags."""

    flag: str
    field: str
    """Name of the attribute in Megatron's arguments."""
    kind: Literal["text", "file", "integer", "list", "true", "false"]
    help: str


TOKENIZER_FLAGS = (
    TokenizerFlag(
        "--tokenizer-model", "tokenizer_model", "text", "file, folder or hub name of the tokenizer"
    ),
    TokenizerFlag(
        "--vocab-size", "vocab_size", "integer", "number of ids (NullTokenizer, TikTokenizer)"
    ),
    TokenizerFlag("--vocab-file", "vocab_file", "file", "vocabulary (GPT2BPETokenizer, Bert...)"),
    TokenizerFlag("--merge-file", "merge_file", "file", "merges (GPT2BPETokenizer)"),
    TokenizerFlag(
        "--tokenizer-metadata", "metadata_path", "file", "Megatron's JSON about a tokenizer"
    ),
    TokenizerFlag(
        "--tokenizer-special-tokens", "special_tokens", "list", "special tokens to know or add"
    ),
    TokenizerFlag("--tiktoken-pattern", "tiktoken_pattern", "text", "v1 or v2 (TikTokenizer)"),
    TokenizerFlag(
        "--tiktoken-num-special-tokens",
        "tiktoken_num_special_tokens",
        "integer",
        "ids kept for special tokens (TikTokenizer)",
    ),
    TokenizerFlag(
        "--tokenizer-sentencepiece-legacy",
        "tokenizer_sentencepiece_legacy",
        "true",
        "older behaviour, with special tokens (sentencepiece)",
    ),
    TokenizerFlag(
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        "tokenizer_sentencepiece_ignore_extra_whitespaces",
        "false",
        "keep runs of spaces (sentencepiece)",
    ),
    TokenizerFlag(
        "--tokenizer-hf-no-use-fast",
        "tokenizer_hf_no_use_fast",
        "true",
        "the slow tokenizer (HuggingFaceTokenizer)",
    ),
    TokenizerFlag(
        "--tokenizer-hf-no-include-special-tokens",
        "tokenizer_hf_no_include_special_tokens",
        "true",
        "add no special tokens to the text (HuggingFaceTokenizer)",
    ),
    TokenizerFlag(
        "--trust-remote-code",
        "trust_remote_code",
        "true",
        "let the hub's own code run (HuggingFaceTokenizer)",
    ),
    TokenizerFlag(
        "--null-tokenizer-eod-id",
        "null_tokenizer_eod_id",
        "integer",
        "end of document (NullTokenizer; default: the last id)",
    ),
)
"""Megatron's flags that change the ids of a text, under Megatron's own names."""

PACKAGE_OF_TYPE: Mapping[str, str | None] = {
    "HuggingFaceTokenizer": "transformers",
    "GPT2BPETokenizer": "transformers",
    "BertWordPieceLowerCase": "transformers",
    "BertWordPieceCase": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
    "NullTokenizer": None,
}
"""Megatron's tokenizers of plain text, and the Python package each needs."""

_NEEDED_FLAG: Mapping[str, str] = {
    "HuggingFaceTokenizer": "--tokenizer-model",
    "SentencePieceTokenizer": "--tokenizer-model",
    "GPTSentencePieceTokenizer": "--tokenizer-model",
    "Llama2Tokenizer": "--tokenizer-model",
    "TikTokenizer": "--tokenizer-model",
    "NullTokenizer": "--vocab-size",
}


def check_tokenizer_options(tokenizer_type: str, options: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` for what can be told wrong without importing Megatron.

    ``options`` maps fields of :data:`TOKENIZER_FLAGS` to the values the user gave.
    """
    given = {flag.field: flag for flag in TOKENIZER_FLAGS if flag.field in options}
    if tokenizer_type == BYTES:
        if given:
            flags = ", ".join(flag.flag for flag in given.values())
            raise UserError(
                f"{flags}: no meaning with --tokenizer-type bytes, which has {BYTES_VOCAB_SIZE} ids"
                " and no options; leave it out or name another --tokenizer-type"
            )
        return
    if tokenizer_type not in PACKAGE_OF_TYPE:
        names = [BYTES, *PACKAGE_OF_TYPE]
        near = difflib.get_close_matches(tokenizer_type, names, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"--tokenizer-type {tokenizer_type}: not a tokenizer of plain text{hint}; "
            f"one of: {', '.join(names)}"
        )
    package = PACKAGE_OF_TYPE[tokenizer_type]
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--tokenizer-type {tokenizer_type} needs the Python package {package}, which is not "
            f"installed: pip install {package} (or use --tokenizer-type bytes, which needs none)"
        )
    needed = _NEEDED_FLAG.get(tokenizer_type)
    if needed is not None and needed not in {flag.flag for flag in given.values()}:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs {needed}")
    if options.get("vocab_size", 1) < 1:
        raise UserError(f"--vocab-size {options['vocab_size']}: must be at least 1")
    is_file = package in ("sentencepiece", "tiktoken")
    for name, flag in given.items():
        if flag.kind != "file" and not (name == "tokenizer_model" and is_file):
            continue
        if not Path(options[name]).is_file():
            raise UserError(f"{flag.flag} {options[name]}: no such file")


def flags_of(tokenizer_type: str, options: Mapping[str, Any]) -> list[str]:
    """Returns the command-line flags that say ``tokenizer_type`` and ``options`` to Megatron."""
    flags = ["--tokenizer-type", tokenizer_type]
    for flag in TOKENIZER_FLAGS:
        if flag.field not in options:
            continue
        flags.append(flag.flag)
        value = options[flag.field]
        if flag.kind == "list":
            flags.extend(str(item) for item in value)
        elif flag.kind not in ("true", "false"):
            flags.append(str(value))
    return flags


def build_tokenizer(tokenizer_type: str, options: Mapping[str, Any]) -> CorpusTokenizer:
    """Returns the tokenizer of a corpus; imports Megatron (seconds).

    Args:
        tokenizer_type: ``bytes``, or a value of Megatron's ``--tokenizer-type``.
        options: Fields of :data:`TOKENIZER_FLAGS` the user gave, and their values.

    Raises:
        UserError: The options don't fit, a package is missing, or Megatron refuses to build it.
    """
    check_tokenizer_options(tokenizer_type, options)
    if tokenizer_type == BYTES:
        return ByteTokenizer(training_flags=byte_training_flags())
    flags = flags_of(tokenizer_type, options)
    try:
        built = _build_with_megatron(tokenizer_type, options)
        vocab_size, eod = built.vocab_size, built.eod
    except Exception as error:  # tokenizer libraries raise whatever they like
        raise UserError(
            f"{' '.join(flags)}: Megatron could not build this tokenizer: "
            f"{type(error).__name__}: {error}"
        ) from error
    if vocab_size is None or eod is None:
        missing = "end-of-document id" if eod is None else "vocabulary size"
        raise UserError(
            f"{' '.join(flags)}: the tokenizer has no {missing}, and documents could not be told "
            "apart in training; use one that has it"
        )
    return MegatronTokenizer(
        built=built,
        tokenizer_type=tokenizer_type,
        vocab_size=int(vocab_size),
        eod=int(eod),
        training_flags=flags,
        files=tokenizer_files(options),
    )


def tokenizer_files(options: Mapping[str, Any]) -> dict[str, Path]:
    """Returns the files among ``options`` that define the tokenizer, by flag.

    A hub name or a folder given as ``--tokenizer-model`` is no file and is left out.
    """
    files = {}
    for flag in TOKENIZER_FLAGS:
        value = options.get(flag.field)
        if value is not None and (flag.kind == "file" or flag.field == "tokenizer_model"):
            path = Path(value)
            if path.is_file():
                files[flag.flag] = path
    return files


def byte_training_flags() -> list[str]:
    """Returns the flags with which the installed Megatron reads a ``bytes`` corpus.

    Raises:
        UserError: This Megatron gives ``NullTokenizer`` other ids than a ``bytes`` corpus has.
    """
    for vocab_size in (BYTES_VOCAB_SIZE, BYTES_VOCAB_SIZE - 1):
        built = _build_with_megatron("NullTokenizer", {"vocab_size": vocab_size})
        if (built.vocab_size, built.eod) == (BYTES_VOCAB_SIZE, BYTES_END_OF_DOCUMENT):
            return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
    raise UserError(
        "--tokenizer-type bytes: the NullTokenizer of the installed Megatron has no setting with "
        f"{BYTES_VOCAB_SIZE} ids and end of document {BYTES_END_OF_DOCUMENT}; "
        "use another --tokenizer-type, or a Megatron release this package supports"
    )


def _build_with_megatron(tokenizer_type: str, options: Mapping[str, Any]) -> Any:
    with quiet_import():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
        from megatron.training.arguments import add_megatron_arguments

        # Megatron's own parser, as in training: its defaults differ from release to release.
        parser = add_megatron_arguments(argparse.ArgumentParser(exit_on_error=False))
        arguments = parser.parse_args(flags_of(tokenizer_type, options))
        # Padding the vocabulary is a matter of the training run: it depends on its parallel sizes.
        arguments.pad_vocab_size = False
        arguments.rank = -1  # no rank of a run: nothing is logged
        return build_tokenizer(arguments)


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Keeps what Megatron and torch say at import (missing GPU, missing extras) off the terminal.

    None of it matters to writing a corpus, which uses neither.
    """
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
