"""What everything is compared with: attention by its definition, in fp64, with autograd."""

import torch
from torch import Tensor


def random_tensors(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device, seed: int
) -> list[Tensor]:
    """Normal numbers, the same on every device: drawn on the CPU, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        for shape in shapes
    ]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``[rows, b, heads, d]`` tensors in fp64; a row that sees no key: 0 and -inf."""
    q, k, v = (tensor.double() for tensor in (query, key, value))
    copies = q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(copies, 2) for tensor in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.einsum("bhqk,kbhd->qbhd", (scores - finite.unsqueeze(-1)).exp(), v), lse


def dense_with_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out_gradient: Tensor,
    visible: Tensor | None,
    scale: float,
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of dense attention in fp64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (query, key, value))
    out, lse = dense_attention(q, k, v, visible, scale)
    gradients = torch.autograd.grad(out, (q, k, v), out_gradient.double())
    return {"out": out.detach(), "lse": lse.detach()} | dict(
        zip(("dq", "dk", "dv"), gradients, strict=True)
    )


def lower_triangle(rows: int, keys: int, device: torch.device, *, bottom_right: bool) -> Tensor:
    """Which key a query row sees under a causal mask of unequal lengths, by either convention."""
    ones = torch.ones(rows, keys, dtype=torch.bool, device=device)
    return ones.tril(keys - rows if bottom_right else 0)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; infinities must be in the same places."""
    actual = actual.double()
    infinite = expected.isinf()
    if not torch.equal(actual.isinf(), infinite) or bool(actual.isnan().any()):
        return float("inf")
    if bool((actual[infinite] != expected[infinite]).any()):
        return float("inf")
    difference = (actual[~infinite] - expected[~infinite]).abs()
    if difference.numel() == 0:
        return 0.0
    return (difference.max() / expected[~infinite].abs().max().clamp_min(1e-30)).item()
