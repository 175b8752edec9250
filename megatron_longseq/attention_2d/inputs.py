"""What 2D attention can work with; everything else stops with the rule and what would work."""

from math import isfinite

import torch
from torch import Tensor

from ..attention_inputs import check_query_key_value
from ..errors import UserError, divisors, nearest_values
from ..softmax.block_kernels import SUPPORTED_DTYPES

AXES = ("tokens", "micro-batch", "heads", "width")


def describe_inputs(query: Tensor, key: Tensor, value: Tensor) -> dict[str, object]:
    """What must be equal on all ranks, by the name it has in an error message."""
    fields: dict[str, object] = {}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() == len(AXES):
            fields |= {
                f"{name} {axis}": size for axis, size in zip(AXES, tensor.shape, strict=True)
            }
        else:
            fields[f"{name} shape"] = tuple(tensor.shape)
        fields[f"{name} dtype"] = tensor.dtype
        fields[f"{name} requires a gradient"] = torch.is_grad_enabled() and tensor.requires_grad
    return fields


def check_inputs(
    query: Tensor, key: Tensor, value: Tensor, head_parallel: int, softmax_scale: float | None
) -> None:
    """Checks shapes, dtypes and the division of heads.

    Raises:
        UserError: naming the value, the rule and the nearest values that would work.
    """
    check_query_key_value(
        query,
        key,
        value,
        rows=("tokens", "micro-batch"),
        dtypes=SUPPORTED_DTYPES,
        operator="2D attention",
    )
    if key.shape[:3] != value.shape[:3]:
        raise UserError(
            f"key of shape {tuple(key.shape)} and value of shape {tuple(value.shape)} may differ "
            "in width only"
        )
    if softmax_scale is not None and not isfinite(softmax_scale):
        raise UserError(f"softmax_scale={softmax_scale} must be a finite number")
    _check_divisions(query, key, head_parallel)


def _check_divisions(query: Tensor, key: Tensor, head_parallel: int) -> None:
    tokens, heads, groups = query.shape[0], query.shape[2], key.shape[2]
    if tokens % 2:
        raise UserError(
            f"{tokens} tokens on each rank: the zigzag order gives a rank two pieces of equal "
            f"length, so it must be even; nearest: {[tokens - 1, tokens + 1]}"
        )
    if heads % groups:
        raise UserError(
            f"{groups} key/value heads do not divide {heads} query heads; nearest that do: "
            f"{nearest_values(groups, divisors(heads))}"
        )
    if heads % head_parallel:
        raise UserError(
            f"a head group of {head_parallel} ranks does not divide {heads} query heads; nearest "
            f"sizes that do: {nearest_values(head_parallel, divisors(heads))}"
        )
