"""Runs as YAML: what the keys become, and what is refused by name."""

import argparse
from pathlib import Path

import pytest

from megatron_longseq.errors import UserError
from megatron_longseq.run_config import load_run


@pytest.fixture
def parser():
    """A few flags of the kinds Megatron has; the real parser is used by the tests of the CLI."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--split")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--no-overlap", action="store_false", dest="overlap")
    return parser


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def test_keys_become_flags_and_the_run_wins_over_its_model(parser, tmp_path):
    write(tmp_path, "small", "arguments: {num-layers: 2, sequence-parallel: true}")
    path = write(
        tmp_path,
        "run",
        "model: small\nprocesses: 2\n"
        "arguments: {num_layers: 4, split: '90,10,0', sizes: [1, 2], no-overlap: true}",
    )
    run = load_run(path, parser, ["--num-layers", "6"])
    assert run.processes == 2 and run.name == "run"
    assert run.argv == (
        "--sequence-parallel --num-layers 4 --split 90,10,0 --sizes 1 2 --no-overlap "
        "--num-layers 6".split()
    )
    assert parser.parse_args(run.argv).num_layers == 6


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("arguments: {num-layer: 2}", ["--num-layer:", "nearest: --num-layers"]),
        ("argument: {num-layers: 2}", ["unknown key argument", "arguments"]),
        ("processes: 0", ["processes", "greater than or equal to 1"]),
        ("processes: two", ["processes", "'two'"]),
        ("arguments: {sequence-parallel: 3}", ["--sequence-parallel is a switch"]),
        ("arguments: {sequence-parallel: {a: 1}}", ["arguments.sequence-parallel"]),
        ("arguments: {num-layers: true}", ["--num-layers takes a value, not true"]),
        ("arguments: {no-overlap: false}", ["--no-overlap is a switch"]),
        ("- a list", ["must be a mapping"]),
        ("a: [", ["not YAML"]),
        ("model: nowhere", ["nowhere: no such file"]),
    ],
)
def test_a_bad_file_is_refused_with_its_name(text, parts, parser, tmp_path):
    path = write(tmp_path, "run", text)
    with pytest.raises(UserError) as error:
        load_run(path, parser)
    for part in parts:
        assert part in str(error.value)
    if "nowhere" not in text:
        assert str(path) in str(error.value)


def test_a_switch_that_is_off_by_default_may_be_false(parser, tmp_path):
    path = write(tmp_path, "run", "arguments: {sequence-parallel: false, num-layers: 1}")
    assert load_run(path, parser).argv == ["--num-layers", "1"]


def test_a_missing_run_names_what_there_is(parser):
    with pytest.raises(UserError, match=r"nothing: no such file .*there are: .*demo"):
        load_run("nothing", parser)


def real_runs():
    from megatron_longseq.run_config import known_arguments

    parser = known_arguments()
    runs = {path.stem: load_run(path, parser) for path in Path("configs/runs").glob("*.yaml")}
    for run in runs.values():
        parser.parse_args(run.argv)
    return sorted(runs)


def test_every_run_that_is_shipped_is_valid(megatron_ranks):
    assert "demo" in megatron_ranks.run(real_runs, world_size=1)[0]
