"""A training run learns before its first step that a corpus does not fit."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_longseq.data.corpus import (
    HEADER,
    TrainingTokenizer,
    check_corpus,
    check_data_path,
    read_corpus,
    token_range,
)
from megatron_longseq.data.prepare import PreparedCorpus
from megatron_longseq.data.tokenizer import quiet_import
from megatron_longseq.errors import UserError

BYTES = TrainingTokenizer("NullTokenizer", vocab_size=257, eod=256)
TEXTS = ["alpha " * 40, "b", "gamma rays\n" * 9, "ö" * 30] * 5

Prepared = Callable[..., PreparedCorpus]


@pytest.fixture
def prefix(prepared: Prepared) -> str:
    return prepared(*TEXTS).prefix


def test_a_corpus_is_read_as_megatron_reads_it(prefix: str) -> None:
    with quiet_import():
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    theirs, ours = IndexedDataset(prefix), read_corpus(prefix)
    assert np.array_equal(ours.lengths, theirs.sequence_lengths)
    assert ours.documents == len(theirs.document_indices) - 1 == 20
    assert ours.tokens == sum(len(document) for document in theirs[:])  # type: ignore[misc]
    assert ours.longest == max(len(document) for document in theirs[:])  # type: ignore[misc]
    assert ours.dtype == theirs.index.dtype
    assert token_range(ours) == (10, 256)


@pytest.mark.parametrize("multimodal", [False, True])
def test_a_corpus_of_megatrons_own_tools_passes(tmp_path: Path, multimodal: bool) -> None:
    with quiet_import():
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    prefix = str(tmp_path / "theirs")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32, multimodal=multimodal)
    for sentence in (50, 60, 70):
        builder.add_item(torch.arange(sentence))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    corpus = check_corpus(prefix, tokenizer=BYTES, seq_length=64, split="1,0,0")
    assert (corpus.documents, corpus.lengths.tolist(), corpus.sidecar) == (1, [50, 60, 70], None)


def test_a_fitting_run_passes_every_check(prefix: str) -> None:
    corpus = check_corpus(prefix, tokenizer=BYTES, seq_length=100, split="80,10,10")
    assert corpus.sidecar is not None
    assert check_data_path([prefix], tokenizer=BYTES)[0].tokens == corpus.tokens
    assert len(check_data_path(["0.3", prefix, "0.7", prefix])) == 2
    assert len(check_data_path([prefix, "s3://bucket/corpus", prefix])) == 2


def cut(path: str, size: int) -> None:
    with open(path, "r+b") as stream:
        stream.truncate(size)


def overwrite(path: str, offset: int, value: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(value)


def append(path: str, value: bytes) -> None:
    with open(path, "ab") as stream:
        stream.write(value)


def empty_corpus(prefix: str, documents: int) -> None:
    header = HEADER.pack(b"MMIDIDX\0\0", 1, 8, documents, documents + 1)
    arrays = (np.zeros(documents, "<i4"), np.zeros(documents, "<i8"), np.arange(documents + 1))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.bin").write_bytes(b"")
    Path(f"{prefix}.json").unlink()


DAMAGE: dict[str, tuple[Callable[[str], Any], str]] = {
    "no bin": (lambda p: Path(f"{p}.bin").unlink(), r"no file \S+corpus.bin, though .*corpus.idx"),
    "no idx": (lambda p: Path(f"{p}.idx").unlink(), r"no file \S+corpus.idx, though .*corpus.bin"),
    "idx shorter than its header": (lambda p: cut(f"{p}.idx", 20), "truncated: 20 bytes.*34"),
    "idx empty": (lambda p: cut(f"{p}.idx", 0), "truncated: 0 bytes"),
    "idx cut": (lambda p: cut(f"{p}.idx", 400), "idx is truncated: 400 bytes, .* take 442"),
    "idx too long": (lambda p: append(f"{p}.idx", b"1234"), "idx is too long: 446 bytes.* 442"),
    "idx of another format": (lambda p: overwrite(f"{p}.idx", 0, b"PK"), "no index of Megatron's"),
    "idx of another version": (lambda p: overwrite(f"{p}.idx", 9, b"\2"), "has version 2"),
    "idx of another dtype": (lambda p: overwrite(f"{p}.idx", 17, b"\6"), "token dtype code 6"),
    "idx with a wrong length": (lambda p: overwrite(f"{p}.idx", 34, b"\1\0"), "bin is too long"),
    "idx with a wrong offset": (lambda p: overwrite(f"{p}.idx", 266, b"\1"), "contradict"),
    "bin cut": (
        lambda p: cut(f"{p}.bin", 1000),
        r"bin is truncated: 1,000 bytes.* 4,040 .*2 bytes",
    ),
    "bin too long": (lambda p: append(f"{p}.bin", b"12"), r"too long: 4,042 bytes.* 4,040"),
    "no documents": (lambda p: empty_corpus(p, 0), "no documents"),
    "no tokens": (lambda p: empty_corpus(p, 3), "no tokens"),
    "sidecar no JSON": (lambda p: cut(f"{p}.json", 30), "corpus.json: damaged"),
    "sidecar without a fact": (
        lambda p: Path(f"{p}.json").write_text(
            '{"format": "megatron_longseq corpus", "version": 1}'
        ),
        "damaged, without tokenizer_type",
    ),
    "sidecar of a later version": (
        lambda p: Path(f"{p}.json").write_text(
            '{"format": "megatron_longseq corpus", "version": 2}'
        ),
        "version 2 of the format",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_corpus_is_refused(prefix: str, damage: str) -> None:
    harm, message = DAMAGE[damage]
    harm(prefix)
    with pytest.raises(UserError, match=message) as caught:
        check_corpus(prefix, tokenizer=BYTES, seq_length=16, split="90,5,5")
    assert prefix in str(caught.value)
    if "sidecar" not in damage:
        assert str(caught.value).startswith(f"--data-path {prefix}: ")


def test_a_sidecar_of_another_corpus_is_told(prefix: str, prepared: Prepared) -> None:
    other = prepared("text", name="other").prefix
    shutil.copy(f"{other}.json", f"{prefix}.json")
    with pytest.raises(UserError, match=r"corpus.json is of another corpus: .* 5 tokens"):
        check_corpus(prefix)


def test_json_of_another_program_is_no_sidecar(prefix: str) -> None:
    Path(f"{prefix}.json").write_text('{"format": "something else"}')
    assert check_corpus(prefix, tokenizer=BYTES).sidecar is None


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("corpsu", "did you mean .*/corpus?"),
        ("corpus.bin", "without its ending: .*/corpus$"),
        ("corpus.idx", "without its ending: .*/corpus$"),
        ("unlike", "corpora in that folder: .*/corpus"),
        ("co", "did you mean .*/corpus?"),
        ("no/corpus", "no folder .*/no"),
    ],
)
def test_a_missing_corpus_is_told_with_what_is_there(prefix: str, asked: str, hint: str) -> None:
    wrong = str(Path(prefix).parent / asked)
    with pytest.raises(UserError, match=hint) as caught:
        check_corpus(wrong, flag="--train-data-path")
    assert str(caught.value).startswith(f"--train-data-path {wrong}: ")


def test_a_folder_without_a_corpus_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"longseq prepare-data INPUT --output"):
        check_corpus(str(tmp_path / "corpus"))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (TrainingTokenizer("HuggingFaceTokenizer", 257, 256), "made with --tokenizer-type Null"),
        (TrainingTokenizer("NullTokenizer", 256, 255), "vocabulary of 257, and this run has 256"),
        (TrainingTokenizer("NullTokenizer", 257, 0), "end-of-document id 256, .* has 0"),
    ],
)
def test_another_tokenizer_than_that_of_the_corpus_is_refused(
    prefix: str, run: TrainingTokenizer, message: str
) -> None:
    flags = "--tokenizer-type NullTokenizer --vocab-size 257"
    with pytest.raises(UserError, match=f"--data-path .*{message}.*{flags}"):
        check_corpus(prefix, tokenizer=run)


def test_another_tokenizer_file_of_the_same_size_is_refused(prefix: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.model", tmp_path / "other.model"
    mine.write_text("a")
    other.write_text("b")
    facts = json.loads(Path(f"{prefix}.json").read_text())
    facts["tokenizer_sha256"] = {
        "--tokenizer-model": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    }
    Path(f"{prefix}.json").write_text(json.dumps(facts))

    def run(path: Path) -> TrainingTokenizer:
        arguments = argparse.Namespace(tokenizer_type="NullTokenizer", tokenizer_model=str(path))
        return TrainingTokenizer.of_run(arguments, argparse.Namespace(vocab_size=257, eod=256))

    check_corpus(prefix, tokenizer=run(mine))
    with pytest.raises(UserError, match=r"another file than --tokenizer-model .*other.model"):
        check_corpus(prefix, tokenizer=run(other))


def test_ids_beyond_the_vocabulary_are_found_without_a_sidecar(prefix: str) -> None:
    Path(f"{prefix}.json").unlink()
    with pytest.raises(UserError, match=r"holds token id 256, .* ends at 199"):
        check_corpus(prefix, tokenizer=TrainingTokenizer("NullTokenizer", 200, 199))
    with pytest.raises(UserError, match=r"holds token id 256, .* ends at 255"):
        check_corpus(prefix, tokenizer=TrainingTokenizer("NullTokenizer", 256, 255))
    check_corpus(prefix, tokenizer=BYTES)


def test_ids_of_a_large_corpus_are_judged_by_its_sidecar_alone(prefix: str) -> None:
    run = TrainingTokenizer("NullTokenizer", 257, 256)
    overwrite(f"{prefix}.bin", 0, b"\xff\xff")
    check_corpus(prefix, tokenizer=run, full_scan_bytes=0)
    with pytest.raises(UserError, match=r"token id 65,535"):
        check_corpus(prefix, tokenizer=run)
    facts = json.loads(Path(f"{prefix}.json").read_text())
    Path(f"{prefix}.json").write_text(json.dumps({**facts, "largest_token": 300}))
    with pytest.raises(UserError, match=r"token id 300"):
        check_corpus(prefix, tokenizer=run, full_scan_bytes=0)


def test_a_part_without_one_sample_is_refused_with_what_works(prefix: str) -> None:
    with pytest.raises(UserError, match=r"--split 969, 30, 1 leaves 0 of 20 .* for test") as caught:
        check_corpus(prefix, seq_length=32, split="969, 30, 1", samples=(8, 0, 8))
    assert "what works: --split 90,5,5, or a corpus with more text" in str(caught.value)
    check_corpus(prefix, seq_length=32, split="90,5,5")


def test_a_part_of_too_few_tokens_names_the_longest_sequence_that_fits(prefix: str) -> None:
    with pytest.raises(
        UserError, match=r"100 tokens for valid.* 128 takes 129.* up to 60"
    ) as caught:
        check_corpus(prefix, seq_length=128, split="90,5,5")
    assert "--split 80,10,10" in str(caught.value)
    check_corpus(prefix, seq_length=60, split="90,5,5")


def test_a_part_that_is_never_drawn_from_needs_one_token(prefix: str) -> None:
    check_corpus(prefix, seq_length=128, split="90,5,5", samples=(8, 0, 0))
    with pytest.raises(UserError, match=r"0 tokens for valid.* for ever"):
        check_corpus(prefix, seq_length=128, split="98,1,1", samples=(8, 0, 0))
    check_corpus(prefix, seq_length=128, split="1", samples=(8, 0, 0))


def test_a_corpus_for_one_part_is_taken_whole(prefix: str) -> None:
    tokens = read_corpus(prefix).tokens
    check_corpus(prefix, seq_length=tokens - 1)
    with pytest.raises(UserError, match=f"has 2,020 tokens, .* up to {tokens - 1}"):
        check_corpus(prefix, seq_length=tokens)
