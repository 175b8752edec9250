"""A sink: one logit per query head that takes part in the softmax and has no value.

It enters once, after all key blocks, by log-sum-exp:

    L' = log(exp(L) + exp(a))        O' = exp(L - L') O
    da = - sum over rows of exp(a - L') Delta        Delta = rowsum(dO O')

The backward of every block takes O' and L' and needs nothing else. A sink of 0 is the softmax whose
denominator has a one added ("off by one").
"""

import torch
from torch import Tensor


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with the sink.

    Args:
        out: ``[rows, b, a, dv]``, fp32 or fp64; changed in place.
        lse: ``[b, a, rows]``, same dtype; -inf in rows that see no key, whose output stays 0.
        sink: ``[a]``, finite.
    """
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(-1))
    out *= (lse - with_sink).exp().permute(2, 0, 1).unsqueeze(-1)
    return out, with_sink


def sink_gradient(out_gradient: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The part of these rows in the gradient of the sink: ``[a]``, in the dtype of ``lse``.

    Args:
        out_gradient, out: ``[rows, b, a, dv]``.
        lse: ``[b, a, rows]``; both as :func:`add_sink` returns them.
    """
    delta = (out_gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weight = (sink.to(lse.dtype).unsqueeze(-1) - lse).exp()
    return -torch.einsum("bar,rba->a", weight, delta)
