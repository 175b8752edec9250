"""A training run as YAML: which model, how many processes, which flags.

.. code-block:: yaml

    # configs/runs/NAME.yaml
    description: one line for people
    model: gpt-tiny           # configs/models/gpt-tiny.yaml, or a path
    processes: 2              # ranks on this machine
    arguments:                # any Megatron flag or --longseq-.., without the dashes
      tensor-model-parallel-size: 2
      sequence-parallel: true
      data-path: data/corpus

A model file has ``description`` and ``arguments`` only; the run's arguments win over its model's,
and flags given on the command line win over both. Keys are checked against Megatron's own parser:
an unknown one is refused with the nearest that exists.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import UserError

Value = bool | int | float | str | list[bool | int | float | str]

# Where a name that is no path is looked for, after the folder of the run itself.
CONFIG_FOLDERS = ("configs/runs", "configs/models")


class ModelFile(BaseModel):
    """What a file of ``configs/models`` may hold."""

    model_config = ConfigDict(extra="forbid", strict=True)

    description: str = ""
    arguments: dict[str, Value] = Field(default_factory=dict)


class RunFile(ModelFile):
    """What a file of ``configs/runs`` may hold."""

    model: str | None = None
    processes: int = Field(default=1, ge=1)


class Run(BaseModel):
    """A run ready to start: its ranks, and the command line each of them gets."""

    name: str
    description: str
    processes: int
    argv: list[str]


def load_run(path: str | Path, parser: argparse.ArgumentParser, extra: Sequence[str] = ()) -> Run:
    """Reads a run file and its model file, and turns them into a command line.

    Args:
        path: the file, or the name of one in ``configs/runs``.
        parser: knows every flag there is; see :func:`known_arguments`.
        extra: further flags; they win over the files.

    Raises:
        UserError: a file is missing or not what its schema says; names file, key and remedy.
    """
    run_path = _find(path)
    run = _read(run_path, RunFile)
    argv: list[str] = []
    if run.model is not None:
        model_path = _find(run.model, run_path.parent)
        argv += command_line(_read(model_path, ModelFile).arguments, parser, str(model_path))
    argv += command_line(run.arguments, parser, str(run_path))
    return Run(
        name=run_path.stem,
        description=run.description,
        processes=run.processes,
        argv=drop_overridden(argv, parser) + list(extra),
    )


def command_line(
    arguments: Mapping[str, Value], parser: argparse.ArgumentParser, source: str
) -> list[str]:
    """Turns a mapping of flags without dashes into command-line words.

    ``true`` gives the bare flag of a switch, a list several words. ``false`` for a switch that is
    off by default gives nothing.
    """
    actions = {text: action for action in parser._actions for text in action.option_strings}
    words: list[str] = []
    for key, value in arguments.items():
        flag = "--" + key.replace("_", "-")
        flag = flag if flag in actions else "--" + key
        if flag not in actions:
            from .arguments import unknown_flag_message

            raise UserError(f"{source}: {unknown_flag_message(flag, sorted(actions))}")
        words += _words(flag, value, actions[flag], source)
    return words


def _words(flag: str, value: Value, action: argparse.Action, source: str) -> list[str]:
    is_switch = action.nargs == 0
    if is_switch and value is True:
        return [flag]
    if is_switch and value is False and action.const is not False and not action.default:
        return []
    if is_switch:
        hint = "true" if value is not False else "true, or leave it out"
        raise UserError(f"{source}: {flag} is a switch and takes {hint}, not {value!r}")
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    if isinstance(value, bool):
        raise UserError(f"{source}: {flag} takes a value, not {str(value).lower()}")
    return [flag, str(value)]


def drop_overridden(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Drops a flag of the model that the run gives again, so that the line reads as it acts."""
    actions = {text: action for action in parser._actions for text in action.option_strings}
    groups: list[list[str]] = []
    for word in argv:
        if word in actions:
            groups.append([word])
        else:
            groups[-1].append(word)
    last = {actions[group[0]].dest: index for index, group in enumerate(groups)}
    kept = [group for i, group in enumerate(groups) if last[actions[group[0]].dest] == i]
    return [word for group in kept for word in group]


def known_arguments() -> argparse.ArgumentParser:
    """A parser with every flag: Megatron's and this package's. Imports Megatron."""
    from . import checkout, compat
    from .arguments import add_arguments, raise_instead_of_exiting

    parser = argparse.ArgumentParser(allow_abbrev=False)
    compat.add_megatron_arguments(parser)
    checkout.add_argument(parser)
    add_arguments(parser)
    raise_instead_of_exiting(parser)
    return parser


def _find(name: str | Path, beside: Path | None = None) -> Path:
    path = Path(name)
    candidates = [path]
    if path.suffix not in (".yaml", ".yml"):
        folders = [Path(folder) for folder in CONFIG_FOLDERS]
        if beside is not None:
            folders = [beside, beside.parent / "models", *folders]
        candidates += [folder / f"{path}.yaml" for folder in folders]
    elif beside is not None:
        candidates.append(beside / path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    there = sorted(p.stem for folder in CONFIG_FOLDERS for p in Path(folder).glob("*.yaml"))
    hint = f"; there are: {', '.join(there)}" if there else ""
    raise UserError(f"{name}: no such file (looked at {', '.join(map(str, candidates))}){hint}")


def _read(path: Path, schema: type[Any]) -> Any:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping with keys {', '.join(schema.model_fields)}")
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:2])
        if first["type"] == "extra_forbidden":
            problem = f"unknown key {where}; the keys are {', '.join(schema.model_fields)}"
        else:
            problem = f"{where}: {first['msg']}, not {first['input']!r}"
        raise UserError(f"{path}: {problem}") from error
