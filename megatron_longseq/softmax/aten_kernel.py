"""The block kernel on PyTorch's own flash and memory-efficient attention, on CPU and CUDA.

These are internal operators of PyTorch: the public function hides the log-sum-exp. What is called:

    CPU                 _scaled_dot_product_flash_attention_for_cpu          any supported dtype
    CUDA, 16-bit        _scaled_dot_product_flash_attention
    CUDA, fp32          _scaled_dot_product_efficient_attention

Traps this file keeps from its callers: the CPU kernel divides by zero (and ends the process) on an
empty block, wants keys and values of one width, writes 0 as the log-sum-exp of a row that sees
nothing, and returns NaN gradients for such a row unless it is told +inf; the CUDA kernels want
widths divisible by 8 or a log-sum-exp padded to 32 rows.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..token_layout import Band
from .mask_plan import band_mask

aten = torch.ops.aten


class AtenKernel:
    """PyTorch's attention operators; see :mod:`.block_kernels` for the contract."""

    name = "aten"
    skips_outside_bands = False

    def unusable(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this kernel cannot work on such tensors here; ``None`` if it can."""
        if device.type not in ("cpu", "cuda"):
            return f"PyTorch has no attention operator that returns the log-sum-exp on {device}"
        if device.type == "cuda" and dtype == torch.float64:
            return "PyTorch has no attention operator for fp64 on CUDA"
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
        """Attention of one block: out in the input dtype, lse in fp32 (fp64 for fp64)."""
        _check_not_empty(query, key)
        width = value.shape[3]
        mask = _matrix(visible, band, query, key)
        q, k, v = (_heads_first(tensor) for tensor in _equally_wide(query, key, value))
        if query.is_cuda:
            out, lse = _cuda_forward(q, k, v, causal, scale, mask)
        else:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=_additive(mask, query.dtype), scale=scale
            )
        if visible is not None:
            lse = lse.masked_fill(~visible.any(-1), -torch.inf)
        return out.permute(2, 0, 1, 3)[..., :width], lse

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
        """This block's terms of the gradients, in the input dtype."""
        _check_not_empty(query, key)
        width, value_width = query.shape[3], value.shape[3]
        mask = _matrix(visible, band, query, key)
        q, k, v, dout, out = (
            _heads_first(tensor) for tensor in _equally_wide(query, key, value, out_gradient, out)
        )
        if visible is not None:
            # exp(score - inf) = 0; with -inf the kernel's gradients are NaN.
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if query.is_cuda:
            gradients = _cuda_backward(dout, q, k, v, out, lse, causal, scale, mask)
        else:
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                0.0,
                causal,
                attn_mask=_additive(mask, query.dtype),
                scale=scale,
            )
        dq, dk, dv = (gradient.permute(2, 0, 1, 3) for gradient in gradients)
        return dq[..., :width], dk[..., :width], dv[..., :value_width]


def _check_not_empty(query: Tensor, key: Tensor) -> None:
    if query.numel() == 0 or key.numel() == 0:
        raise ValueError(
            f"a block kernel was given an empty block: query {tuple(query.shape)}, "
            f"key {tuple(key.shape)}"
        )


def _heads_first(tensor: Tensor) -> Tensor:
    """``[rows, b, heads, d]`` as ``[b, heads, rows, d]``: a view; kernels want d contiguous."""
    if tensor.stride(3) != 1:
        tensor = tensor.contiguous()
    return tensor.permute(1, 2, 0, 3)


def _equally_wide(query: Tensor, key: Tensor, *others: Tensor) -> list[Tensor]:
    """Pads with zeros to one width: zeros add nothing to a score, and padded outputs are cut."""
    tensors = [query, key, *others]
    width = max(tensor.shape[3] for tensor in tensors)
    if query.is_cuda and query.dtype != torch.float32:
        width = -(-width // 8) * 8
    return [
        tensor if tensor.shape[3] == width else pad(tensor, (0, width - tensor.shape[3]))
        for tensor in tensors
    ]


def _matrix(visible: Tensor | None, band: Band | None, query: Tensor, key: Tensor) -> Tensor | None:
    if band is None:
        return visible
    return band_mask(query.shape[0], key.shape[0], band, query.device)


def _additive(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -torch.inf)


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q.dtype != torch.float32 and visible is None:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse
    copies = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(copies, 1) for tensor in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _bias(visible, q, k), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _cuda_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    visible: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout the random state is not read; the operators still want one.
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)
    rows, keys = q.shape[2], k.shape[2]
    if q.dtype != torch.float32 and visible is None:
        return aten._scaled_dot_product_flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            rows,
            keys,
            0.0,
            causal,
            unused,
            unused,
            scale=scale,
        )
    groups, copies = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(copies, 1) for tensor in (k, v))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        _bias(visible, q, k),
        out,
        pad(lse, (0, -rows % 32), value=torch.inf),
        unused[0],
        unused[1],
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, *(g.unflatten(1, (groups, copies)).sum(2) for g in (dk, dv))


def _bias(visible: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The additive mask the efficient operator wants, its rows aligned to 16 bytes."""
    bias = _additive(visible, q.dtype)
    if bias is None:
        return None
    rows, keys = bias.shape
    aligned = pad(bias, (0, -keys % 8))[:, :keys]
    return aligned.expand(q.shape[0], q.shape[1], rows, keys)
