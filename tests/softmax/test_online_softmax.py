"""The merge by log-sum-exp and its edge rules."""

import pytest
import torch

from megatron_longseq.softmax import OnlineSoftmax, merge_

INFINITY = torch.inf
WIDE = [torch.float32, torch.float64]


def side(lse, dtype, seed=0):
    """(out, lse) of 4 rows, 2 heads: ``lse`` everywhere."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(4, 1, 2, 3, generator=generator, dtype=dtype)
    return out, torch.full((1, 2, 4), lse, dtype=dtype)


def merged(first, second):
    out, lse = first[0].clone(), first[1].clone()
    merge_(out, lse, *second)
    return out, lse


@pytest.mark.parametrize("dtype", WIDE)
def test_merge_is_the_softmax_of_both_sides(dtype):
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(1, 2, 4, 10, generator=generator, dtype=torch.float64)
    values = torch.randn(10, 1, 2, 3, generator=generator, dtype=torch.float64)

    def attend(keys):
        part = scores[..., keys]
        out = torch.einsum("bhqk,kbhd->qbhd", part.softmax(-1), values[keys])
        return out.to(dtype), part.logsumexp(-1).to(dtype)

    out, lse = merged(attend(slice(0, 3)), attend(slice(3, 10)))
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    for actual, expected in zip((out, lse), attend(slice(0, 10)), strict=True):
        assert (actual.double() - expected.double()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", WIDE)
def test_a_side_that_saw_no_key_leaves_the_other_bit_for_bit(dtype):
    seen, unseen = side(1.5, dtype), side(-INFINITY, dtype, seed=1)
    for pair in ((seen, unseen), (unseen, seen)):
        out, lse = merged(*pair)
        assert torch.equal(out, seen[0]) and torch.equal(lse, seen[1])


@pytest.mark.parametrize("dtype", WIDE)
def test_two_sides_that_saw_no_key_stay_so(dtype):
    zero = torch.zeros(4, 1, 2, 3, dtype=dtype), side(-INFINITY, dtype)[1]
    out, lse = merged(zero, zero)
    assert torch.equal(out, zero[0]) and (lse == -INFINITY).all()


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("gap", [1e4, -1e4, 88.8, -88.8])
def test_large_gaps_stay_finite_and_the_larger_side_wins(dtype, gap):
    low, high = side(0.0, dtype), side(gap, dtype, seed=1)
    out, lse = merged(low, high)
    assert out.isfinite().all() and lse.isfinite().all()
    winner = high if gap > 0 else low
    assert torch.equal(out, winner[0]) and torch.allclose(lse, winner[1], rtol=0, atol=1e-38)


def test_blocks_of_some_rows_merge_into_those_rows_only():
    softmax = OnlineSoftmax(4, 1, 2, 3, dtype=torch.float32, device=torch.device("cpu"))
    first, second = side(0.0, torch.float32), side(0.0, torch.float32, seed=1)
    softmax.merge(first[0][2:], first[1][..., 2:], slice(2, 4))
    softmax.merge(second[0][1:], second[1][..., 1:], slice(1, 4))
    out, lse = softmax.result()
    assert (out[0] == 0).all() and (lse[..., 0] == -INFINITY).all()
    assert torch.equal(out[1], second[0][1])
    assert torch.allclose(out[2:], (first[0][2:] + second[0][2:]) / 2)
    assert torch.allclose(lse[..., 2:], torch.tensor(2.0).log())


def test_the_first_block_becomes_the_accumulator_without_a_copy():
    softmax = OnlineSoftmax(4, 1, 2, 3, dtype=torch.float32, device=torch.device("cpu"))
    out, lse = side(0.0, torch.float32)
    softmax.merge(out, lse)
    assert softmax.result()[0].data_ptr() == out.data_ptr()


def test_many_bf16_blocks_are_rounded_once_not_once_per_merge():
    torch.manual_seed(0)
    errors = {}
    for blocks in (1, 64):
        softmax = OnlineSoftmax(8, 1, 2, 16, dtype=torch.float32, device=torch.device("cpu"))
        values = torch.randn(blocks, 8, 1, 2, 16) + 1
        for value in values:
            softmax.merge(value.bfloat16(), torch.zeros(1, 2, 8))
        exact = values.double().mean(0)
        errors[blocks] = ((softmax.result()[0] - exact).abs().max() / exact.abs().max()).item()
    assert errors[64] < errors[1]


def test_a_result_needs_a_block():
    softmax = OnlineSoftmax(1, 1, 1, 1, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="has seen no block"):
        softmax.result()
