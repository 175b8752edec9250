"""Decoding from a state: one step of the recurrence per token, at a cost no context makes longer.

    out, state = linear_attention(q, k, v, output_final_state=True, group=group)    # the prompt
    while ...:
        out, state = decode(q, k, v, state)                                         # a token

The prompt may be spread over a group: its final state is on every rank afterwards, so each can go
on by itself. As plain differentiable torch, :func:`decode` is also linear attention by definition.
"""

import torch
from torch import Tensor

from ..token_layout import SegmentChain
from .inputs import Inputs
from .normalizer import divide_by_last, with_ones


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float = 1.0,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """The next tokens, one after the other, from the state before them. Not collective.

    Args:
        q: ``[b, n, hq, d]``, usually of ``n = 1`` token.
        k: ``[b, n, hk, d]``.
        v: ``[b, n, hv, e]``.
        state: ``[b, h, d, e]`` (``e + 1`` if ``normalize``), as
            :func:`~megatron_longseq.lasp.linear_attention` returns it; ``None`` for zeros.
        log_decay: ``None``, ``[h]``, ``[b, n, h]`` or ``[b, n, h, d]``.
        beta: ``[b, n, h]``, or ``None``.
        scale, normalize: as for the prompt.

    Returns:
        The output ``[b, n, max(hq, hv), e]`` in the dtype of q, and the state after the last token,
        ``[b, h, d, e]`` in fp32 (fp64 for fp64). The state that was given is not changed.

    Raises:
        UserError: the inputs do not fit.
    """
    inputs = Inputs(q, k, v, log_decay, beta, state, scale=scale, normalize=normalize)
    inputs.check(SegmentChain(1, "contiguous"), values=False)
    # Sums are in fp32: autocast must not turn their products into 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        return _decode(inputs)


def _decode(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, v = inputs.query, inputs.value
    log_decay, beta, state = inputs.log_decay, inputs.beta, inputs.initial_state
    dtype, heads = inputs.sum_dtype, max(inputs.key.shape[2], v.shape[2])
    if inputs.normalize:
        v = with_ones(v)
    shape = q.shape[0], heads, q.shape[3], v.shape[3]
    state = q.new_zeros(shape, dtype=dtype) if state is None else state.to(dtype)
    query, key, value = (
        tensor.to(dtype).repeat_interleave(max(1, heads // tensor.shape[2]), 2)
        for tensor in (q, inputs.key, v)
    )
    outs = []
    for token in range(q.shape[1]):
        if log_decay is not None:
            decay = (log_decay if log_decay.dim() == 1 else log_decay[:, token]).to(dtype).exp()
            # [h], [b, h] or [b, h, d], for a state of [b, h, d, e].
            state = (decay[..., None] if decay.dim() == 3 else decay[..., None, None]) * state
        row, written = key[:, token, :, None], value[:, token, :, None]
        if beta is not None:
            written = beta[:, token, :, None, None].to(dtype) * (written - row @ state)
        state = state + row.mT * written
        queries = query[:, token].unflatten(1, (heads, -1))  # those that read one state
        outs.append((queries @ state).flatten(1, 2))
    out = inputs.scale * torch.stack(outs, 1)
    return divide_by_last(out, q.dtype) if inputs.normalize else out.to(q.dtype), state
