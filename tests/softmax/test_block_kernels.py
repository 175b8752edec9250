"""Every kernel keeps one contract: against autograd of dense attention, block by block."""

import importlib.util

import pytest
import torch
from grids import dense_attention, dense_with_gradients, random_sequence, relative_error
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_longseq.errors import UserError
from megatron_longseq.softmax import choose_kernel, kernels, merge_
from megatron_longseq.softmax.block_kernels import SUPPORTED_DTYPES

CPU = torch.device("cpu")
USABLE = ["aten", "reference"]
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def in_dtype(tensors, dtype):
    return [tensor.to(dtype) for tensor in tensors]


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "heads, groups, width, value_width", [(4, 4, 8, 8), (6, 2, 8, 4), (4, 1, 4, 12)]
)
def test_one_block_equals_dense_attention(name, dtype, causal, heads, groups, width, value_width):
    kernel, scale = choose_kernel(name, dtype, CPU), 0.3
    data = in_dtype(random_sequence(10, 2, heads, groups, width, value_width), dtype)
    q, k, v, dout = data
    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert lse.dtype == wide and lse.shape == (2, heads, 10)
    exact = in_dtype(data, torch.float64)
    expected = dense_with_gradients(*exact, causal, scale)
    _, exact_lse = dense_attention(*exact[:3], causal, scale)
    gradients = kernel.backward(dout, q, k, v, out.to(dtype), lse, causal=causal, scale=scale)
    for actual, reference in zip((out, *gradients, lse), (*expected, exact_lse), strict=True):
        assert actual.shape == reference.shape
        assert relative_error(actual, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", USABLE)
def test_blocks_with_the_final_output_and_lse_add_up_to_the_dense_gradients(name):
    kernel, scale = choose_kernel(name, torch.float64, CPU), 0.3
    q, k, v, dout = random_sequence(12, 2, 6, 2, 8, 4)
    parts = [slice(0, 3), slice(3, 12)]
    out, lse = kernel.forward(q, k[parts[0]], v[parts[0]], causal=False, scale=scale)
    lse = lse.contiguous()
    merge_(out, lse, *kernel.forward(q, k[parts[1]], v[parts[1]], causal=False, scale=scale))
    terms = [
        kernel.backward(dout, q, k[keys], v[keys], out, lse, causal=False, scale=scale)
        for keys in parts
    ]
    dq = terms[0][0] + terms[1][0]
    dk, dv = (torch.cat((terms[0][i], terms[1][i])) for i in (1, 2))
    expected = dense_with_gradients(q, k, v, dout, causal=False, scale=scale)
    for actual, reference in zip((out, dq, dk, dv), expected, strict=True):
        assert relative_error(actual, reference) < 1e-13


@pytest.mark.parametrize("name", USABLE)
def test_a_row_that_sees_no_key_is_zero_and_minus_infinity_with_finite_gradients(name):
    kernel, scale = choose_kernel(name, torch.float64, CPU), 0.3
    q, k, v, dout = random_sequence(6, 1, 2, 2, 8, 8)
    visible = torch.ones(6, 6, dtype=torch.bool).tril(-2)  # rows 0 and 1 see nothing
    options = {"causal": False, "scale": scale, "visible": visible}
    out, lse = kernel.forward(q, k, v, **options)
    assert (out[:2] == 0).all() and (lse[..., :2] == -torch.inf).all()
    assert lse[..., 2:].isfinite().all()
    gradients = kernel.backward(dout, q, k, v, out, lse, **options)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:2] == 0).all()
    rest = choose_kernel("reference", torch.float64, CPU)
    options["visible"] = visible[2:]
    expected = rest.backward(dout[2:], q[2:], k, v, out[2:], lse[..., 2:], **options)
    assert relative_error(gradients[0][2:], expected[0]) < 1e-13
    assert relative_error(gradients[1], expected[1]) < 1e-13
    assert relative_error(gradients[2], expected[2]) < 1e-13


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("band", [(-3, 1), (None, 2), (-9, None)])
def test_a_band_is_the_matrix_it_stands_for(name, band):
    kernel, scale = choose_kernel(name, torch.float64, CPU), 0.3
    q, k, v, dout = random_sequence(12, 1, 4, 2, 8, 8)
    k, v = k[:10], v[:10]
    distance = torch.arange(10) - torch.arange(12).unsqueeze(1)
    low, high = band
    visible = (distance >= (-12 if low is None else low)) & (
        distance <= (12 if high is None else high)
    )
    options = {"causal": False, "scale": scale}
    by_matrix = kernel.forward(q, k, v, visible=visible, **options)
    by_band = kernel.forward(q, k, v, band=band, **options)
    terms = kernel.backward(dout, q, k, v, *by_band, band=band, **options)
    expected = kernel.backward(dout, q, k, v, *by_matrix, visible=visible, **options)
    for ours, theirs in zip((*by_band, *terms), (*by_matrix, *expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", USABLE)
def test_strided_views_and_expanded_gradients_are_accepted(name):
    kernel = choose_kernel(name, torch.float64, CPU)
    q, k, v, _ = random_sequence(8, 2, 4, 4, 8, 8)
    mixed = torch.cat((q, k, v), 3)  # as a fused projection gives them
    q, k, v = mixed.split(8, 3)
    dout = torch.ones((), dtype=torch.float64).expand(4, 2, 4, 8)
    late = slice(4, 8)
    out, lse = kernel.forward(q[late], k[:4], v[:4], causal=False, scale=0.3)
    terms = kernel.backward(dout, q[late], k[:4], v[:4], out, lse, causal=False, scale=0.3)
    plain = [t.contiguous() for t in (dout, q[late], k[:4], v[:4])]
    expected = kernel.backward(*plain, out, lse.contiguous(), causal=False, scale=0.3)
    for actual, reference in zip(terms, expected, strict=True):
        assert relative_error(actual, reference) < 1e-14


@pytest.mark.parametrize("name", USABLE)
def test_scores_of_plus_and_minus_100_stay_exact(name):
    kernel = choose_kernel(name, torch.float64, CPU)
    q, k, v, dout = random_sequence(8, 1, 2, 2, 8, 8)
    scale = 100 / torch.einsum("qbhd,kbhd->bhqk", q, k).abs().max().item()
    out, lse = kernel.forward(q, k, v, causal=True, scale=scale)
    gradients = kernel.backward(dout, q, k, v, out, lse, causal=True, scale=scale)
    expected = dense_with_gradients(q, k, v, dout, True, scale)
    for actual, reference in zip((out, *gradients), expected, strict=True):
        assert relative_error(actual, reference) < 1e-12


def test_an_empty_block_is_an_error_and_does_not_end_the_process():
    q, k, v, _ = random_sequence(4, 1, 2, 2, 8, 8)
    kernel = choose_kernel("aten", torch.float64, CPU)
    with pytest.raises(ValueError, match="empty block"):
        kernel.forward(q[:0], k, v, causal=False, scale=1.0)
    with pytest.raises(ValueError, match="empty block"):
        kernel.backward(q, q, k[:0], v[:0], q, q[..., 0], causal=False, scale=1.0)


def test_auto_takes_the_first_usable_kernel_and_names_say_which():
    assert list(kernels()) == ["flash", "aten", "reference"]
    assert choose_kernel("auto", torch.float32, CPU).name == "aten"


def test_unknown_and_unusable_kernels_are_refused_with_what_there_is():
    with pytest.raises(UserError, match="'fast': unknown; there are auto, flash, aten, reference"):
        choose_kernel("fast", torch.float32, CPU)
    why = "CUDA tensors" if importlib.util.find_spec("flash_attn") else "not installed"
    with pytest.raises(UserError, match=f"'flash' cannot be used: .*{why}.*auto, aten, reference"):
        choose_kernel("flash", torch.float16, CPU)
    with pytest.raises(UserError, match=r"'aten' cannot be used: .*fp64 on CUDA.*reference"):
        choose_kernel("aten", torch.float64, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", ["", "matrix", "band"])
def test_the_cuda_operators_take_our_arguments_and_return_our_shapes(dtype, masked):
    # Fake tensors carry shapes and devices but no numbers: what is called, without a GPU.
    kernel = choose_kernel("aten", dtype, torch.device("cuda"))
    with FakeTensorMode():
        shapes = ((10, 2, 4, 12), (6, 2, 2, 12), (6, 2, 2, 5))
        q, k, v = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
        options = {"causal": False, "scale": 0.3}
        if masked == "matrix":
            options["visible"] = torch.ones(10, 6, dtype=torch.bool, device="cuda")
        elif masked == "band":
            options["band"] = (-5, 0)
        out, lse = kernel.forward(q, k, v, **options)
        gradients = kernel.backward(torch.empty_like(out), q, k, v, out, lse, **options)
    assert (out.shape, out.dtype, out.device.type) == ((10, 2, 4, 5), dtype, "cuda")
    assert (lse.shape, lse.dtype) == ((2, 4, 10), torch.float32)
    assert tuple(gradient.shape for gradient in gradients) == shapes
