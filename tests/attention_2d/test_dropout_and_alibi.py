"""ALiBi and dropout: every layout computes what dense attention does, backward drops the same."""

import pytest
import torch
import torch.distributed as dist
from grids import grid_groups, random_sequence, refused
from masks import dense_mask

from megatron_longseq.attention_2d import Dropout, TwoDAttention
from megatron_longseq.softmax.score_edits import kept_weights
from megatron_longseq.token_layout import ZigzagGrid, document_zigzag_tokens

HEADS, GROUPS = 6, 2
SEED, FIRST_HEAD = 12345678901234, 7


def dense(query, key, value, visible, slopes, dropout):
    """Attention by its definition, with dropout by the same numbers."""
    total, batch, heads, width = query.shape
    copies = heads // key.shape[2]
    key, value = (tensor.repeat_interleave(copies, 2) for tensor in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * width**-0.5
    places = torch.arange(total)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (places[:, None] - places).abs()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    if dropout is not None:
        keep = kept_weights(
            dropout.seed,
            dropout.probability,
            heads=torch.arange(heads) + dropout.first_head,
            batch=range(batch),
            queries=places,
            keys=places,
        )
        weights = weights * keep / (1 - dropout.probability)
    return torch.einsum("bhqk,kbhd->qbhd", weights, value)


def errors(hp, ring, cases):
    """Largest relative error of output and gradients on this rank, by case."""
    grid, here, found = ZigzagGrid(hp, ring), dist.get_rank(), {}
    operator = TwoDAttention(*grid_groups(hp, ring), timeout_seconds=30)
    for name, (options, rows, with_slopes, probability) in cases.items():
        total, options = rows * grid.ranks, dict(options)
        batch = 1 if "cu_seqlens" in options else 2
        tokens, boundaries, lengths = grid.tokens(here, total), options.get("cu_seqlens"), None
        if "cu_seqlens_padded" in options:
            lengths = torch.tensor(boundaries).diff().tolist()
            boundaries = options["cu_seqlens_padded"]
            tokens = document_zigzag_tokens(here, grid.ranks, boundaries)
        known = {k: options[k] for k in ("causal", "window", "prefix") if k in options}
        visible = dense_mask(total, boundaries=boundaries, lengths=lengths, **known)
        data = random_sequence(total, batch, HEADS, GROUPS, 4, 6)
        slopes = torch.rand(HEADS, dtype=torch.float64) if with_slopes else None
        dist.broadcast(slopes, 0) if with_slopes else None
        dropout = Dropout(probability, SEED, FIRST_HEAD) if probability else None
        leaves = [tensor.clone().requires_grad_() for tensor in data[:3]]
        expected = [dense(*leaves, visible, slopes, dropout)]
        expected += torch.autograd.grad(expected[0], leaves, data[3])
        mine = [tensor[tokens].clone().requires_grad_() for tensor in data[:3]]
        out = operator(*mine, alibi_slopes=slopes, dropout=dropout, **options)
        actual = [out, *torch.autograd.grad(out, mine, data[3][tokens])]
        found[name] = max(
            float((ours - whole[tokens]).abs().max() / whole.abs().max())
            for ours, whole in zip(actual, expected, strict=True)
        )
        assert operator.buffers.leased_bytes == 0
    return found


CASES = {
    "slopes": ({}, 6, True, 0.0),
    "dropout": ({}, 6, False, 0.4),
    "both, all seen": ({"causal": False}, 6, True, 0.2),
    "both, window": ({"window": 5}, 6, True, 0.3),
    "dropout, prefix": ({"prefix": 4}, 6, False, 0.3),
    "both, documents cut anywhere": ({"cu_seqlens": [0, 5, 6, 23, 40]}, 10, True, 0.3),
    "dropout, zigzag by document": (
        {"cu_seqlens": [0, 7, 18, 35], "cu_seqlens_padded": [0, 8, 24, 48]},
        12,
        False,
        0.3,
    ),
}


@pytest.mark.parametrize(("hp", "ring"), [(1, 4), (2, 2), (4, 1)])
def test_every_layout_equals_dense_attention(ranks, hp, ring):
    for found in ranks.run(errors, world_size=4, args=(hp, ring, CASES), backend="gloo"):
        assert max(found.values()) < 1e-12, found


def test_long_blocks_run_in_tiles(ranks):
    cases = {
        "causal": ({}, 700, True, 0.2),
        "window": ({"window": 300}, 700, False, 0.2),
        "all": ({"causal": False}, 700, False, 0.2),
    }
    for found in ranks.run(errors, world_size=2, args=(1, 2, cases), backend="gloo"):
        assert max(found.values()) < 1e-12, found


def test_dropout_keeps_its_share_and_knows_no_order():
    many = torch.arange(256)
    keep = kept_weights(
        SEED, 0.3, heads=torch.arange(4), batch=range(2), queries=many, keys=many
    ).double()
    draws = keep.numel()
    assert abs(keep.mean() - 0.7) < 5 * (0.21 / draws) ** 0.5
    for dim in range(4):  # of a row, a column, a head: none stands out
        means = keep.mean([other for other in range(4) if other != dim])
        assert (means - 0.7).abs().max() < 6 * (0.21 * len(means) / draws) ** 0.5
    centred = keep - keep.mean()
    for dim in range(4):  # neighbours have nothing in common
        product = (centred * centred.roll(1, dim)).mean() / 0.21
        assert product.abs() < 5 * draws**-0.5
    other = kept_weights(
        SEED + 1, 0.3, heads=torch.arange(4), batch=range(2), queries=many, keys=many
    ).double()
    assert ((centred * (other - other.mean())).mean() / 0.21).abs() < 5 * draws**-0.5


def test_a_row_by_itself_drops_what_it_drops_in_a_micro_batch():
    operator = TwoDAttention(None, None)
    x = torch.randn(8, 3, 2, 4, dtype=torch.float64)
    together = operator(x, x, x, dropout=Dropout(0.5, SEED))
    for row in range(3):
        alone = x[:, row : row + 1]
        dropout = Dropout(0.5, SEED, first_row=row)
        out = operator(alone, alone, alone, dropout=dropout, cu_seqlens=[0, 8])
        assert torch.equal(out, together[:, row : row + 1])
    first = x[:, :1]
    again = operator(first, first, first, dropout=Dropout(0.5, SEED, first_row=1))
    assert not torch.allclose(again, together[:, :1]), "rows drop other weights"


def wrong_changes():
    operator = TwoDAttention(None, None)
    x = torch.randn(4, 1, 2, 4)
    return [
        refused(operator, x, x, x, dropout=Dropout(1.0, 0)),
        refused(operator, x, x, x, alibi_slopes=torch.ones(3)),
        refused(operator, x, x, x, dropout=Dropout(0.1, 0), kernel="aten"),
    ]


def test_changes_that_cannot_work_are_refused():
    probability, slopes, kernel = wrong_changes()
    assert "dropout of probability 1.0: must be at least 0 and less than 1" in probability
    assert "alibi_slopes of shape (3,)" in slopes and "[2]" in slopes
    assert "kernel 'aten' knows neither ALiBi nor dropout; use auto or reference" in kernel
