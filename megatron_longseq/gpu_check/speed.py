"""Speed of a block kernel against PyTorch's own scaled_dot_product_attention."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..softmax.block_kernels import choose_kernel
from .dense import random_tensors
from .rows import NOTE, Row, Sizes


def measure_speed(name: str, dtypes: Sequence[str], device_name: str, sizes: Sizes) -> list[Row]:
    """Forward, and forward with backward, of one causal block; the median of several calls.

    PyTorch's attention is timed as its users call it, with autograd; it takes whichever of its
    kernels it prefers.
    """
    return [row for dtype in dtypes for row in _measure(name, dtype, device_name, sizes)]


def _measure(name: str, dtype_name: str, device_name: str, sizes: Sizes) -> list[Row]:
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    kernel = choose_kernel(name, dtype, device)
    tokens, heads, width = sizes.speed_tokens, sizes.speed_heads, sizes.width
    shape = (tokens, 1, heads, width)
    q, k, v, dout = random_tensors((shape,) * 4, dtype, device, seed=0)
    scale = float(width**-0.5)
    their_q, their_k, their_v, their_dout = (
        tensor.permute(1, 2, 0, 3).contiguous() for tensor in (q, k, v, dout)
    )

    def ours_forward() -> None:
        kernel.forward(q, k, v, causal=True, scale=scale)

    def ours_both() -> None:
        out, lse = kernel.forward(q, k, v, causal=True, scale=scale)
        kernel.backward(dout, q, k, v, out.to(dtype), lse, causal=True, scale=scale)

    def theirs_forward() -> None:
        scaled_dot_product_attention(their_q, their_k, their_v, is_causal=True, scale=scale)

    def theirs_both() -> None:
        leaves = [t.detach().requires_grad_() for t in (their_q, their_k, their_v)]
        out = scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], is_causal=True, scale=scale
        )
        torch.autograd.grad(out, leaves, their_dout)

    rows = []
    # Causal attention: two products of half the square forward, five backward.
    flops = 2 * 2 * tokens * tokens / 2 * heads * width
    for case, ours, reference, products in (
        ("forward", ours_forward, theirs_forward, 1.0),
        ("forward and backward", ours_both, theirs_both, 3.5),
    ):
        seconds = timed(ours, device, sizes.repeats)
        theirs_seconds = timed(reference, device, sizes.repeats)
        ratio = seconds / theirs_seconds
        rows.append(
            Row(
                f"{dtype_name}, {case}, {tokens} tokens, {heads} heads of {width}",
                NOTE,
                f"{seconds * 1e3:.3f} ms ({flops * products / seconds / 1e12:.3g} TFLOP/s), "
                f"{ratio:.2f} times PyTorch's {theirs_seconds * 1e3:.3f} ms",
                {"seconds": seconds, "pytorch_seconds": theirs_seconds, "ratio": ratio},
            )
        )
    return rows


def timed(function: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after two that do not count."""
    for _ in range(2):
        function()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def synchronize(device: torch.device) -> None:
    """Returns when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
