"""The reference block kernel: plain torch, any dtype, any mask, on any device.

It holds the scores of a block, ``b * a * rows * keys`` numbers in fp32 (fp64 for fp64), and is
written to be read: forward and backward are the formulas.
"""

import torch
from torch import Tensor

from ..token_layout import Band
from .mask_plan import band_mask


class ReferenceKernel:
    """Softmax attention of a block by its formulas; the contract is in :mod:`.block_kernels`."""

    name = "reference"
    skips_outside_bands = False

    def unusable(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this kernel cannot work on such tensors here; it always can."""
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        scale: float,
        visible: Tensor | None = None,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``out = softmax(scale * Q K^T) V`` and its log-sum-exp, in fp32 (fp64 for fp64)."""
        q, k, v = _wide(query, key, value)
        scores = self._scored(_masked_scores(q, k, causal, scale, visible, band))
        lse = scores.logsumexp(-1)
        weights = self._weighted(_exp_of_difference(scores, lse))
        out = torch.einsum("bgrqk,kbgd->qbgrd", weights, v)
        return out.flatten(2, 3), lse.flatten(1, 2)

    def backward(
        self,
        out_gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        visible: Tensor | None = None,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``P = exp(scale Q K^T - lse)``, ``dS = P (dO V^T - Delta)``, and the three products."""
        q, k, v, dout = _wide(query, key, value, out_gradient)
        groups = key.shape[2]
        lse = lse.unflatten(1, (groups, -1))
        delta = (dout * out.to(dout.dtype)).sum(-1).permute(1, 2, 0).unflatten(1, (groups, -1))
        scores = self._scored(_masked_scores(q, k, causal, scale, visible, band))
        p = _exp_of_difference(scores, lse)
        dout = dout.unflatten(2, (groups, -1))
        dv = torch.einsum("bgrqk,qbgrd->kbgd", self._weighted(p), dout)
        dp = self._weighted(torch.einsum("qbgrd,kbgd->bgrqk", dout, v))
        ds = p * (dp - delta.unsqueeze(-1)) * scale
        dq = torch.einsum("bgrqk,kbgd->qbgrd", ds, k).flatten(2, 3)
        dk = torch.einsum("bgrqk,qbgrd->kbgd", ds, q.unflatten(2, (groups, -1)))
        return dq, dk, dv

    def _scored(self, scores: Tensor) -> Tensor:
        """What a kernel of other scores makes of them: ``[b, g, a / g, rows, keys]``."""
        return scores

    def _weighted(self, weights: Tensor) -> Tensor:
        """What a kernel makes of the softmax of a block, and of its gradient; linear."""
        return weights


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in fp32, fp64 ones as they are."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _masked_scores(
    query: Tensor,
    key: Tensor,
    causal: bool,
    scale: float,
    visible: Tensor | None,
    band: Band | None,
) -> Tensor:
    """Scaled scores ``[b, g, a / g, rows, keys]``, -inf where a query does not see a key."""
    q = query.unflatten(2, (key.shape[2], -1))
    scores = torch.einsum("qbgrd,kbgd->bgrqk", q, key) * scale
    if causal:
        band = (None, 0)
    if band is not None:
        visible = band_mask(query.shape[0], key.shape[0], band, scores.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores


def _exp_of_difference(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(scores - lse)``; 0 in rows that see no key, whose lse is -inf."""
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return (scores - lse.unsqueeze(-1)).exp()
