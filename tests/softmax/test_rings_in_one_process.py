"""The error of long rings, simulated in one process: it does not grow with the ring."""

from functools import cache

import pytest
import torch
from grids import dense_with_gradients, random_sequence, relative_error

from megatron_longseq.softmax import OnlineSoftmax, choose_kernel
from megatron_longseq.softmax.ring_attention import output_of_delta
from megatron_longseq.token_layout import ZigzagGrid

CPU = torch.device("cpu")
TOKENS, HEADS, WIDTH = 256, 2, 32


def simulated_ring(data, ring, *, gradient_dtype=torch.float32):
    """(out, dQ, dK, dV) of the whole sequence as ``ring`` ranks would compute them."""
    grid, rows = ZigzagGrid(1, ring), TOKENS // ring
    kernel = choose_kernel("aten", data[0].dtype, CPU)
    q, k, v, dout = ([grid.split(t, rank) for rank in range(ring)] for t in data)
    results = [[], [], [], []]
    sums = [[torch.zeros_like(t, dtype=gradient_dtype) for t in part] for part in (k, v)]
    for here in range(ring):
        softmax = OnlineSoftmax(rows, 1, HEADS, WIDTH, dtype=torch.float32, device=CPU)
        for owner in ((here - step) % ring for step in range(ring)):
            for part in grid.block_mask(here, owner, rows):
                block = kernel.forward(
                    q[here][part.queries],
                    k[owner][part.keys],
                    v[owner][part.keys],
                    causal=part.causal,
                    scale=WIDTH**-0.5,
                )
                softmax.merge(*block, part.queries)
        out, lse = softmax.result()
        results[0].append(out.to(q[0].dtype))
        dq = torch.zeros_like(out)
        for owner in ((here - step) % ring for step in range(ring)):
            for part in grid.block_mask(here, owner, rows):
                terms = kernel.backward(
                    dout[here][part.queries],
                    q[here][part.queries],
                    k[owner][part.keys],
                    v[owner][part.keys],
                    results[0][here][part.queries],
                    lse[..., part.queries],
                    causal=part.causal,
                    scale=WIDTH**-0.5,
                )
                dq[part.queries] += terms[0]
                sums[0][owner][part.keys] += terms[1]
                sums[1][owner][part.keys] += terms[2]
        results[1].append(dq.to(q[0].dtype))
    results[2:] = ([t.to(q[0].dtype) for t in part] for part in sums)
    return [grid.join(parts) for parts in results]


@cache
def errors_by_ring(dtype, rings, **options):
    data = [t.to(dtype) for t in random_sequence(TOKENS, 1, HEADS, HEADS, WIDTH, WIDTH)]
    expected = dense_with_gradients(*(t.double() for t in data))
    return {
        ring: [
            relative_error(ours, exact)
            for ours, exact in zip(simulated_ring(data, ring, **options), expected, strict=True)
        ]
        for ring in rings
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_flat_from_rings_of_2_to_64(dtype):
    errors = errors_by_ring(dtype, (2, 32, 64))
    for ring in (32, 64):
        for small, large in zip(errors[2], errors[ring], strict=True):
            assert large < 2 * small, errors


def test_sums_in_16_bits_would_grow_with_the_ring():
    # ring-flash-attention #42 and MindSpeed's bf16 buffers: why dK and dV add up in fp32.
    rings = (2, 32)
    wide = errors_by_ring(torch.bfloat16, (2, 32, 64))
    narrow = errors_by_ring(torch.bfloat16, rings, gradient_dtype=torch.bfloat16)
    for index in (2, 3):
        assert narrow[32][index] > 2 * wide[32][index]
        assert narrow[32][index] > 2 * narrow[2][index]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_output_of_delta_has_the_product_that_a_kernel_forms(dtype):
    torch.manual_seed(0)
    same = torch.ones(64, 2, 3, 32)  # all of a row round alike
    tiny = torch.randn(64, 2, 3, 32) * 1e-6
    for dout in (torch.randn(64, 2, 3, 32), same, tiny):
        dout = dout.to(dtype)
        dout[3] = 0  # its rows have Delta 0
        wide = torch.promote_types(dtype, torch.float32)
        out = (torch.randn(64, 2, 3, 32) + 4).to(dtype).to(wide)
        delta = (dout.to(wide) * out).sum(-1).permute(1, 2, 0)
        found = output_of_delta(dout, delta)
        product = (dout.to(wide) * found.to(wide)).sum(-1).permute(1, 2, 0)
        assert found.dtype == dtype and torch.isfinite(found).all()
        error = (product - delta).abs() / (dout.to(wide).norm(dim=-1) * 4).permute(1, 2, 0).clamp(
            min=1e-30
        )
        # A rounding of all elements in one direction would be several eps; wide sums round too.
        limit = 0.5 if dtype.itemsize == 2 else 8
        assert error.max() < limit * torch.finfo(dtype).eps, (dtype, error.max())
        assert found.double().norm(dim=-1).max() < 2 * out.double().norm(dim=-1).max()
