"""The denominator of linear attention: the same recurrence for one more value column, of ones.

The last column of the output is then ``q_i . sum_j decayed k_j``, by which the others are divided.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Added to the denominator, which is 0 where a token's query and keys have no feature in common.
EPSILON = 1e-6


def with_ones(value: Tensor) -> Tensor:
    """``[..., e]`` to ``[..., e + 1]``, the last column 1."""
    return torch.cat((value, value.new_ones(()).expand(*value.shape[:-1], 1)), -1)


def divide_by_last(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., e + 1]`` to ``[..., e]``: divided by the last column plus EPSILON, in ``dtype``."""
    return _DivideByLast.apply(out, dtype)


class _DivideByLast(torch.autograd.Function):
    """Keeps the quotient, which the caller keeps as well, and the denominator."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, dtype: torch.dtype) -> Tensor:
        denominator = out[..., -1:] + EPSILON
        quotient = (out[..., :-1] / denominator).to(dtype)
        ctx.save_for_backward(quotient, denominator)
        return quotient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        quotient, denominator = ctx.saved_tensors
        numerator = gradient.to(denominator.dtype) / denominator
        last = -(numerator * quotient).sum(-1, keepdim=True)
        return torch.cat((numerator, last), -1), None
