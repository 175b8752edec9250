"""Inputs that cannot work: the same clear error on every rank, and no hang."""

import pytest
import torch
import torch.distributed as dist
from grids import grid_groups, random_sequence, refused, relative_error

import megatron_longseq
from megatron_longseq.attention_2d import TwoDAttention, two_d_attention

CPU = torch.device("cpu")


def tensors(tokens=4, batch=1, heads=4, groups=4, width=8, value_width=8, dtype=torch.float32):
    return [
        torch.zeros(tokens, batch, *shape, dtype=dtype)
        for shape in ((heads, width), (groups, width), (groups, value_width))
    ]


# What one rank does differently, and what every rank's error must say.
ODD_ONE = {
    "tokens": ({"tokens": 6}, {}, "query tokens: 4 on ranks 0, 1, 3, 6 on rank 2"),
    "micro-batch": ({"batch": 2}, {}, "key micro-batch: 1 on ranks 0, 1, 3, 2 on rank 2"),
    "dtype": ({"dtype": torch.float64}, {}, "torch.float64 on rank 2"),
    "odd tokens": ({"tokens": 5}, {}, "must be even; nearest: [4, 6] on rank 2"),
    "causal": ({}, {"causal": False}, "causal: True on ranks 0, 1, 3, False on rank 2"),
    "scale": ({}, {"softmax_scale": 0.5}, "softmax_scale: None on ranks 0, 1, 3, 0.5 on rank 2"),
    "kernel": ({}, {"kernel": "reference"}, "kernel: aten on ranks 0, 1, 3, reference on rank 2"),
    "window": ({}, {"window": 3}, "window: None on ranks 0, 1, 3, 3 on rank 2"),
    "documents": (
        {},
        {"cu_seqlens": [0, 5, 16]},
        "documents: none on ranks 0, 1, 3, [0, 5, 16] on rank 2",
    ),
    "sink": ({}, {"sink": torch.zeros(4)}, "sink: None on ranks 0, 1, 3, [4] torch.float32 on"),
    "documents that do not end": (
        {},
        {"cu_seqlens": [0, 5]},
        "problem: none on ranks 0, 1, 3, cu_seqlens from [0] to [5]: it must begin with 0 and end",
    ),
    "missing kernel": (
        {},
        {"kernel": "flash"},
        "problem: none on ranks 0, 1, 3, kernel 'flash' cannot be used",
    ),
}


def one_rank_differs():
    groups, texts = grid_groups(2, 2), {}
    operator = TwoDAttention(*groups, timeout_seconds=20)
    for name, (shape, options, _) in ODD_ONE.items():
        odd = dist.get_rank() == 2
        inputs = tensors(**(shape if odd else {}))
        texts[name] = refused(operator, *inputs, **(options if odd else {}))
        # The function, and with it a fresh operator, says the same.
        again = refused(
            two_d_attention,
            *inputs,
            head_group=groups[0],
            ring_group=groups[1],
            **(options if odd else {}),
        )
        assert again == texts[name]
    inputs = tensors()
    inputs[0].requires_grad_(dist.get_rank() == 1)
    texts["gradient"] = refused(operator, *inputs)
    assert refused(operator, *tensors()) is None, "still in step"
    return texts


def test_a_rank_that_differs_is_refused_everywhere_in_the_same_words(ranks):
    results = ranks.run(one_rank_differs, world_size=4, backend="gloo")
    for name, (_, _, expected) in ODD_ONE.items():
        texts = {texts[name] for texts in results}
        assert len(texts) == 1, texts
        assert f"{texts.pop()}".startswith("UserError: the ranks that share a sequence must")
        assert expected in results[0][name]
    assert "requires a gradient: False on ranks 0, 2, 3, True on rank 1" in results[3]["gradient"]


# Wrong on all ranks alike: shapes, options, what the error must say.
WRONG = [
    ({"tokens": 5}, {}, "5 tokens on each rank: .* even; nearest: \\[4, 6\\]"),
    (
        {"heads": 6, "groups": 4},
        {},
        "4 key/value heads do not divide 6 query heads; .*\\[1, 2, 3, 6",
    ),
    (
        {"heads": 1, "groups": 1},
        {},
        "a head group of 2 ranks for 1 query heads: each rank needs one; at most 1",
    ),
    ({"dtype": torch.int64}, {}, "query is torch.int64; 2D attention works in torch.float64"),
    ({"tokens": 0}, {}, r"query of shape \(0, 1, 4, 8\): expected \[tokens"),
    ({}, {"kernel": "flesh"}, "kernel 'flesh': unknown; there are auto, flash, aten, reference"),
    ({}, {"window": -1}, "window=-1: a token sees itself .* at least 0, or None"),
    ({}, {"window": 2, "causal": False}, "window=2 with causal=False"),
    ({}, {"prefix": -2}, "prefix=-2: a number of tokens"),
    ({}, {"prefix": 2, "causal": False}, "prefix=2 with causal=False, where everything is seen"),
    ({}, {"cu_seqlens": [0, 4]}, r"cu_seqlens from \[0\] to \[4\]: it must begin .* end with 8"),
    ({}, {"cu_seqlens": [0, 5, 3, 8]}, r"cu_seqlens\[2\] = 3 is less than cu_seqlens\[1\] = 5"),
    ({}, {"cu_seqlens": torch.tensor([0.0, 8.0])}, "cu_seqlens of shape .* one dimension of int"),
    ({"batch": 2}, {"cu_seqlens": [0, 8]}, "cu_seqlens with a micro-batch of 2: .* once per row"),
    ({}, {"cu_seqlens_padded": [0, 8]}, "cu_seqlens_padded without cu_seqlens"),
    (
        {},
        {"cu_seqlens": [0, 8], "cu_seqlens_padded": [0, 4, 8]},
        "cu_seqlens has 2 entries and cu_seqlens_padded 3",
    ),
    (
        {},
        {"cu_seqlens": [0, 5, 7], "cu_seqlens_padded": [0, 6, 8]},
        "document 0 has 6 tokens with padding: .* multiple of 2 x 2 = 4",
    ),
    (
        {},
        {"cu_seqlens": [0, 5, 7], "cu_seqlens_padded": [0, 4, 8]},
        "document 0 has 5 tokens in cu_seqlens and 4 with padding",
    ),
    ({}, {"sink": torch.zeros(3)}, r"sink of shape \(3,\) .* one .* per query head, \[4\]"),
    ({}, {"softmax_scale": float("nan")}, "softmax_scale=nan must be a finite number"),
]


def all_ranks_wrong():
    operator = TwoDAttention(*grid_groups(2, 1), timeout_seconds=20)
    return [refused(operator, *tensors(**shape), **options) for shape, options, _ in WRONG]


def test_wrong_inputs_name_the_value_the_rule_and_what_would_work(ranks):
    import re

    for texts in ranks.run(all_ranks_wrong, world_size=2, backend="gloo"):
        for text, (_, _, expected) in zip(texts, WRONG, strict=True):
            assert text and re.search("^UserError: " + expected, text), text


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda q, k, v: (q[0], k, v), "query of shape"),
        (lambda q, k, v: (q, k[:2], v), "must have the same tokens, micro-batch and width"),
        (lambda q, k, v: (q, k[..., :4], v), "must have the same tokens, micro-batch and width"),
        (lambda q, k, v: (q, k, v[:, :, :2]), "may differ in width only"),
        (lambda q, k, v: (q, k.double(), v), "key is torch.float64"),
    ],
)
def test_tensors_that_do_not_fit_one_another_are_refused(change, expected):
    with pytest.raises(megatron_longseq.errors.UserError, match=expected):
        two_d_attention(*change(*tensors()), head_group=None, ring_group=None)


def test_a_time_limit_must_be_positive():
    with pytest.raises(megatron_longseq.errors.UserError, match="timeout_seconds=0 must be"):
        TwoDAttention(None, None, timeout_seconds=0)


def swapped_groups():
    head, ring = grid_groups(1, 4)
    return refused(two_d_attention, *tensors(), head_group=ring, ring_group=ring), refused(
        two_d_attention, *tensors(), head_group=head, ring_group=ring
    )


def test_groups_that_are_no_grid_are_refused_on_every_rank(ranks):
    for wrong, right in ranks.run(swapped_groups, world_size=4, backend="gloo"):
        assert "UserError: the process groups do not form a grid" in wrong
        assert right is None


def test_a_shape_agreed_on_earlier_is_compared_again(ranks):
    # A check remembered per shape would be skipped by the ranks that have seen the shape.
    for first, second, third in ranks.run(lengths_in_turn, world_size=2, backend="gloo"):
        assert first is None and third is None
        assert "query tokens: 8 on rank 0, 4 on rank 1" in second


def lengths_in_turn():
    operator = TwoDAttention(*grid_groups(1, 2), timeout_seconds=20)
    odd = tensors(tokens=8 if dist.get_rank() == 0 else 4)
    return [refused(operator, *inputs) for inputs in (tensors(), odd, tensors(tokens=8))]


def test_equal_results_without_the_agreement_check(ranks):
    assert max(ranks.run(unchecked, world_size=2, backend="gloo")) == 0


def unchecked():
    groups = grid_groups(2, 1)
    inputs = [t[:4].contiguous() for t in random_sequence(4, 1, 4, 4, 8, 8)[:3]]
    outs = [
        TwoDAttention(*groups, timeout_seconds=20, check_agreement=check)(*inputs)
        for check in (True, False)
    ]
    return relative_error(*outs)
