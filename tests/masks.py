"""Dense masks of windows, prefixes and packed documents, and dense attention under them."""

from itertools import pairwise

import torch


def dense_mask(total, *, causal=True, window=None, prefix=0, boundaries=None, lengths=None):
    """Boolean ``[total, total]``, by the definition of each option.

    ``lengths``: real tokens of each document, which padding follows up to the next boundary.
    """
    boundaries = boundaries or [0, total]
    lengths = lengths or [high - low for low, high in pairwise(boundaries)]
    whole = torch.zeros(total, total, dtype=torch.bool)
    for start, length in zip(boundaries, lengths, strict=False):
        query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
        visible = query >= key if causal else torch.ones(length, length, dtype=torch.bool)
        if window is not None:
            visible = visible & (query - key <= window)
        if causal:
            visible = visible | (key < prefix)
        whole[start : start + length, start : start + length] = visible
    return whole


def masked_attention(query, key, value, visible, sink=None, scale=None):
    """(out, lse) of attention under a mask, differentiable; 0 and -inf in rows that see nothing."""
    copies = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(copies, 2) for tensor in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * (scale or query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat((scores, column), -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return torch.einsum("bhqk,kbhd->qbhd", weights[..., : len(key)], value), lse


def masked_with_gradients(query, key, value, out_gradient, visible, sink=None):
    """(out, dQ, dK, dV, and with a sink da) of dense attention under a mask."""
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    sink = None if sink is None else sink.clone().requires_grad_()
    out, _ = masked_attention(*leaves, visible, sink)
    out.backward(out_gradient)
    gradients = [leaf.grad for leaf in leaves]
    return [out.detach(), *gradients, *([] if sink is None else [sink.grad])]
