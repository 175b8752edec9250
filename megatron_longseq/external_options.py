"""Options from a file, where no command line of ours is parsed.

A trainer that takes a layer spec by name (``--spec megatron_longseq.layer_specs
longseq_layer_spec``) calls it with Megatron's plain config. The options then come from the YAML
file named by ``$LONGSEQ_CONFIG``, whose keys are this package's flags without the dashes:

.. code-block:: yaml

    longseq-context-parallel: 2d
    longseq-head-parallel-size: 2

They become attributes of the transformer config, where every module looks for them.
"""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import yaml

from . import __version__, compat
from .config import (
    LongSeqTransformerConfig,
    check_methods,
    check_options,
    flag_of,
    options,
)
from .errors import NodeError, UserError
from .lasp.requirements import check_own_batches
from .run_config import command_line

VARIABLE = "LONGSEQ_CONFIG"

# Options of a run, not of its layers: by the time a layer spec is asked they come too late.
_TOO_LATE = {
    "longseq_device": "Megatron has been imported; start the trainer as "
    "torchrun .. -m megatron_longseq.hook SCRIPT --spec ..",
    "longseq_zero": "the trainer has read its own flags; give it Megatron's, as in docs/flags.md",
    "longseq_zero_instances": "the trainer has read its own flags; give it Megatron's",
    "longseq_placement": "ranks have been numbered; use the two lines of megatron_longseq.hook, or "
    "-m megatron_longseq.pretrain_gpt",
    "longseq_pad_sequence": "the trainer makes its batches itself; use "
    "-m megatron_longseq.pretrain_gpt",
    "longseq_measure": "the trainer's steps are its own and are not recorded; use "
    "-m megatron_longseq.pretrain_gpt",
}


def prepare_model_config(model_config: Any) -> Any:
    """Returns the transformer config with this package's options, for a layer spec.

    With a config class of ours that is the config as it is. Else :func:`options_for` completes it,
    and the start-up lines are added to the model's ``pre_wrap_hooks``: once, however many virtual
    pipeline chunks ask.

    Args:
        model_config: Megatron's ``GPTModelConfig``.

    Raises:
        UserError: see :func:`options_for`; or part of the model is out of a layer spec's reach.
    """
    transformer = model_config.transformer
    if isinstance(transformer, LongSeqTransformerConfig):
        return transformer
    config = options_for(transformer)
    if config.longseq_context_parallel == "2d" and config.mtp_num_layers is not None:
        raise UserError(
            f"--mtp-num-layers {config.mtp_num_layers}: the trainer makes these layers itself and "
            f"a layer spec does not reach them, so that longseq-context-parallel 2d in {VARIABLE} "
            "would not hold there; use the two lines of megatron_longseq.hook, or "
            "-m megatron_longseq.pretrain_gpt"
        )
    report = StartupLines(os.environ[VARIABLE])
    if report not in model_config.pre_wrap_hooks:
        model_config.pre_wrap_hooks.append(report)
    return config


def options_for(transformer_config: Any) -> Any:
    """Returns a transformer config that has this package's options.

    Args:
        transformer_config: Megatron's. It is completed in place, from the file named by
            ``$LONGSEQ_CONFIG``, and returned; one that has the options is returned as it is.

    Raises:
        UserError: no file is named, or an option in it is unknown or cannot work with this config.
        NodeError: the file cannot be read.
    """
    if all(hasattr(transformer_config, field.name) for field in options()):
        return transformer_config
    path = os.environ.get(VARIABLE)
    if not path:
        raise UserError(
            f"--spec megatron_longseq.layer_specs longseq_layer_spec: the config is a plain "
            f"{type(transformer_config).__name__}, without --longseq-.. options; name a YAML file "
            f"with them in the environment variable {VARIABLE} (an empty file takes the defaults), "
            "or start -m megatron_longseq.pretrain_gpt"
        )
    values = read_options(path)
    for name, value in values.items():
        setattr(transformer_config, name, value)
    check_methods(transformer_config)
    check_own_batches(transformer_config, "the trainer")
    _check_levels(transformer_config)
    return transformer_config


def read_options(path: str | Path) -> dict[str, Any]:
    """Reads a file of options; returns the value of every option, defaults included.

    Raises:
        UserError: a key is unknown, or a value cannot work; names file, key and remedy.
        NodeError: the file cannot be read.
    """
    source = f"{VARIABLE}={path}"
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise NodeError(f"{source}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise NodeError(f"{source}: not YAML: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{source}: must be a mapping of options, such as {_EXAMPLE}")
    for key in content:
        reason = _TOO_LATE.get(key.replace("-", "_"))
        if reason is not None:
            raise UserError(f"{source}: {key} has no effect in this file: {reason}")
    parser = _Parser(source)
    values = vars(parser.parse_args(command_line(content, parser, source)))
    try:
        check_options(values)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return values


_EXAMPLE = "longseq-context-parallel: 2d"


class _Parser(argparse.ArgumentParser):
    """Knows this package's flags alone; what it refuses is a user's error."""

    def __init__(self, source: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.source = source
        for field in options():
            described = dict(field.metadata["longseq"])
            self.add_argument(flag_of(field.name), default=field.default, **described)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.source}: {message}")


def _check_levels(config: Any) -> None:
    """2D attention computes on groups that Megatron makes; here only the trainer can ask for them.

    Raises:
        UserError: it has not, or has asked for others.
    """
    context = config.context_parallel_size
    if config.longseq_context_parallel != "2d" or context == 1:
        return
    if config.longseq_tensor_parallel == "metp":
        return  # one ring over tensor- and context-parallel ranks, a group that Megatron always has
    flag = "--hierarchical-context-parallel-sizes"
    given = getattr(config, "hierarchical_context_parallel_sizes", None)
    wanted = config.longseq_head_parallel_size
    if given is None or len(given) != 2 or (wanted is not None and given[0] != wanted):
        head = wanted or 1
        shown = "none" if not given else " ".join(map(str, given))
        raise UserError(
            f"{flag} {shown}: longseq-context-parallel 2d in {VARIABLE} needs the two sizes "
            f"head-parallel and ring from the trainer; give it {flag} {head} {context // head}"
        )
    config.longseq_head_parallel_size = given[0]


@dataclasses.dataclass(frozen=True)
class StartupLines:
    """A ``pre_wrap_hook`` that prints where the options came from and what was built.

    Equal to another with the same source, so that it is told apart from what stands there already.
    """

    source: str

    def __call__(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        from .startup_report import describe_groups, describe_layers, describe_overlap

        groups = describe_groups()  # every rank takes part: it gathers
        # Of the trainer's micro-batches nothing is known here; one sequence is the least.
        length = getattr(models[0], "max_sequence_length", 0)
        groups += describe_overlap(models, length, 1)
        if dist.get_rank() == 0:
            config: Any = models[0].config
            shown = " ".join(
                f"{flag_of(field.name)} {getattr(config, field.name)}"
                for field in options()
                if field.name not in _TOO_LATE
            )
            version = compat.check_megatron_version()
            lines = [
                f"megatron_longseq {__version__} on megatron-core {version}",
                f"options from {self.source}: {shown}",
                *describe_layers(models),
                *groups,
            ]
            print("\n  ".join(lines), flush=True)
        return models
