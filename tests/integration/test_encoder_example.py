"""The encoder example: labels are token classes, and two ranks train as one does."""

import importlib
import multiprocessing
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "scripts")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("label_text")


def test_a_byte_has_the_class_of_the_token_that_it_belongs_to(example):
    source = 'def f(ä):  # é\n    """Zwölf\n    if"""\n    return f"ü{ä + 1.5}" if ä else ß\n'
    expected = {
        "comment": ["# é"],
        "string": ['"""Zwölf\n    if"""', 'f"ü', '"'],
        "keyword": ["def", "return", "if", "else"],
        "name": ["f", "ä", "ä", "ä", "ß"],
        "number": ["1.5"],
        "operator": ["(", "):", "{", "+", "}"],
    }
    found: dict[str, list[str]] = {}
    raw, classes = source.encode(), example.byte_classes(source)
    assert len(raw) == len(classes)
    start = 0
    for end in range(1, len(raw) + 1):
        if end == len(raw) or classes[end] != classes[start]:
            name = example.CLASSES[classes[start]]
            if name != "other":
                found.setdefault(name, []).append(raw[start:end].decode())
            start = end
    assert found == expected


@pytest.mark.thorough
def test_two_ranks_learn_to_label_as_one_does_and_better_than_by_majority(example, megatron_ranks):
    paths = sorted(Path(multiprocessing.__file__).parent.glob("*.py"))
    text, classes = example.labelled_text(paths, 16 * 1024)
    one, two = (
        example.train(megatron_ranks, text, classes, ranks=ranks, seq_length=512, batch=2, steps=16)
        for ranks in (1, 2)
    )
    assert [step["loss"] for step in two] == pytest.approx([s["loss"] for s in one], rel=1e-4)
    accuracy = sum(step["accuracy"] for step in two[-4:]) / 4
    # On the same 4 x 2 x 512 bytes.
    assert accuracy > example.majority(classes[12 * 1024 : 16 * 1024])[1] + 0.05
