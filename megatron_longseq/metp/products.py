"""What the rings of METP share: sums of matrix products, and where a finished weight gradient goes.

Sums over ring steps are kept in fp32 (fp64 for fp64): a 16-bit sum would be rounded once per step
and lose accuracy as the ring grows.
"""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def without_autocast[Method: Callable[..., Any]](method: Method) -> Method:
    """Wraps forward or backward of an autograd function, whose second argument is a tensor.

    Backward recomputes what forward has computed: both in the dtypes of the inputs, whatever
    autocast is switched on where they are called. And sums in fp32 must not become 16-bit ones.
    """

    @functools.wraps(method)
    def wrapped(ctx: Any, tensor: Tensor, *others: Any) -> Any:
        with torch.autocast(tensor.device.type, enabled=False):
            return method(ctx, tensor, *others)

    return cast(Method, wrapped)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """``total += left @ right``, or ``total = left @ right`` if ``first``.

    Args:
        total: ``[n, m]``, fp32 or fp64.
        left, right: ``[n, k]`` and ``[k, m]``; if they are narrower, the product is rounded once.
        first: the content of ``total`` is not read.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0.0 if first else 1.0)
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right


def row_tiles(rows: int, tiles: int) -> list[slice]:
    """Cuts ``rows`` into ``tiles`` slices of nearly equal length, none of them empty."""
    bounds = [rows * i // tiles for i in range(tiles + 1)]
    return [slice(a, b) for a, b in pairwise(bounds) if b > a]


def returned_gradient(weight: Tensor, home: Tensor, *, fused: bool) -> Tensor | None:
    """What an autograd function returns as the gradient of ``weight``.

    Args:
        weight: the parameter.
        home: its finished gradient, in the dtype it has added up in.
        fused: Megatron's ``gradient_accumulation_fusion``: the gradient is added to
            ``weight.main_grad`` here, and a stand-in of its shape is returned, whose arrival tells
            Megatron's DDP that the gradient is ready.
    """
    if not fused or not hasattr(weight, "main_grad"):
        return home.to(weight.dtype)
    weight.main_grad.add_(home)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
