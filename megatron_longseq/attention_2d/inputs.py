"""What 2D attention can work with; everything else stops with the rule and what would work."""

from math import isfinite

import torch
from torch import Tensor

from ..attention_inputs import check_query_key_value
from ..document_boundaries import describe_boundaries
from ..errors import UserError, divisors, nearest_values
from ..softmax.block_kernels import SUPPORTED_DTYPES
from ..softmax.mask_plan import Mask

AXES = ("tokens", "micro-batch", "heads", "width")


def describe_inputs(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None = None
) -> dict[str, object]:
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
    fields["sink"] = None if sink is None else f"{list(sink.shape)} {sink.dtype}"
    if sink is not None:
        fields["sink requires a gradient"] = torch.is_grad_enabled() and sink.requires_grad
    return fields


def describe_mask(mask: Mask | UserError) -> dict[str, object]:
    """As :func:`describe_inputs`, of what sees what; nothing of a mask that cannot be."""
    if isinstance(mask, UserError):
        return {}
    documents = mask.documents
    return {
        "causal": mask.causal,
        "window": mask.window,
        "prefix": mask.prefix,
        "documents": describe_boundaries(documents and documents.boundaries),
        "lengths of documents": describe_boundaries(documents and documents.lengths),
        "zigzag": "by document" if documents and documents.zigzag else "of the row",
    }


def check_sink(sink: Tensor | None, query: Tensor) -> None:
    """Checks the sink.

    Raises:
        UserError: it is not one floating-point number per query head, on the query's device.
    """
    if sink is None:
        return
    heads = query.shape[2]
    if tuple(sink.shape) != (heads,) or not sink.is_floating_point():
        raise UserError(
            f"sink of shape {tuple(sink.shape)} and {sink.dtype}: expected one floating-point "
            f"number per query head, [{heads}]"
        )
    if sink.device != query.device:
        raise UserError(f"sink is on {sink.device}, query on {query.device}; they must agree")


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
    if heads < head_parallel:
        raise UserError(
            f"a head group of {head_parallel} ranks for {heads} query heads: each rank needs one; "
            f"at most {heads}"
        )
