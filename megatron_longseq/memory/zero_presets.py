"""Hybrid ZeRO by name: Megatron's own flags, set together.

Parameters are replicated over context-parallel ranks, so what is sharded is sharded over data- x
context-parallel ranks.

| preset | optimizer state | gradients | parameters | over |
|---|---|---|---|---|
| ``zero1`` | sharded | | | dp x cp |
| ``zero1-partial`` | sharded | | | dp x cp / instances |
| ``zero2`` | sharded | sharded | | dp x cp |
| ``zero3`` | sharded | sharded | sharded | dp x cp |
| ``hybrid`` | sharded over all | sharded | sharded | dp x cp / instances |
"""

from collections.abc import Mapping
from typing import Any

from ..errors import UserError, divisors, nearest_values

FLAG = "--longseq-zero"
INSTANCES_FLAG = "--longseq-zero-instances"

_DISTRIBUTED = {"use_distributed_optimizer": True}
_SHARDED = {
    **_DISTRIBUTED,
    "use_megatron_fsdp": True,
    # Its gradients are computed in the parameters' own memory, of which there is none here.
    "gradient_accumulation_fusion": False,
    "ckpt_format": "fsdp_dtensor",
}
# Megatron's arguments by preset. Where a value depends on the run it is filled in below.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "zero1": _DISTRIBUTED,
    "zero1-partial": {**_DISTRIBUTED, "num_distributed_optimizer_instances": None},
    "zero2": {**_SHARDED, "data_parallel_sharding_strategy": "optim_grads"},
    "zero3": {**_SHARDED, "data_parallel_sharding_strategy": "optim_grads_params"},
    "hybrid": {
        **_SHARDED,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "num_distributed_optimizer_instances": None,
        "outer_dp_sharding_strategy": "optim",
    },
}
NAMES = tuple(PRESETS)
WITH_INSTANCES = ("zero1-partial", "hybrid")

# Flags whose names are not those of their arguments.
_FLAGS = {
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "gradient_reduce_div_fusion": "--no-gradient-reduce-div-fusion",
}


def preset_arguments(args: Any, *, over_gloo: bool) -> dict[str, Any]:
    """Megatron's arguments of the preset that ``args`` ask for.

    Args:
        args: Megatron's arguments, with ``longseq_zero`` and ``longseq_zero_instances``.
        over_gloo: whether ranks talk over gloo, which cannot scale while it sums.

    Raises:
        UserError: the preset does not fit, or Megatron cannot do it here.
    """
    name, instances = args.longseq_zero, args.longseq_zero_instances
    if name not in WITH_INSTANCES:
        if instances is not None:
            raise UserError(
                f"{INSTANCES_FLAG} {instances}: has no effect with {FLAG} {name}; use one of "
                f"{', '.join(WITH_INSTANCES)}, or leave it out"
            )
        chosen = dict(PRESETS[name])
    else:
        if over_gloo and name == "hybrid":
            raise UserError(
                f"{FLAG} hybrid: over gloo Megatron-FSDP in several instances does not reduce "
                "gradients across them (stock layers too): a run would train on wrong gradients; "
                "use zero3, or run on GPUs"
            )
        if instances is None or instances < 2:
            raise UserError(
                f"{FLAG} {name}: needs {INSTANCES_FLAG} N, in how many groups the data- x "
                "context-parallel ranks shard on their own; at least 2"
            )
        chosen = {**PRESETS[name], "num_distributed_optimizer_instances": instances}
    if over_gloo and "use_megatron_fsdp" in chosen:
        chosen["gradient_reduce_div_fusion"] = False
    return chosen


def check_instances(args: Any, replicas: int) -> None:
    """Checks that instances divide the ranks that shard.

    Args:
        replicas: data- x context-parallel ranks.

    Raises:
        UserError: they do not.
    """
    instances = args.longseq_zero_instances
    if args.longseq_zero in WITH_INSTANCES and replicas % instances:
        raise UserError(
            f"{INSTANCES_FLAG} {instances}: must divide the {replicas} data- x context-parallel "
            f"ranks; nearest: {nearest_values(instances, divisors(replicas))}"
        )


def check_given(preset: str, chosen: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses flags that say something else than the preset.

    Args:
        chosen: the preset's arguments.
        given: arguments the user gave.

    Raises:
        UserError: naming both.
    """
    for name, value in chosen.items():
        if name in given and given[name] != value:
            raise UserError(
                f"{flag_of(name)} {given[name]}: {FLAG} {preset} sets it to {value}; leave one of "
                "the two out"
            )


def flag_of(name: str) -> str:
    """The flag of a preset's argument."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def describe(chosen: Mapping[str, Any]) -> str:
    """The preset as Megatron's flags, for the start-up lines."""
    words = []
    for name, value in chosen.items():
        words.append(flag_of(name) if isinstance(value, bool) else f"{flag_of(name)} {value}")
    return " ".join(words)
