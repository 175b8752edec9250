"""Checks of an existing corpus, before a training run spends minutes to fail on it or learn wrong.

Reads Megatron's format without Megatron, so that it costs milliseconds. Only the index is read
whole (4 bytes of it per sequence), not the tokens, unless they are few.

Format of ``PREFIX.idx``, little-endian: 9 bytes ``MMIDIDX\\0\\0``, uint64 version 1, uint8 code of
the token dtype, uint64 number of sequences, uint64 number of document bounds, then the arrays
int32 lengths [sequences], int64 byte offsets into ``PREFIX.bin`` [sequences], int64 document
bounds (as sequence numbers) [documents + 1], and for multimodal corpora int8 modes [sequences].
``PREFIX.bin`` is the tokens, nothing else.
"""

import difflib
import shlex
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_longseq.data.sidecar import Sidecar, read_sidecar, sha256_of
from megatron_longseq.data.splits import (
    SPLIT_NAMES,
    TRAIN_ONLY,
    smallest_part,
    split_bounds,
    suggested_split,
)
from megatron_longseq.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES: Mapping[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
NOT_LOCAL = ("s3://", "msc://")

FULL_SCAN_BYTES = 256 << 20
"""Up to this size of ``PREFIX.bin`` every token is looked at: about a tenth of a second."""


@dataclass(frozen=True)
class TrainingTokenizer:
    """The tokenizer a training run uses, to compare with that of the corpus."""

    tokenizer_type: str
    """Value of ``--tokenizer-type``."""
    vocab_size: int
    """Number of ids of the built tokenizer, before padding."""
    eod: int | None
    """Its end-of-document id."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Paths given for ``--tokenizer-model``, ``--vocab-file``, ``--merge-file``, by flag."""

    @classmethod
    def of_run(cls, arguments: Any, tokenizer: Any) -> "TrainingTokenizer":
        """Returns the facts from Megatron's parsed arguments and the tokenizer it built."""
        flags = {
            "--tokenizer-model": "tokenizer_model",
            "--vocab-file": "vocab_file",
            "--merge-file": "merge_file",
            "--tokenizer-metadata": "metadata_path",
        }
        given = {flag: getattr(arguments, name, None) for flag, name in flags.items()}
        return cls(
            tokenizer_type=arguments.tokenizer_type,
            vocab_size=int(tokenizer.vocab_size),
            eod=tokenizer.eod,
            files={flag: path for flag, path in given.items() if path},
        )


@dataclass(frozen=True)
class Corpus:
    """A corpus whose files agree with each other."""

    prefix: str
    dtype: np.dtype
    lengths: np.ndarray
    """Tokens of each sequence, [sequences], int32, memory-mapped. GPT datasets treat a sequence
    as a document."""
    documents: int
    tokens: int
    bin_bytes: int
    sidecar: Sidecar | None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())


def read_corpus(prefix: str, *, flag: str = "--data-path") -> Corpus:
    """Reads the index at ``prefix`` and checks it against the sizes of the files.

    Raises:
        UserError: A file is missing, truncated, too long, of another format, or holds no tokens.
    """
    where = f"{flag} {prefix}"
    idx, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        _check_presence(where, prefix, idx, data)
        idx_bytes, bin_bytes = idx.stat().st_size, data.stat().st_size
        with data.open("rb"), idx.open("rb") as stream:
            start = stream.read(HEADER.size)
    except OSError as error:
        raise UserError(f"{where}: cannot read {error.filename}: {error.strerror}") from error
    again = "copy or prepare the corpus again"
    if len(start) < HEADER.size:
        raise UserError(
            f"{where}: {idx} is truncated: {len(start)} bytes, shorter than its own header of "
            f"{HEADER.size}; {again}"
        )
    magic, version, code, sequences, bounds = HEADER.unpack(start)
    if magic != MAGIC:
        raise UserError(
            f"{where}: {idx} is no index of Megatron's: it starts with {magic!r} and not {MAGIC!r}"
            "; name a prefix that `longseq prepare-data` wrote"
        )
    if version != VERSION or code not in TOKEN_DTYPES:
        what = f"version {version}" if version != VERSION else f"token dtype code {code}"
        raise UserError(
            f"{where}: {idx} has {what}; this package reads version {VERSION} with integer tokens "
            f"(codes {', '.join(map(str, TOKEN_DTYPES))}); prepare the corpus again"
        )
    expected = HEADER.size + 12 * sequences + 8 * bounds
    if idx_bytes not in (expected, expected + sequences):
        state = "truncated" if idx_bytes < expected else "too long"
        raise UserError(
            f"{where}: {idx} is {state}: {idx_bytes:,} bytes, and its {sequences:,} sequences and "
            f"{bounds:,} document bounds take {expected:,}; {again}"
        )
    if sequences == 0 or bounds < 2:
        raise UserError(f"{where}: the corpus has no documents; prepare it from text that has some")
    dtype = TOKEN_DTYPES[code]
    mapped = np.memmap(idx, mode="r")
    lengths, offsets, ends = _arrays(mapped, sequences, bounds)
    tokens = int(lengths.sum(dtype=np.int64))
    if int(lengths.min()) < 0 or int(offsets[0]) != 0 or int(ends[-1]) != sequences:
        raise UserError(f"{where}: {idx} is damaged: its arrays contradict each other; {again}")
    if bin_bytes != tokens * dtype.itemsize:
        state = "truncated" if bin_bytes < tokens * dtype.itemsize else "too long"
        raise UserError(
            f"{where}: {data} is {state}: {bin_bytes:,} bytes, and the index says "
            f"{tokens * dtype.itemsize:,} ({tokens:,} tokens of {dtype.itemsize} bytes); the two "
            f"files may be of different corpora, or a copy was cut short; {again}"
        )
    if int(offsets[-1]) != (tokens - int(lengths[-1])) * dtype.itemsize:
        raise UserError(f"{where}: {idx} is damaged: its arrays contradict each other; {again}")
    if tokens == 0:
        raise UserError(f"{where}: the corpus has no tokens; prepare it from text that has some")
    sidecar = read_sidecar(Path(f"{prefix}.json"))
    if sidecar is not None and (sidecar.tokens, sidecar.bin_bytes) != (tokens, bin_bytes):
        raise UserError(
            f"{where}: {prefix}.json is of another corpus: it says {sidecar.tokens:,} tokens in "
            f"{sidecar.bin_bytes:,} bytes, and {data} has {tokens:,} in {bin_bytes:,}; {again}, "
            f"or delete {prefix}.json to train without what it checks"
        )
    return Corpus(prefix, dtype, lengths, bounds - 1, tokens, bin_bytes, sidecar)


def _arrays(
    mapped: np.ndarray, sequences: int, bounds: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first = HEADER.size
    second = first + 4 * sequences
    third = second + 8 * sequences
    return (
        mapped[first:second].view("<i4"),
        mapped[second:third].view("<i8"),
        mapped[third : third + 8 * bounds].view("<i8"),
    )


def _check_presence(where: str, prefix: str, idx: Path, data: Path) -> None:
    missing = [path for path in (data, idx) if not path.is_file()]
    if not missing:
        return
    folder = data.parent
    if not folder.is_dir():
        raise UserError(f"{where}: there is no folder {folder}")
    text = f"{where}: no file {' and no file '.join(str(path) for path in missing)}"
    bare = prefix.removesuffix(".bin").removesuffix(".idx")
    whole = sorted(path.stem for path in folder.glob("*.idx") if path.with_suffix(".bin").is_file())
    if bare != prefix and Path(bare).name in whole:
        raise UserError(f"{text}; give the prefix without its ending: {bare}")
    if len(missing) == 1:
        raise UserError(
            f"{text}, though {data if missing == [idx] else idx} is there: a corpus is both files; "
            "copy or prepare it again"
        )
    near = difflib.get_close_matches(Path(prefix).name, whole, n=3, cutoff=0.5)
    near += [name for name in whole if name.startswith(Path(prefix).name) and name not in near]
    if near:
        shown = ", ".join(str(folder / name) for name in near[:3])
        raise UserError(f"{text}; did you mean {shown}?")
    if whole:
        shown = ", ".join(str(folder / name) for name in whole[:5])
        raise UserError(f"{text}; corpora in that folder: {shown}")
    raise UserError(
        f"{text}, nor any other corpus in {folder}; make one with "
        f"`longseq prepare-data INPUT --output {shlex.quote(prefix)}`"
    )


def check_corpus(
    prefix: str,
    *,
    tokenizer: TrainingTokenizer | None = None,
    seq_length: int | None = None,
    split: str | None = None,
    samples: Sequence[int | None] = (None, None, None),
    flag: str = "--data-path",
    full_scan_bytes: int = FULL_SCAN_BYTES,
) -> Corpus:
    """Checks that a training run can use the corpus at ``prefix``.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        tokenizer: The run's tokenizer; None leaves out what compares with it.
        seq_length: ``--seq-length``, in tokens; None leaves out the sizes of the splits.
        split: ``--split``; None means that the whole corpus is one part, as with
            ``--train-data-path``, ``--valid-data-path`` and ``--test-data-path``.
        samples: Samples the run will draw from train, valid and test; None is "some". A part from
            which it draws 0 still needs one token: Megatron repeats the documents of a part until
            it has enough tokens, and would repeat none for ever.
        flag: The flag that named the prefix, for messages.
        full_scan_bytes: Up to which size of ``PREFIX.bin`` all tokens are compared with the
            vocabulary. A larger one is judged by the largest id that its sidecar records, and
            without a sidecar its ids are not checked.

    Returns:
        What was read of the corpus.

    Raises:
        UserError: A check failed; the message names the flag, the prefix, the rule, the remedy.
    """
    corpus = read_corpus(prefix, flag=flag)
    where = f"{flag} {prefix}"
    if tokenizer is not None:
        if corpus.sidecar is not None:
            _check_tokenizer(where, corpus.sidecar, tokenizer)
        _check_vocabulary(where, corpus, tokenizer, full_scan_bytes)
    if seq_length is not None:
        _check_sizes(where, corpus, seq_length, split, samples)
    return corpus


def check_data_path(entries: Sequence[str], **checks: Any) -> list[Corpus]:
    """Checks each local corpus in the value of ``--data-path``: prefixes, or weights and prefixes.

    Args:
        entries: The words of the flag. With a weight before each prefix, weights are left out.
        checks: Passed to :func:`check_corpus`.

    Returns:
        The corpora; prefixes in object storage are passed over.
    """
    prefixes = list(entries)
    if len(prefixes) % 2 == 0 and all(_is_number(weight) for weight in prefixes[::2]):
        prefixes = prefixes[1::2]
    return [
        check_corpus(prefix.strip(), **checks)
        for prefix in prefixes
        if not prefix.startswith(NOT_LOCAL)
    ]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_tokenizer(where: str, made: Sidecar, run: TrainingTokenizer) -> None:
    remedy = f"train with the flags of the corpus: {shlex.join(made.training_flags)}"
    facts = (
        ("--tokenizer-type", made.tokenizer_type, run.tokenizer_type),
        ("a vocabulary of", made.vocab_size, run.vocab_size),
        ("end-of-document id", made.eod, run.eod),
    )
    for name, of_corpus, of_run in facts:
        if of_corpus != of_run:
            raise UserError(
                f"{where}: made with {name} {of_corpus}, and this run has {of_run}; {remedy}, or "
                "prepare the corpus again with the tokenizer of this run"
            )
    for flag, path in run.files.items():
        expected = made.tokenizer_sha256.get(flag)
        if expected is not None and Path(path).is_file() and sha256_of(Path(path)) != expected:
            raise UserError(
                f"{where}: made with another file than {flag} {path} (SHA-256 {expected[:12]}...); "
                "train with the same file, or prepare the corpus again"
            )


def _check_vocabulary(
    where: str, corpus: Corpus, run: TrainingTokenizer, full_scan_bytes: int
) -> None:
    if corpus.bin_bytes <= full_scan_bytes:
        smallest, largest = token_range(corpus)
    elif corpus.sidecar is not None:
        smallest, largest = 0, corpus.sidecar.largest_token
    else:
        return
    if smallest < 0 or largest >= run.vocab_size:
        token = smallest if smallest < 0 else largest
        raise UserError(
            f"{where}: holds token id {token:,}, and the vocabulary of --tokenizer-type "
            f"{run.tokenizer_type} ends at {run.vocab_size - 1:,}; use the tokenizer that made the "
            "corpus"
        )


def token_range(corpus: Corpus) -> tuple[int, int]:
    """Returns the smallest and largest token id, from all tokens, a block at a time."""
    tokens = np.memmap(f"{corpus.prefix}.bin", dtype=corpus.dtype, mode="r")
    block = 1 << 24
    smallest = largest = int(tokens[0])
    for first in range(0, tokens.size, block):
        part = tokens[first : first + block]
        smallest, largest = min(smallest, int(part.min())), max(largest, int(part.max()))
    return smallest, largest


def _check_sizes(
    where: str,
    corpus: Corpus,
    seq_length: int,
    split: str | None,
    samples: Sequence[int | None],
) -> None:
    lengths = corpus.lengths
    # A sample is its inputs and, one further, its labels.
    one_sample = seq_length + 1
    bounds = split_bounds(split, lengths.size) if split else [(0, lengths.size), None, None]
    for name, part, drawn in zip(SPLIT_NAMES, bounds, samples, strict=True):
        if part is None:
            continue
        tokens = int(lengths[part[0] : part[1]].sum(dtype=np.int64))
        needed = 1 if drawn == 0 else one_sample
        if tokens >= needed:
            continue
        rule = (
            f"one sample of --seq-length {seq_length} takes {one_sample:,}"
            if needed > 1
            else "Megatron would repeat them for ever to get its first token"
        )
        remedies = ["a corpus with more text"]
        if split is None:
            shortest = corpus.tokens - 1
            found = f"the corpus has {tokens:,} tokens"
        else:
            shortest = smallest_part(split, lengths) - 1
            found = (
                f"--split {split} leaves {part[1] - part[0]:,} of {lengths.size:,} documents "
                f"and {tokens:,} tokens for {name}"
            )
            suggestion = suggested_split(lengths, one_sample)
            if suggestion is not None:
                alone = " with --eval-iters 0" if suggestion == TRAIN_ONLY else ""
                remedies.insert(0, f"--split {suggestion}{alone}")
        if shortest >= 1 and needed > 1:
            remedies.insert(0, f"--seq-length up to {shortest}")
        raise UserError(f"{where}: {found}, and {rule}; what works: {', or '.join(remedies)}")
