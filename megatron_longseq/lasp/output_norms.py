"""The norms behind linear attention: per head, with weights, and over all heads, without.

Without a denominator a linear layer's output grows with the sequence; a norm takes that away.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..communication.collectives import Collectives
from ..norms import SequenceParallelNorm
from .presets import HIDDEN_NORM_EPS, wide


class HeadNorm(SequenceParallelNorm):
    """A norm over the width of each head, whose weights all heads share.

    Every tensor-parallel rank has other heads, so that gradients of the weights are to be summed
    over them: by Megatron under ``--sequence-parallel``, otherwise here.

    Args:
        width: of a head.
        tp_group: the tensor-parallel group.
    """

    def __init__(self, config: Any, width: int, tp_group: Any) -> None:
        super().__init__(config, width, eps=config.layernorm_epsilon)
        self.tp_group = tp_group
        self.sums_itself = tp_group.size() > 1 and not config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """``[.., width]`` to the same."""
        weight, bias = self.weight, self.bias
        if self.sums_itself:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
            if bias is not None:
                bias = copy_to_tensor_model_parallel_region(bias, group=self.tp_group)
        weight = (weight + 1 if self.zero_centered else weight).to(x.dtype)
        if self.is_rms:
            return torch.nn.functional.rms_norm(x, self.shape, weight, self.eps)
        return torch.nn.functional.layer_norm(x, self.shape, weight, bias.to(x.dtype), self.eps)


class _Sum(torch.autograd.Function):
    """A sum over ranks of which each goes on with its own part: its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return collectives.sum(x.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.collectives.sum(gradient.clone()), None


def hidden_norm(x: Tensor, width: int, collectives: Collectives) -> Tensor:
    """``x / rms(x)`` over all heads of all tensor-parallel ranks, computed in fp32 (fp64).

    Args:
        x: ``[b, n, heads of this rank, e]``.
        width: heads of all ranks times e.
        collectives: over the tensor-parallel group. A rank sends two numbers per token.
    """
    full = wide(x)
    squares = _Sum.apply(full.square().sum((2, 3)), collectives)
    return (full * torch.rsqrt(squares / width + HIDDEN_NORM_EPS)[..., None, None]).to(x.dtype)
