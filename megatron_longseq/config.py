"""Every option of this package, once: its flag, its meaning and its checks.

A field named ``longseq_x`` is the flag ``--longseq-x``. Megatron fills the fields of a config class
from arguments of the same name, so that :class:`LongSeqTransformerConfig` reaches every module.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import TransformerConfig

from .errors import UserError


def _option(default: Any, help_text: str, **argparse_options: Any) -> Any:
    metadata = {"help": help_text, **argparse_options}
    return dataclasses.field(default=default, metadata={"longseq": metadata})


@dataclass
class LongSeqTransformerConfig(TransformerConfig):
    """Megatron's transformer config with this package's options."""

    longseq_device: str = _option(
        "auto",
        "Where to run: a GPU if there is one, else the CPU over gloo (auto); or one of them, or "
        "an error.",
        choices=("auto", "cpu", "cuda"),
    )
    longseq_measure: str | None = _option(
        None,
        "Write one JSON line per step and rank to this directory: loss, tokens, seconds, peak "
        "bytes of live tensors, bytes and messages sent by group.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options({field.name: getattr(self, field.name) for field in options()})


def options() -> list[dataclasses.Field]:
    """The fields of :class:`LongSeqTransformerConfig` that are this package's own."""
    return [f for f in dataclasses.fields(LongSeqTransformerConfig) if "longseq" in f.metadata]


def flag_of(name: str) -> str:
    """The command-line flag of an argument name: ``num_layers`` -> ``--num-layers``."""
    return "--" + name.replace("_", "-")


def check_options(values: dict[str, Any]) -> None:
    """Checks each option by itself; raises :class:`UserError` naming flag, value and rule."""
    for field in options():
        choices = field.metadata["longseq"].get("choices")
        value = values[field.name]
        if choices is not None and value not in choices:
            raise UserError(
                f"{flag_of(field.name)} {value}: must be one of {', '.join(map(str, choices))}"
            )
