"""Inputs become documents of UTF-8 text, in a fixed order, and say where they are not text."""

import gzip
import json
import os
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longseq.data import documents
from megatron_longseq.data.documents import NotTextError, Survey, json_text, read_text
from megatron_longseq.data.standard_library import standard_library
from megatron_longseq.errors import UserError


def texts_of(*paths: Path, key: str = "text") -> tuple[list[tuple[str, bytes]], Counter[str]]:
    """Name and text of each document in ``paths``, and what was skipped."""
    survey = Survey()
    found = []
    for item in survey.inputs(list(paths)):
        for source in item.sources:
            for document in source.documents(key, survey.skipped):
                try:
                    found.append((document.name, b"".join(document.read())))
                except NotTextError as error:
                    survey.skipped[error.kind] += 1
    return found, survey.skipped


def test_a_folder_is_read_by_name_and_skips_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.py").write_text("two")
    (tmp_path / "b" / "1.c").write_text("one\n")
    (tmp_path / "a.txt").write_text("ä")
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n\n{"text": ""}\n{"text": "y"}')
    (tmp_path / "image").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin").write_bytes("ä".encode("latin-1"))
    (tmp_path / "nothing.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "same.txt").symlink_to(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "pipe")
    found, skipped = texts_of(tmp_path)
    assert [text for _, text in found] == ["ä".encode(), b"one\n", b"two", b"x", b"y"]
    assert [name for name, _ in found][-1] == f"{tmp_path}/c.jsonl:4"
    assert skipped == {
        "binary": 1,
        "not UTF-8": 1,
        "empty": 2,
        "hidden": 1,
        "broken link": 1,
        "repeated": 1,
        "not a file": 1,
    }


def test_loops_of_links_end_and_bring_in_nothing_from_above(tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("outside")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "text.txt").write_text("inside")
    (inner / "self").symlink_to(inner)
    (inner / "up").symlink_to(tmp_path)
    (inner / "me").symlink_to("me")
    found, skipped = texts_of(inner)
    assert [text for _, text in found] == [b"inside"]
    assert skipped == {"repeated": 2, "broken link": 1}


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_json_lines_give_a_document_per_line(tmp_path: Path, name: str) -> None:
    content = "\ufeff" + "\n".join(json.dumps({"id": n, "body": "é" * n}) for n in range(1, 4))
    packed = gzip.compress(content.encode()) if name.endswith("gz") else content.encode()
    (tmp_path / name).write_bytes(packed)
    found, _ = texts_of(tmp_path / name, key="body")
    assert found == [(f"{tmp_path / name}:{n}", ("é" * n).encode()) for n in range(1, 4)]


@settings(deadline=None)
@given(content=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_any_bytes_are_read_unchanged_or_told_to_be_no_text(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    try:
        expected: bytes | str = content.decode("utf-8", errors="strict").encode()
    except UnicodeDecodeError as error:
        expected = f"not UTF-8: {error.reason} at offset {error.start:,}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK_BYTES", 3)
        try:
            found: bytes | str = b"".join(read_text(path))
        except NotTextError as error:
            if error.kind in ("binary", "empty"):
                assert error.kind == ("binary" if b"\0" in content else "empty")
                return
            found = str(error)
    assert found == expected


def test_a_long_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes("määrä ".encode() * (4 << 20))
    tracemalloc.start()
    size = sum(len(chunk) for chunk in read_text(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == path.stat().st_size == 9 * (4 << 20)
    assert peak < size / 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not JSON: .* at column 13"),
        (b'["a"]', "a list, not an object"),
        (b'{"body": "a", "id": 1}', "no key 'text'; its keys: 'body', 'id'"),
        (b"{}", "no key 'text'; its keys: none"),
        (b'{"text": 3}', "'text' is a number, not a string"),
        (b'{"text": null}', "'text' is null, not a string"),
        (b'{"text": true}', "'text' is true or false, not a string"),
        (b'{"text": "\xff"}', "not UTF-8: .* at byte 11"),
        (rb'{"text": "\ud800"}', "half of a surrogate pair, at character 1"),
        (b"[" * 100_000, "can't be read"),
    ],
)
def test_a_bad_line_of_json_is_told_by_file_and_line(line: bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"^f.jsonl:7: .*{message}"):
        json_text(line, "text", "f.jsonl:7")


def test_the_standard_library_is_source_code_without_tests_and_installed_packages() -> None:
    library = standard_library()
    names = [source.name for source in library.sources]  # type: ignore[attr-defined]
    paths = [path for source in library.sources for path in source.paths]  # type: ignore[attr-defined]
    assert names == sorted(names)
    assert {"argparse.py", "asyncio", "email", "encodings", "json"} <= set(names)
    unwanted = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not any(unwanted & set(path.parts[-4:]) for path in paths)
    assert not any(path.name.startswith("_sysconfigdata") for path in paths)


def test_a_package_is_one_document_of_all_its_files(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "__init__.py").touch()
    (package / "z.py").write_text("z = 1")
    (package / "inner" / "a.py").write_text("a = 1\n")
    (package / "tests" / "t.py").write_text("t = 1\n")
    (tmp_path / "single.py").write_text("s = 1\n")
    (tmp_path / "_sysconfigdata_x.py").write_text("machine = 1\n")
    sources = standard_library(tmp_path).sources
    skipped: Counter[str] = Counter()
    texts = {
        document.name: b"".join(document.read())
        for source in sources
        for document in source.documents("", skipped)
    }
    assert texts == {"package": b"a = 1\nz = 1\n", "single.py": b"s = 1\n"}
    assert skipped == {"empty": 1}


def test_a_library_without_source_code_asks_for_an_input(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "archive.zip"):
        with pytest.raises(UserError, match=f"no INPUT.*{folder}.*name an INPUT"):
            standard_library(folder)
