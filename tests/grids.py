"""What the tests of distributed attention share: grids of ranks, data, and dense attention."""

import torch
import torch.distributed as dist

from megatron_longseq.token_layout import ZigzagGrid

FACTORISATIONS = {
    ranks: [(hp, ranks // hp) for hp in range(1, ranks + 1) if ranks % hp == 0]
    for ranks in (1, 2, 3, 4, 6, 8)
}


def grid_groups(head_parallel, ring):
    """This rank's (head group, ring group); rank c * head_parallel + h is at place h of ring c."""
    grid, here = ZigzagGrid(head_parallel, ring), dist.get_rank()
    mine = []
    rows = [[grid.rank(c, h) for h in range(head_parallel)] for c in range(ring)]
    columns = [[grid.rank(c, h) for c in range(ring)] for h in range(head_parallel)]
    for lists in (rows, columns):
        groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
        mine.append(next(group for ranks, group in groups if here in ranks))
    return tuple(mine)


def random_sequence(tokens, batch, heads, groups, width, value_width, seed=0):
    """Whole-sequence fp64 (query, key, value, gradient of the output), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, width), (groups, width), (groups, value_width), (heads, value_width))
    return [
        torch.randn(tokens, batch, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]


def dense_attention(query, key, value, causal, scale):
    """(out, lse) of attention over the whole sequence, by its definition, differentiable."""
    copies = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(copies, 2) for tensor in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value), scores.logsumexp(-1)


def dense_with_gradients(query, key, value, out_gradient, causal=True, scale=None):
    """(out, dQ, dK, dV) of dense attention over the whole sequence."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out, _ = dense_attention(*leaves, causal, scale or query.shape[-1] ** -0.5)
    out.backward(out_gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def relative_error(actual, expected):
    """Largest difference over the largest expected value."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def refused(function, *args, **kwargs):
    """The text of the error a call raises, with its type; None if it raises none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
