"""``longseq prepare-data`` writes text that comes back from Megatron, or nothing at all."""

import contextlib
import gzip
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_back import documents_of, files_in

from megatron_longseq.cli import main
from megatron_longseq.data import documents, prepare
from megatron_longseq.data.corpus import TrainingTokenizer, check_corpus
from megatron_longseq.data.prepare import plan_corpus, write_corpus
from megatron_longseq.data.tokenizer import ByteTokenizer, quiet_import
from megatron_longseq.data.writer import CorpusWriter, stale_caches
from megatron_longseq.errors import UserError

Longseq = Callable[..., Any]


@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(st.text(min_size=1).filter(lambda text: "\0" not in text), max_size=4),
    lines=st.lists(st.text(min_size=1), min_size=1, max_size=4),
    packed=st.booleans(),
)
def test_every_text_comes_back_from_megatron_with_its_end(
    byte_tokenizer: ByteTokenizer, files: list[str], lines: list[str], packed: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK_BYTES", 5)
        inputs = []
        for number, text in enumerate(files):
            inputs.append(Path(folder, f"{number}.txt"))
            inputs[-1].write_bytes(text.encode())
        inputs.append(Path(folder, "lines.jsonl.gz" if packed else "lines.jsonl"))
        content = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
        inputs[-1].write_bytes(gzip.compress(content) if packed else content)
        prefix = f"{folder}/corpus"
        made = write_corpus(plan_corpus([str(path) for path in inputs], prefix), byte_tokenizer)
        found = documents_of(prefix)
        assert [ids[:-1].astype(np.uint8).tobytes().decode() for ids in found] == files + lines
        assert all(ids[-1] == 256 for ids in found)
        assert made.sidecar.tokens == sum(len(ids) for ids in found)
        assert made.sidecar.longest_document == max(len(ids) for ids in found)
        check_corpus(prefix, tokenizer=TrainingTokenizer("NullTokenizer", 257, 256))


def test_a_gpt_dataset_of_megatrons_draws_the_bytes_of_the_text(
    tmp_path: Path, byte_tokenizer: ByteTokenizer
) -> None:
    text = "".join(f"{number} bytes, " for number in range(2000))
    (tmp_path / "a.txt").write_text(text)
    prefix = str(tmp_path / "corpus")
    write_corpus(plan_corpus([str(tmp_path / "a.txt")], prefix), byte_tokenizer)
    with quiet_import():
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.tokenizers import MegatronTokenizer

        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=4096,
            blend=([prefix], None),
            split="1,0,0",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            tokenizer=MegatronTokenizer.from_pretrained(
                metadata_path={"library": "null-text"}, vocab_size=257
            ),
        )
        train = BlendedMegatronDatasetBuilder(GPTDataset, (5, 0, 0), lambda: True, config).build()[
            0
        ]
        samples = [train[number] for number in range(5)]
    drawn = sorted(byte_tokenizer.decode(sample["tokens"].numpy()) for sample in samples)
    assert drawn == sorted(text[start : start + 4096] for start in range(0, 5 * 4096, 4096))
    assert all(sample["loss_mask"].all() for sample in samples)
    # What Megatron keeps for the corpus is found again when the corpus is replaced.
    assert len(stale_caches(prefix)) == 4
    (tmp_path / "a.txt").write_text("short")
    write_corpus(plan_corpus([str(tmp_path / "a.txt")], prefix, overwrite=True), byte_tokenizer)
    assert stale_caches(prefix) == []


def test_without_input_the_standard_library_gives_megabytes_and_long_documents(
    tmp_path: Path, longseq: Longseq
) -> None:
    outcome = longseq("--output", tmp_path / "x")
    assert outcome.code == 0, outcome.err
    assert files_in(tmp_path) == {"x.bin", "x.idx", "x.json"}
    found = documents_of(tmp_path / "x")
    tokens = sum(len(ids) for ids in found)
    assert tokens > 5_000_000
    assert max(len(ids) for ids in found) > 500_000
    assert f"documents   {len(found):,}\n" in outcome.out
    assert f"tokens      {tokens:,}," in outcome.out
    flags = f"--data-path {tmp_path}/x --split 95,3,2 --tokenizer-type NullTokenizer --vocab-size"
    assert flags in outcome.out
    longest = int(outcome.out.split("--seq-length up to ")[1].split(",")[0] + "000")
    run = TrainingTokenizer("NullTokenizer", 257, 256)
    check_corpus(str(tmp_path / "x"), tokenizer=run, seq_length=longest, split="95,3,2")
    source = (Path(os.__file__).parent / "argparse.py").read_bytes()
    assert any(ids[:-1].astype(np.uint8).tobytes() == source for ids in found)


def test_the_command_itself_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    words = ["prepare-data", str(tmp_path / "no"), "--output", str(tmp_path / "x")]
    code = (
        "import sys; from megatron_longseq import cli; cli.COMMANDS = ('prepare_data',); "
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    root = str(Path(prepare.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=root, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}/no: no such file or folder\n"
    assert files_in(tmp_path) == set()


def test_what_was_skipped_is_counted(tmp_path: Path, longseq: Longseq) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "b.bin").write_bytes(b"text \0" * 9)
    (tmp_path / "in" / "c.txt").write_bytes(b"\xff")
    outcome = longseq(tmp_path / "in", "--output", tmp_path / "x")
    assert "skipped     1 binary, 1 not UTF-8\n" in outcome.out
    assert "--split 100,0,0" in outcome.out and "--eval-iters 0" in outcome.out
    assert [bytes(ids[:-1].astype(np.uint8)) for ids in documents_of(tmp_path / "x")] == [b"text"]


def test_a_late_fault_takes_the_start_of_a_skipped_file_back(
    tmp_path: Path, longseq: Longseq
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("first")
    (tmp_path / "in" / "b.txt").write_bytes(b"x" * (3 << 20) + b"\0")
    (tmp_path / "in" / "c.txt").write_text("last")
    assert longseq(tmp_path / "in", "--output", tmp_path / "x").code == 0
    found = [bytes(ids[:-1].astype(np.uint8)) for ids in documents_of(tmp_path / "x")]
    assert found == [b"first", b"last"]


def make_text(path: Path, content: bytes = b"text") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def packed_lines(path: Path, keep: int | None) -> Path:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))
    return make_text(path, gzip.compress(lines)[:keep])


FAULTS: dict[str, tuple[Callable[[Path], list[object]], str]] = {
    "missing": (lambda d: [d / "no.txt"], "no.txt: no such file or folder"),
    "empty file": (lambda d: [make_text(d / "e.txt", b"")], "e.txt: empty: 0 bytes"),
    "binary file": (
        lambda d: [make_text(d / "b.bin", b"ab\0")],
        "b.bin: binary: a NUL byte at offset 2",
    ),
    "UTF-16": (lambda d: [make_text(d / "u.txt", "text".encode("utf-16"))], "u.txt: .*UTF-8"),
    "invalid UTF-8": (
        lambda d: [make_text(d / "l.txt", b"a" * (2 << 20) + b"\xe4 ")],
        "l.txt: not UTF-8: .* at offset 2,097,152",
    ),
    "cut UTF-8": (lambda d: [make_text(d / "c.txt", b"a\xc3")], "c.txt: not UTF-8: .* offset 1"),
    "folder without text": (
        lambda d: [make_text(d / "folder" / "b", b"\0").parent],
        r"folder: no text in it \(skipped: 1 binary\)",
    ),
    "one of two folders without text": (
        lambda d: [make_text(d / "good" / "a").parent, make_text(d / "none" / ".x").parent],
        "none: no text in it",
    ),
    "pipe": (lambda d: [os.mkfifo(d / "p") or d / "p"], "p: neither a file nor a folder"),  # type: ignore[func-returns-value]
    "other compression": (lambda d: [make_text(d / "t.txt.gz")], r"t.txt.gz: .*\.jsonl\.gz"),
    "unreadable": (lambda d: [Path("/proc/self/mem")], "cannot read /proc/self/mem: Input"),
    "bad JSON": (
        lambda d: [make_text(d / "j.jsonl", b'{"text": "a"}\n{"text": \n')],
        "j.jsonl:2: not JSON: .* at column 10",
    ),
    "JSON of no object": (lambda d: [make_text(d / "j.jsonl", b"3\n")], "j.jsonl:1: a number"),
    "key missing": (
        lambda d: [make_text(d / "j.jsonl", b'{"content": "a"}\n')],
        "j.jsonl:1: no key 'text'; its keys: 'content'; choose one with --key",
    ),
    "value no string": (
        lambda d: [make_text(d / "j.jsonl", b'{"text": ["a"]}'), "--key", "text"],
        "j.jsonl:1: 'text' is a list, not a string",
    ),
    "JSON lines all empty": (
        lambda d: [make_text(d / "j.jsonl", b'\n{"text": ""}\n')],
        r"j.jsonl: no text in it \(skipped: 1 empty\)",
    ),
    "gzip cut": (
        lambda d: [packed_lines(d / "g.jsonl.gz", 9000)],
        "g.jsonl.gz: truncated: .* after line [1-9]",
    ),
    "gzip of nothing": (lambda d: [packed_lines(d / "g.jsonl.gz", 0)], "g.jsonl.gz: no text"),
    "gzip damaged": (
        lambda d: [make_text(d / "g.jsonl.gz", b"no gzip")],
        "g.jsonl.gz: damaged, or not gzip, after line 0",
    ),
    "same file twice": (
        lambda d: [make_text(d / "a.txt"), d / "." / "sub" / ".." / "a.txt"],
        "a.txt is the same file as .*a.txt",
    ),
    "same file by a link": (
        lambda d: [
            make_text(d / "a.txt"),
            (d / "l.txt").symlink_to(d / "a.txt") or d / "l.txt",  # type: ignore[func-returns-value]
        ],
        "l.txt is the same file as .*a.txt",
    ),
    "file and its folder": (
        lambda d: [make_text(d / "f" / "a.txt"), d / "f"],
        "f/a.txt is the same file as .*f/a.txt",
    ),
    "key without JSON lines": (
        lambda d: [make_text(d / "a.txt"), "--key", "body"],
        "--key body: no input is .jsonl",
    ),
    "workers of no use": (
        lambda d: [make_text(d / "a.txt"), "--workers", "2"],
        "--workers 2: no meaning with --tokenizer-type bytes",
    ),
    "no workers": (
        lambda d: [make_text(d / "a.txt"), "--workers", "0"],
        "--workers 0: must be at least 1",
    ),
    "unknown tokenizer": (
        lambda d: [make_text(d / "a.txt"), "--tokenizer-type", "NulTokenizer"],
        "did you mean NullTokenizer",
    ),
    "text the tokenizer refuses": (
        lambda d: [
            make_text(d / "w.txt", b"1 2 three"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
        ],
        "w.txt: the tokenizer can't read it: ValueError: .*three",
    ),
    "ids outside the vocabulary": (
        lambda d: [
            make_text(d / "w.txt", b"1 2 9"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
        ],
        "w.txt: the tokenizer gave id 9, outside its vocabulary of 9",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_input_is_named_and_leaves_no_file(
    tmp_path: Path, longseq: Longseq, fault: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "sub").mkdir()
    out.mkdir()
    make, message = FAULTS[fault]
    good = make_text(tmp_path / "0.txt", b"1 2 3")  # what is wrong comes after what is written
    outcome = longseq(good, *make(source), "--output", out / "x")
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.err)
    assert files_in(out) == set()


OUTPUTS: dict[str, tuple[Callable[[Path], str], str]] = {
    "no folder": (lambda d: f"{d}/no/x", "there is no folder .*/no; .*mkdir -p"),
    "ending": (lambda d: f"{d}/x.bin", "without an ending: .*/x gives"),
    "folder itself": (lambda d: f"{d}/", "not a folder: .*/corpus"),
    "object storage": (lambda d: "s3://bucket/x", "local or mounted disk"),
    "a folder in the way": (
        lambda d: [os.mkdir(d / "x.idx"), f"{d}/x"][1],  # type: ignore[func-returns-value]
        "x.idx is there, and is not a file",
    ),
    "a file for a folder": (lambda d: f"{make_text(d / 'f')}/x", "there is no folder .*/f;"),
    "a name too long": (lambda d: f"{d}/{'x' * 300}", "File name too long; choose another"),
    "a disk that refuses": (lambda d: "/proc/x", "--output /proc/x: cannot write"),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_cannot_be_is_refused(tmp_path: Path, longseq: Longseq, output: str) -> None:
    make, message = OUTPUTS[output]
    (tmp_path / "out").mkdir()
    prefix = make(tmp_path / "out")
    before = files_in(tmp_path / "out")
    outcome = longseq(make_text(tmp_path / "a.txt"), "--output", prefix)
    assert outcome.code == 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.err)
    assert files_in(tmp_path / "out") == before


def test_a_folder_without_permission_is_told_before_anything_is_read(
    tmp_path: Path, longseq: Longseq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    outcome = longseq(tmp_path / "missing.txt", "--output", tmp_path / "x")
    assert f"--output {tmp_path}/x: no permission to write in the folder" in outcome.err


@pytest.mark.parametrize("ending", [".bin", ".idx", ".json"])
def test_what_exists_is_replaced_only_when_asked(
    tmp_path: Path, longseq: Longseq, ending: str
) -> None:
    source = make_text(tmp_path / "a.txt")
    assert longseq(source, "--output", tmp_path / "x").code == 0
    for other in {".bin", ".idx", ".json"} - {ending}:
        (tmp_path / f"x{other}").unlink()
    old = (tmp_path / f"x{ending}").read_bytes()
    outcome = longseq(source, "--output", tmp_path / "x")
    assert outcome.code == 2
    assert f"x{ending} exists; choose another prefix or give --overwrite" in outcome.err
    assert (tmp_path / f"x{ending}").read_bytes() == old
    source.write_text("newer")
    assert longseq(source, "--output", tmp_path / "x", "--overwrite").code == 0
    assert check_corpus(str(tmp_path / "x")).tokens == 6


def test_json_of_another_program_is_never_replaced(tmp_path: Path, longseq: Longseq) -> None:
    make_text(tmp_path / "x.json", b'{"settings": 1}')
    source = make_text(tmp_path / "a.txt")
    outcome = longseq(source, "--output", tmp_path / "x", "--overwrite")
    assert outcome.code == 2
    assert "x.json is there and belongs to no corpus" in outcome.err
    assert (tmp_path / "x.json").read_bytes() == b'{"settings": 1}'


def test_a_faulty_input_keeps_the_corpus_it_was_to_replace(
    tmp_path: Path, longseq: Longseq
) -> None:
    source = make_text(tmp_path / "a.txt")
    assert longseq(source, "--output", tmp_path / "x").code == 0
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    bad = make_text(tmp_path / "b.txt", b"\0")
    assert longseq(source, bad, "--output", tmp_path / "x", "--overwrite").code == 2
    bad.unlink()
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before


def test_a_corpus_in_its_own_input_folder_is_no_input(tmp_path: Path, longseq: Longseq) -> None:
    make_text(tmp_path / "a.txt")
    for extra in ([], ["--overwrite"]):
        assert longseq(tmp_path, "--output", tmp_path / "x", *extra).code == 0
        assert len(documents_of(tmp_path / "x")) == 1


@pytest.mark.parametrize("step", [".bin", ".idx", ".json"])
def test_a_rename_that_fails_leaves_nothing_half_written(
    tmp_path: Path, longseq: Longseq, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    source = make_text(tmp_path / "source" / "a.txt")
    (tmp_path / "out").mkdir()
    replace = os.replace

    def failing(old: Path, new: Path) -> None:
        if new.name.endswith(step):
            raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(os, "replace", failing)
    outcome = longseq(source, "--output", tmp_path / "out" / "x")
    assert outcome.code == 2
    assert "cannot write: Input/output error" in outcome.err
    assert files_in(tmp_path / "out") == set()


def test_an_index_never_describes_data_of_another_corpus(
    tmp_path: Path, longseq: Longseq, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_text(tmp_path / "a.txt")
    assert longseq(source, "--output", tmp_path / "x").code == 0
    replace = os.replace

    def watched(old: Path, new: Path) -> None:
        if new.name == "x.bin":
            assert not (tmp_path / "x.idx").exists()
        replace(old, new)

    monkeypatch.setattr(os, "replace", watched)
    assert longseq(source, "--output", tmp_path / "x", "--overwrite").code == 0


def numbers(folder: Path) -> Path:
    for number in range(30):
        length = 3000 if number in (0, 7) else 10
        words = " ".join(str((number + word) % 90_000) for word in range(length))
        make_text(folder / f"{number:02}.txt", words.encode())
    make_text(folder / "99.bin", b"\0")
    return folder


def test_a_corpus_is_the_same_for_any_number_of_workers(tmp_path: Path, longseq: Longseq) -> None:
    source = numbers(tmp_path / "source")
    made = []
    for workers in (1, 2, 3):
        prefix = tmp_path / f"w{workers}"
        words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "90000")
        outcome = longseq(source, "--output", prefix, "--workers", workers, *words)
        assert outcome.code == 0, outcome.err
        made.append([Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")])
    assert made[0] == made[1] == made[2]
    found = documents_of(tmp_path / "w3")
    assert [int(ids[0]) for ids in found] == list(range(30))
    assert found[0].dtype == np.int32, "90,000 ids don't fit in 16 bits"
    assert all(ids[-1] == 89_999 for ids in found)
    assert "--tokenizer-type NullTokenizer --vocab-size 90000" in outcome.out


def test_a_long_document_is_never_whole_in_memory(
    tmp_path: Path, byte_tokenizer: ByteTokenizer
) -> None:
    size = 24 << 20
    source = make_text(tmp_path / "long.txt", b"x" * size)
    plan = plan_corpus([str(source)], str(tmp_path / "x"))
    tracemalloc.start()
    made = write_corpus(plan, byte_tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made.lengths.tolist() == [size + 1]
    assert peak < size / 2


def test_a_document_longer_than_the_index_can_hold_is_refused(
    tmp_path: Path, longseq: Longseq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_longseq.data.writer.LONGEST_SEQUENCE", 1000)
    source = make_text(tmp_path / "source" / "a.txt", b"x" * 1000)
    outcome = longseq(source, "--output", tmp_path / "x")
    assert "a.txt: one document of more than 999 tokens" in outcome.err
    assert files_in(tmp_path) == {"source"}
    source.write_bytes(b"x" * 999)
    assert longseq(source, "--output", tmp_path / "x").code == 0


# What follows needs a process of its own: signals, limits, terminals.


def in_a_child(work: Callable[[], int], terminal: int | None = None) -> int:
    """Runs ``work`` in a forked process, whose exit code it gives; returns its process id."""
    child = os.fork()
    if child == 0:
        code = 99
        with contextlib.suppress(BaseException):
            if terminal is not None:
                os.dup2(terminal, 1)
                os.dup2(terminal, 2)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            code = work()
        os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_while_writing_leaves_no_file_and_no_process(
    tmp_path: Path, longseq: Longseq, workers: int, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    source = numbers(tmp_path / "source")
    ready, busy = os.pipe()
    words = ["prepare-data", str(source), "--output", str(out / "x")]
    if workers:
        words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "90000"]
        words += ["--workers", str(workers)]
    add = CorpusWriter.add

    def stuck(self: CorpusWriter, name: str, chunks: Any) -> bool:
        done = add(self, name, chunks)
        if name.endswith("05.txt"):
            os.write(busy, b"x")
            time.sleep(60)
        return done

    def work() -> int:
        os.setpgid(0, 0)
        CorpusWriter.add = stuck  # type: ignore[method-assign]
        return main(words)

    child = in_a_child(work)
    assert os.read(ready, 1) == b"x"
    assert len(files_in(out)) == 1, "something is being written"
    os.kill(child, number)
    assert exit_code(child) == 128 + number
    assert files_in(out) == set()
    with pytest.raises(ProcessLookupError):
        os.killpg(child, 0)


def test_an_ignored_signal_stays_ignored(tmp_path: Path, longseq: Longseq) -> None:
    source = make_text(tmp_path / "a.txt")

    def work() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        add = CorpusWriter.add

        def hang_up(self: CorpusWriter, name: str, chunks: Any) -> bool:
            os.kill(os.getpid(), signal.SIGHUP)
            return add(self, name, chunks)

        CorpusWriter.add = hang_up  # type: ignore[method-assign]
        return main(["prepare-data", str(source), "--output", str(tmp_path / "x")])

    assert exit_code(in_a_child(work)) == 0
    assert check_corpus(str(tmp_path / "x")).tokens == 5


def test_a_signal_between_the_renames_waits_for_the_last(
    tmp_path: Path, longseq: Longseq, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_text(tmp_path / "a.txt")
    replace = os.replace

    def interrupted(old: Path, new: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        replace(old, new)

    monkeypatch.setattr(os, "replace", interrupted)
    assert longseq(source, "--output", tmp_path / "x").code == 128 + signal.SIGTERM
    assert files_in(tmp_path) == {"a.txt", "x.bin", "x.idx", "x.json"}
    assert check_corpus(str(tmp_path / "x")).tokens == 5


def test_a_limit_on_file_sizes_leaves_no_file(tmp_path: Path, longseq: Longseq) -> None:
    source = make_text(tmp_path / "source" / "a.txt", b"x" * 200_000)
    report = tmp_path / "source" / "report"

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with report.open("w") as sys.stderr:
            return main(["prepare-data", str(source), "--output", str(tmp_path / "x")])

    assert exit_code(in_a_child(work)) == 2
    assert f"--output {tmp_path}/x: File too large: the corpus needs" in report.read_text()
    assert files_in(tmp_path) == {"source"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("size", [56_000, 65_000, 2_000_000])
def test_a_full_disk_is_told_with_its_sizes_and_leaves_no_file(
    tmp_path: Path, longseq: Longseq, small_disk: Path, size: int
) -> None:
    # The disk is full with the index, the last buffer of tokens, or in the middle of them.
    source = make_text(tmp_path / "a.txt", b"x" * size)
    outcome = longseq(source, "--output", small_disk / "x")
    if size == 56_000:
        assert outcome.code == 0, "two bytes per token fit"
        return
    assert outcome.code == 2
    needed = {65_000: "130.0 kB", 2_000_000: "4.0 MB"}[size]
    assert f"--output {small_disk}/x: No space left on device" in outcome.err
    assert f"needs at least {needed} and {small_disk} has 131.1 kB free" in outcome.err
    assert files_in(small_disk) == set()


@pytest.mark.parametrize("documents", [10_000, 50_000])
def test_a_disk_full_with_the_index_or_a_buffer_leaves_no_file(
    tmp_path: Path, longseq: Longseq, small_disk: Path, documents: int
) -> None:
    # 4 bytes of tokens and 20 bytes of index for each.
    lines = b"".join(b'{"text": "%d"}\n' % (number % 10) for number in range(documents))
    source = make_text(tmp_path / "a.jsonl", lines)
    outcome = longseq(source, "--output", small_disk / "x")
    assert outcome.code == 2
    assert "No space left on device" in outcome.err
    assert files_in(small_disk) == set()


def test_progress_is_shown_on_a_terminal_and_nowhere_else(tmp_path: Path, longseq: Longseq) -> None:
    source = numbers(tmp_path / "source")
    ours, theirs = pty.openpty()

    def work() -> int:
        # A slow corpus: the bar is drawn some times a second.
        add = CorpusWriter.add

        def slow(self: CorpusWriter, name: str, chunks: Any) -> bool:
            time.sleep(0.01)
            return add(self, name, chunks)

        CorpusWriter.add = slow  # type: ignore[method-assign]
        os.environ["TERM"] = "xterm"
        return main(["prepare-data", str(source), "--output", str(tmp_path / "x")])

    child = in_a_child(work, terminal=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that the last writer is gone
        while select.select([ours], [], [], 30)[0]:
            shown += os.read(ours, 65536)
    os.close(ours)
    assert exit_code(child) == 0
    assert b"tokenising" in shown and b"documents   30" in shown
    outcome = longseq(source, "--output", tmp_path / "y")
    assert outcome.err == "" and "tokenising" not in outcome.out


def test_a_plan_needs_no_megatron(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_longseq.cli import prepare_data; "
        "from megatron_longseq.data import prepare, corpus; prepare.plan_corpus([], sys.argv[1]); "
        "assert not {'torch', 'megatron', 'rich'} & set(sys.modules)"
    )
    root = str(Path(prepare.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], cwd=root, check=True)


def test_a_write_that_is_refused_for_another_reason_is_told(
    tmp_path: Path, byte_tokenizer: ByteTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    source = make_text(tmp_path / "source" / "a.txt")
    with pytest.raises(UserError, match=r"--output .*cannot write: Input/output error"):
        write_corpus(plan_corpus([str(source)], str(tmp_path / "x")), byte_tokenizer)
    assert files_in(tmp_path) == {"source"}
