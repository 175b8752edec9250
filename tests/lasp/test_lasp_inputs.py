"""Inputs that cannot work: the same clear error on every rank, and no hang."""

import os

import pytest
import torch
import torch.distributed as dist
from grids import refused

import megatron_longseq
from megatron_longseq.communication.groups import GroupPlace
from megatron_longseq.communication.scan import Scan
from megatron_longseq.errors import UserError
from megatron_longseq.lasp import LinearAttentionOperator, decode, linear_attention
from megatron_longseq.lasp.torch_kernels import TorchKernel


def tensors(tokens=4, batch=1, heads=(2, 2, 2), width=8, value_width=8, dtype=torch.float32):
    widths = (width, width, value_width)
    return [torch.zeros(batch, tokens, h, w, dtype=dtype) for h, w in zip(heads, widths)]  # noqa: B905


class Unusable(TorchKernel):
    """A kernel that a caller passes, for what it cannot work on."""

    name = "mine"

    def unusable(self, segments):
        return f"it takes no width of {segments.key.shape[4]}"


# What rank 2 of 4 does differently, and what every rank's error must say.
ODD_ONE = {
    "tokens": ({"tokens": 6}, {}, "query tokens: 4 on ranks 0, 1, 3, 6 on rank 2"),
    "batch": ({"batch": 2}, {}, "key batch: 1 on ranks 0, 1, 3, 2 on rank 2"),
    "dtype": ({"dtype": torch.float64}, {}, "torch.float64 on rank 2"),
    "odd tokens": ({"tokens": 5}, {}, "must be even; nearest: [4, 6] on rank 2"),
    "layout": ({}, {"layout": "contiguous"}, "layout: zigzag on ranks 0, 1, 3, contiguous on"),
    "unknown layout": ({}, {"layout": "striped"}, "none on ranks 0, 1, 3, layout 'striped': must"),
    "schedule": ({}, {"schedule": "ring"}, "schedule: auto on ranks 0, 1, 3, ring on rank 2"),
    "unknown schedule": ({}, {"schedule": "tree"}, "on ranks 0, 1, 3, schedule 'tree': must be"),
    "unknown backend": ({}, {"backend": "fast"}, "on ranks 0, 1, 3, backend 'fast': unknown;"),
    "unusable kernel": (
        {},
        {"backend": Unusable()},
        "backend 'mine' cannot be used: it takes no w",
    ),
    "scale": ({}, {"scale": 0.5}, "scale: 1.0 on ranks 0, 1, 3, 0.5 on rank 2"),
    "causal": ({}, {"causal": False}, "causal: True on ranks 0, 1, 3, False on rank 2"),
    "documents": ({}, {"cu_seqlens": [0, 16]}, "cu_seqlens: none on ranks 0, 1, 3, [0, 16] on"),
    "wrong documents": ({}, {"cu_seqlens": [0, 9]}, "end with 16, the tokens of all ranks"),
    "decay": ({}, {"log_decay": torch.tensor([-1.0, 0.1])}, "from -1 to 0.1: a decay must be in"),
    "NaN": ({}, {"log_decay": torch.tensor([-1.0, torch.nan])}, "a decay must be in (0, 1]"),
    "state": ({}, {"initial_state": torch.zeros(1, 2, 8, 8)}, "initial_state: none on ranks 0, 1"),
    "final state": ({}, {"output_final_state": True}, "output_final_state: False on ranks 0, 1"),
}


def one_rank_differs():
    group, texts = dist.group.WORLD, {}
    odd = dist.get_rank() == 2
    for name, (shape, options, _) in ODD_ONE.items():
        texts[name] = refused(
            linear_attention,
            *tensors(**(shape if odd else {})),
            group=group,
            **options if odd else {},
        )
    operator = LinearAttentionOperator(group, timeout_seconds=20)
    q, k, v = tensors()
    texts["no query"] = refused(operator, None if odd else q, k, v)
    assert nodes_by_environment(group)
    inputs = tensors()
    inputs[0].requires_grad_(dist.get_rank() == 1)
    texts["gradient"] = refused(operator, *inputs)
    assert refused(operator, *tensors()) is None, "still in step"
    # A state that is differentiable on one rank only is what a call before leaves.
    state = torch.zeros(1, 2, 8, 8, requires_grad=odd)
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    assert refused(operator, *inputs, initial_state=state) is None
    return texts


def nodes_by_environment(group):
    """Whether the function finds the nodes of two_level, and what it says where it cannot."""
    inputs = [torch.randn(1, 4, 2, 8) for _ in range(3)]
    expected, _ = linear_attention(*inputs, group=group, schedule="ring")
    for ranks_per_node, options in (("2", {}), ("4", {}), ("3", {"node_size": 2})):
        os.environ["LOCAL_WORLD_SIZE"] = ranks_per_node
        out, _ = linear_attention(*inputs, group=group, schedule="two_level", **options)
        torch.testing.assert_close(out, expected)
    text = refused(linear_attention, *inputs, group=group, schedule="two_level")
    assert "LOCAL_WORLD_SIZE=3 does not tell it for the ranks [0, 1, 2, 3]" in text, text
    assert "pass node_size, one of [1, 2, 4], or another schedule" in text, text
    return True


def test_nodes_are_those_of_the_ranks_of_the_group():
    for ranks, local, expected in (
        ((0, 1, 2, 3), 2, 2),
        ((0, 2, 4, 6), 4, 2),
        ((0, 8, 16), 8, 1),
        ((1, 3), 8, 2),
        ((0, 1, 2), 2, None),
        ((0, 2, 1, 3), 2, None),
    ):
        assert GroupPlace(None, ranks, 0).ranks_per_node(local) == expected


def test_a_rank_that_differs_is_refused_everywhere_in_the_same_words(ranks):
    results = ranks.run(one_rank_differs, world_size=4, backend="gloo")
    for name, (_, _, expected) in ODD_ONE.items():
        texts = {texts[name] for texts in results}
        assert len(texts) == 1, texts
        assert f"{texts.pop()}".startswith("UserError: the ranks that share a sequence must")
        assert expected in results[0][name], results[0][name]
    for result in results:
        assert "query is None: it must be a tensor on rank 2" in result["no query"]
    assert "requires a gradient: False on ranks 0, 2, 3, True on rank 1" in results[3]["gradient"]


def gates(**shapes):
    return {name: -torch.ones(shape) for name, shape in shapes.items()}


# Wrong on all ranks alike: shapes, options, what the error must say.
WRONG = [
    ({"heads": (4, 3, 3)}, {}, r"4 query, 3 key and 3 value heads: .* 4 query heads: \[1, 2, 4\]"),
    ({"heads": (1, 2, 2)}, {}, "1 query, 2 key and 2 value heads"),
    ({"heads": (4, 2, 4)}, {}, "4 query, 2 key and 4 value heads"),
    ({"dtype": torch.int64}, {}, "query is torch.int64; linear attention works in"),
    ({"tokens": 0}, {}, r"query of shape .*: expected \[batch, tokens, heads, width\]"),
    ({}, gates(log_decay=(3,)), r"log_decay of shape \(3,\): expected \[heads\] = \[2\], \[batch"),
    ({}, gates(log_decay=(1, 4, 2, 7)), r"\[batch, tokens, heads, width\] = \[1, 4, 2, 8\]"),
    ({}, gates(beta=(1, 4, 1)), r"beta of shape \(1, 4, 1\): .* = \[1, 4, 2\], heads being those"),
    ({"heads": (1, 1, 2)}, gates(beta=(1, 4, 1)), r"expected .* = \[1, 4, 2\]"),
    ({}, gates(initial_state=(1, 2, 8, 7)), r"initial_state of shape .* = \[1, 2, 8, 8\]"),
    (
        {},
        gates(initial_state=(1, 2, 8, 8)) | {"normalize": True},
        r"= \[1, 2, 8, 9\], the last column for the denominator",
    ),
    ({}, {"log_decay": torch.tensor([-torch.inf, -1])}, r"from -inf to -1: .*\(0, 1\]"),
    ({}, {"beta": 1.0}, "beta is a float: it must be a tensor or None"),
    ({}, {"log_decay": torch.tensor([-1, -1])}, "log_decay is torch.int64 on cpu"),
    ({}, {"scale": float("nan")}, "scale=nan must be a finite number"),
    ({}, gates(beta=(1, 4, 2)) | {"causal": False}, "causal=False with beta"),
    ({}, gates(beta=(1, 4, 2)) | {"normalize": True}, "normalize=True with beta"),
    ({}, {"output_final_state": True, "causal": False}, "causal=False with .*output_final_state"),
    ({"batch": 2}, {"cu_seqlens": [0, 4]}, "cu_seqlens with a batch of 2: .*need batch 1"),
    ({}, {"cu_seqlens": [0, 3]}, "must begin with 0 and end with 4"),
    ({}, {"layout": "striped"}, "layout 'striped': must be one of 'zigzag', 'contiguous'"),
    ({}, {"schedule": "tree"}, "schedule 'tree': must be one of"),
    ({}, {"backend": "fast"}, "backend 'fast': unknown; there are auto"),
]


@pytest.mark.parametrize("shape, options, message", WRONG)
def test_what_cannot_work_is_refused_with_the_rule(shape, options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*tensors(**shape), **options)


def test_shapes_that_do_not_fit_together_are_refused():
    q, k, v = tensors()
    for inputs, message in (
        ((q[..., :4], k, v), "must have the same batch, tokens and width"),
        ((q, k[:, :2], v), "must have the same batch, tokens and width"),
        ((q, k, v[:, :2]), "must have the same batch and tokens"),
        ((q, k, v.double()), "value is torch.float64 on cpu, query is torch.float32 on cpu"),
        ((None, k, v), "query is None: it must be a tensor"),
        ((q, k, v.tolist()), "value is a list: it must be a tensor"),
        ((q[0], k, v), r"query of shape \(4, 2, 8\): expected"),
    ):
        with pytest.raises(UserError, match=message):
            linear_attention(*inputs)
        with pytest.raises(ValueError, match=message):
            decode(*inputs)


def test_an_operator_takes_a_scan_of_its_own_ranks_and_layout_only():
    with pytest.raises(ValueError, match=r"in contiguous layout: the operator has .* in zigzag"):
        LinearAttentionOperator(None, scan=Scan(None, layout="contiguous"))
    with pytest.raises(UserError, match=r"schedule='ring' and node_size=None beside a scan, which"):
        LinearAttentionOperator(None, scan=Scan(None), schedule="ring")
    with pytest.raises(ValueError, match="timeout_seconds=0 must be a positive number"):
        LinearAttentionOperator(None, timeout_seconds=0)


def test_the_function_is_at_hand_at_the_top_of_the_package():
    assert megatron_longseq.linear_attention is linear_attention


def test_values_are_looked_at_unless_told_not_to():
    operator = LinearAttentionOperator(None, check_values=False)
    operator(*tensors(), log_decay=torch.tensor([0.1, -1.0]))


def test_gradients_are_final():
    leaves = [tensor.double().requires_grad_() for tensor in tensors()]
    out, _ = linear_attention(*leaves)
    (gradient,) = torch.autograd.grad((out**2).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
