"""What every kind of attention asks of query, key and value, whatever it does with them."""

from collections.abc import Collection

import torch
from torch import Tensor

from .errors import UserError


def check_query_key_value(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rows: tuple[str, str],
    dtypes: Collection[torch.dtype],
    operator: str,
) -> None:
    """Checks shapes, dtypes and devices as far as they are the same for all.

    Args:
        query, key, value: four dimensions each: ``rows``, heads, width.
        rows: what the first two dimensions are called; query and key have the same.
        dtypes: what the operator works in.
        operator: its name, in messages.

    Raises:
        UserError: naming the tensor, what it is and the rule.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise UserError(
                f"{name} of shape {tuple(tensor.shape)}: expected [{', '.join(rows)}, heads, "
                "width], none of them 0"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise UserError(
                f"{name} is {tensor.dtype} on {tensor.device}, query is {query.dtype} on "
                f"{query.device}; they must agree"
            )
    if query.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise UserError(f"query is {query.dtype}; {operator} works in {names}")
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise UserError(
            f"query of shape {tuple(query.shape)} and key of shape {tuple(key.shape)} must have "
            f"the same {rows[0]}, {rows[1]} and width"
        )
