"""The block kernel on the flash-attn package (FlashAttention-2, version 2.7 or newer), on CUDA."""

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..token_layout import Band

MINIMUM_VERSION = (2, 7)


class FlashKernel:
    """The flash-attn package; see :mod:`.block_kernels` for the contract.

    Widths are padded to a multiple of 8 and to one another. Its backward adds up dQ in no fixed
    order unless told to; it is told to, so that reruns agree bit for bit.
    """

    name = "flash"
    skips_outside_bands = True

    def unusable(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this kernel cannot work on such tensors here; ``None`` if it can."""
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash-attn is not installed"
        try:
            installed = version("flash-attn")
        except PackageNotFoundError:
            return "the package flash-attn has no version"
        if tuple(int(part) for part in installed.split(".")[:2]) < MINIMUM_VERSION:
            return f"flash-attn {installed} is older than 2.7"
        if device.type != "cuda":
            return f"flash-attn works on CUDA tensors, not on {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"flash-attn works in 16 bits, not in {dtype}"
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
        """Attention of one block: out in the input dtype, lse in fp32."""
        _refuse_mask(visible)
        width = value.shape[3]
        q, k, v = _prepare(query, key, value)
        out, lse, *_ = _interface()._flash_attn_forward(
            q, k, v, return_softmax=False, **_options(causal, scale, band, query, key)
        )
        return out.transpose(0, 1)[..., :width], lse

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
        _refuse_mask(visible)
        width, value_width = query.shape[3], value.shape[3]
        q, k, v, dout, out = _prepare(query, key, value, out_gradient, out)
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        _interface()._flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            dq,
            dk,
            dv,
            deterministic=True,
            **_options(causal, scale, band, query, key),
        )
        dq, dk, dv = (gradient.transpose(0, 1) for gradient in (dq, dk, dv))
        return dq[..., :width], dk[..., :width], dv[..., :value_width]


def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _options(
    causal: bool, scale: float, band: Band | None, query: Tensor, key: Tensor
) -> dict[str, Any]:
    left, right = _window(band, query.shape[0], key.shape[0])
    return {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _window(band: Band | None, rows: int, keys: int) -> tuple[int, int]:
    """A band as flash-attention counts it: from the diagonal that ends in the last row and key.

    It takes a negative bound for none. The plan cuts bands so that they have none: every row sees a
    key, the last one too, and every key is seen, the first one too.
    """
    low, high = band if band is not None else (None, None)
    shift = keys - rows
    left = -1 if low is None else shift - low
    right = -1 if high is None else high - shift
    if (low is not None and left < 0) or (high is not None and right < 0):
        raise ValueError(f"band {band} of {rows} query and {keys} key rows ends before its rows")
    return left, right


def _refuse_mask(visible: Tensor | None) -> None:
    if visible is not None:
        raise NotImplementedError("flash-attn takes no arbitrary mask; use aten or reference")


def _prepare(*tensors: Tensor) -> list[Tensor]:
    """``[rows, b, heads, d]`` as ``[b, rows, heads, width]`` with one width, a multiple of 8."""
    width = -(-max(tensor.shape[3] for tensor in tensors) // 8) * 8
    prepared = []
    for tensor in tensors:
        if tensor.shape[3] < width:
            tensor = pad(tensor, (0, width - tensor.shape[3]))
        elif tensor.stride(3) != 1:
            tensor = tensor.contiguous()
        prepared.append(tensor.transpose(0, 1))
    return prepared
