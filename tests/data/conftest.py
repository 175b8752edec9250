"""What the tests of corpora share: the command line in this process, and one import of Megatron."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_longseq import cli
from megatron_longseq.cli import prepare_data
from megatron_longseq.data.prepare import PreparedCorpus, plan_corpus, write_corpus
from megatron_longseq.data.tokenizer import ByteTokenizer, CorpusTokenizer, build_tokenizer


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def longseq(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    byte_tokenizer: ByteTokenizer,
) -> Callable[..., Outcome]:
    """Runs ``longseq prepare-data`` with the given words."""
    monkeypatch.setattr(cli, "COMMANDS", ("prepare_data",))

    def build(tokenizer_type: str, options: dict[str, Any]) -> CorpusTokenizer:
        # Megatron's argument parser, asked once for the flags of bytes, takes a tenth of a second.
        return (
            byte_tokenizer
            if tokenizer_type == "bytes"
            else build_tokenizer(tokenizer_type, options)
        )

    monkeypatch.setattr(prepare_data, "build_tokenizer", build)

    def command(*words: object) -> Outcome:
        capsys.readouterr()
        code = cli.main(["prepare-data", *map(str, words)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return command


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    """The bytes tokenizer with the flags of the installed Megatron."""
    tokenizer = build_tokenizer("bytes", {})
    assert isinstance(tokenizer, ByteTokenizer)
    return tokenizer


@pytest.fixture
def prepared(tmp_path: Path, byte_tokenizer: ByteTokenizer) -> Callable[..., PreparedCorpus]:
    """Makes a corpus of bytes from texts, one document each, at ``tmp_path / name``."""

    def make(*texts: str, name: str = "corpus") -> PreparedCorpus:
        folder = tmp_path / f"{name}-texts"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number:04}.txt").write_bytes(text.encode())
        return write_corpus(plan_corpus([str(folder)], str(tmp_path / name)), byte_tokenizer)

    return make
