"""The Triton kernels, interpreted on the CPU, against the kernel of plain torch.

Triton decides at its import whether it interprets. So all of this runs in fresh processes with
``TRITON_INTERPRET=1`` in their environment, and the rest of the suite sees nothing of it.
"""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longseq import linear_attention
from megatron_longseq.lasp.segments import Gradients, Segments
from megatron_longseq.lasp.torch_kernels import TorchKernel
from megatron_longseq.lasp.triton_kernels import TritonKernel
from megatron_longseq.lasp.triton_kernels.decay import Decay
from megatron_longseq.launch import RankPool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

CHUNK = 16
# In two segments: documents of one token, of a whole chunk, over chunk boundaries; a head, a tail.
STARTS = ((0, 3, 4, 16, 32), (9, 21))


# The cases in fp64: what is asked of random_segments, and the tokens of a chunk.
CASES: dict[str, tuple[dict, int]] = {
    "scalar, documents, two states of one key": (
        {"decay": "scalar", "documents": True, "heads": (2, 1, 2)},
        16,
    ),
    "channel, documents, two queries of one state": (
        {"decay": "channel", "documents": True, "heads": (2, 1, 1), "tokens": 24},
        16,
    ),
    "constant, a batch, widths that fill no tile or need two": (
        {"decay": "constant", "heads": (1, 1, 1), "widths": (24, 40), "batch": 2, "tokens": 20},
        16,
    ),
    # Blocks inside a chunk; e^-1500 in it, whose inverse would overflow.
    "channel, strong": (
        {"decay": "channel", "strength": 100.0, "heads": (1, 1, 1), "widths": (24, 8)},
        32,
    ),
    "scalar, resets": ({"decay": "scalar", "resets": True, "heads": (1, 1, 1), "tokens": 24}, 16),
    "channel, resets": (
        {"decay": "channel", "resets": True, "heads": (1, 1, 1), "widths": (8, 8)},
        32,
    ),
    "none, two keys of one value": ({"decay": "none", "heads": (2, 2, 1), "tokens": 5}, 16),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INTERPRET = {"TRITON_INTERPRET": "1"}


def random_segments(
    decay: str,
    *,
    dtype: torch.dtype = torch.float64,
    batch: int = 1,
    tokens: int = 40,
    heads: tuple[int, int, int] = (2, 2, 2),
    widths: tuple[int, int] = (16, 16),
    documents: bool = False,
    strength: float = 1.0,
    resets: bool = False,
) -> Segments:
    """Two segments of ``tokens`` tokens, views into one tensor as a caller has them."""
    generator = torch.Generator().manual_seed(0)
    query_heads, key_heads, value_heads = heads

    def cut(*shape: int) -> Tensor:
        # Heads and widths of a fused projection: no dimension but the last is adjacent.
        whole = torch.randn(batch, 2 * tokens, *shape, generator=generator, dtype=torch.float64)
        return whole.to(dtype).unflatten(1, (2, tokens))

    def gates(*shape: int) -> Tensor:
        return -strength * torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    states, (d, e) = max(key_heads, value_heads), widths
    log_decay = {
        "none": lambda: None,
        "constant": lambda: gates(states),
        "scalar": lambda: gates(batch, 2, tokens, states),
        "channel": lambda: gates(batch, 2, tokens, states, d),
    }[decay]()
    if resets:
        log_decay[:, :, [2, 20]] = torch.finfo(dtype).min
        log_decay[:, :, 9] = -1e6
    starts = None
    if documents:
        starts = torch.zeros(2, tokens, dtype=torch.bool)
        for segment, places in enumerate(STARTS):
            starts[segment, [place for place in places if place < tokens]] = True
    mixed = cut(query_heads + key_heads, d)
    return Segments(
        query=mixed[..., :query_heads, :],
        key=mixed[..., query_heads:, :],
        value=cut(value_heads, e),
        log_decay=log_decay,
        starts=starts,
        scale=0.25,
    )


def as_reference(segments: Segments) -> Segments:
    """The same numbers in fp64."""
    tensors = {
        name: tensor.double()
        for name in ("query", "key", "value", "log_decay")
        if (tensor := getattr(segments, name)) is not None
    }
    return Segments(**tensors, starts=segments.starts, scale=segments.scale)


def all_results(kernel, segments: Segments, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the six parts of a kernel return, by name."""
    dtype = segments.state_dtype
    dout = given["dout"].to(segments.query.dtype)
    state, dstate = (given[name].to(dtype) for name in ("state", "dstate"))
    results = {}
    for name, pairs in (
        ("summary", kernel.summary(segments)),
        ("d_summary", kernel.d_summary(segments, dout)),
    ):
        results[f"{name}: A"] = torch.stack([pair.transition for pair in pairs])
        results[f"{name}: state"] = torch.stack([pair.state for pair in pairs])
    out, results["intra: state"] = kernel.intra(segments, dtype=dtype)
    results["intra"] = out.clone()
    kernel.apply(segments, out, state)
    results["apply"] = out
    gradients = kernel.d_intra(segments, dout, state, dtype=dtype)
    results |= by_name("d_intra", gradients)
    kernel.d_apply(segments, gradients, state, dstate)
    return results | by_name("d_apply", gradients)


def by_name(prefix: str, gradients: Gradients) -> dict[str, Tensor]:
    fields = ("query", "key", "value", "log_decay", "state")
    return {
        f"{prefix}: {name}": tensor.clone()
        for name in fields
        if (tensor := getattr(gradients, name)) is not None
    }


def random_states(segments: Segments) -> dict[str, Tensor]:
    """Output gradients, states and their gradients, of numbers that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1)
    batch, count, tokens = segments.key.shape[:3]
    out = batch, count, tokens, segments.out_heads, segments.value.shape[4]
    shapes = {"dout": out, "state": segments.state_shape, "dstate": segments.state_shape}
    return {
        name: torch.randn(shape, generator=generator).bfloat16().double()
        for name, shape in shapes.items()
    }


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error, relative to the largest entry of a result; and which result it is of."""
    assert found.keys() == expected.keys()
    errors = []
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        assert tensor.isfinite().all(), name
        error = (tensor.double() - expected[name]).abs().max().item()
        largest = (
            expected[name].abs().max().item()
        )  # 0: where a document cuts, or a decay underflows
        errors.append((error / largest if largest else error, name))
    return max(errors)


def largest_error(case: dict, chunk: int = CHUNK) -> tuple[float, str]:
    """Of all results of the Triton kernels, against those of torch in fp64."""
    segments = random_segments(**case)
    given = random_states(segments)
    assert TritonKernel().unusable(segments) is None
    # Another length of chunks: what agrees does not depend on where chunks begin.
    expected = all_results(TorchKernel(chunk=7), as_reference(segments), given)
    # New memory is NaN until it is written, so that whatever reads it unwritten shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert given["state"].new_empty(3).isnan().all()
    return relative_error(all_results(TritonKernel(chunk), segments, given), expected)


def parts_of_a_whole() -> tuple[float, str]:
    segments = random_segments("scalar", tokens=20, heads=(1, 1, 1))
    given = random_states(segments)
    kernel, dtype = TritonKernel(CHUNK), torch.float64
    dout, state, dstate = (given[name] for name in ("dout", "state", "dstate"))
    out, _ = kernel.intra(segments, dtype=dtype)
    kernel.apply(segments, out, state)
    gradients = kernel.d_intra(segments, dout, None, dtype=dtype)
    kernel.d_apply(segments, gradients, None, dstate)
    parts = {"out": out} | by_name("gradient", gradients)
    whole_out, after = kernel.intra(segments, dtype=dtype, state=state)
    gradients = kernel.d_intra(segments, dout, None, dtype=dtype, state_gradient=dstate)
    whole = {"out": whole_out} | by_name("gradient", gradients)
    for pair, before, found in zip(
        kernel.summary(segments), state.unbind(1), after.unbind(1), strict=True
    ):
        torch.testing.assert_close(found, pair.apply(before), rtol=1e-12, atol=1e-12)
    no_gates = kernel.d_intra(segments, dout, None, dtype=dtype, gates=False)
    assert no_gates.log_decay is None
    return relative_error(parts, whole)


def empty_segments() -> None:
    segments = random_segments("scalar", tokens=0)
    kernel = TritonKernel()
    for pair in kernel.summary(segments):
        assert (pair.transition == 1).all() and (pair.state == 0).all()
    out, after = kernel.intra(segments, dtype=torch.float64)
    kernel.apply(segments, out, after)
    assert out.numel() == 0 and (after == 0).all()


def errors() -> dict[str, tuple[float, str]]:
    """The largest error of each case, and of which result it is."""
    found = {name: largest_error(case, chunk) for name, (case, chunk) in CASES.items()}
    for name, dtype in DTYPES.items():
        case = {"decay": "channel" if name == "fp32" else "scalar", "dtype": dtype}
        case |= {"heads": (1, 1, 1), "tokens": 24, "resets": True}
        found[name] = largest_error(case)
    found["parts"] = parts_of_a_whole()
    empty_segments()
    return found


@pytest.fixture(scope="module")
def own_ranks():
    """A pool of its own: Triton reads the environment when it is imported, and that of all tests
    may have imported it for another test's module."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def interpreted(own_ranks) -> dict[str, tuple[float, str]]:
    """:func:`errors`, from one process in which Triton interprets."""
    return own_ranks.run(errors, world_size=1, environment=INTERPRET, timeout_seconds=300)[0]


@pytest.mark.parametrize("case", CASES)
def test_all_six_parts_equal_those_of_torch(interpreted, case):
    error, name = interpreted[case]
    assert error < 1e-12, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_and_sums_are_fp32_whatever_the_input(interpreted, dtype):
    error, name = interpreted[dtype]
    assert error < 1e-5, name


def test_what_is_done_before_and_after_a_scan_adds_up(interpreted):
    error, name = interpreted["parts"]
    assert error < 1e-12, name


def gradients_on_two_ranks(backend: str) -> list[Tensor]:
    """Output and gradients of the operator: zigzag, so two segments of 6 tokens a rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [
        torch.randn(1, 12, 1, width, generator=generator, dtype=torch.float64).requires_grad_()
        for width in (8, 8, 6)
    ]
    gate = torch.rand(1, 12, 1, generator=generator, dtype=torch.float64).neg().requires_grad_()
    out, _ = linear_attention(
        *inputs, log_decay=gate, group=dist.group.WORLD, schedule="ring", backend=backend
    )
    out.square().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in (*inputs, gate))]


def test_the_operator_takes_them_by_name(own_ranks):
    options = {"world_size": 2, "backend": "gloo", "timeout_seconds": 200, "environment": INTERPRET}
    found, expected = (
        own_ranks.run(gradients_on_two_ranks, args=(backend,), **options)
        for backend in ("triton", "torch")
    )
    for rank in range(2):
        torch.testing.assert_close(found[rank], expected[rank], rtol=1e-12, atol=1e-12)


def reasons_against() -> dict[str, str | None]:
    """Why the kernel cannot be used where Triton does not interpret, by what is asked of it."""
    segments = random_segments("scalar", tokens=2)
    delta = Segments(
        segments.query, segments.key, segments.value, beta=torch.ones(1, 2, 2, 2).double()
    )
    return {
        "a CPU": TritonKernel().unusable(segments),
        "delta rule": TritonKernel().unusable(delta),
    }


def test_says_why_it_cannot_be_used(own_ranks):
    reasons = own_ranks.run(reasons_against, world_size=1)[0]
    assert reasons["a CPU"] == "Triton compiles for CUDA, not for cpu"
    assert reasons["delta rule"] == "the delta rule has no Triton kernel"


def test_offsets_to_the_end_are_as_exact_in_a_long_run_as_in_a_short_one():
    log = -0.1 * torch.rand(1, 1 << 17, 1)
    found = Decay(log, 64, torch.float32).offsets(to_start=False)
    true = Decay(log.double(), 64, torch.float64).offsets(to_start=False)
    assert true[0, 0, 0] < -6e3 and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), true, rtol=1e-6, atol=0)


def test_a_chunk_that_no_matrix_unit_takes_is_refused():
    with pytest.raises(ValueError, match=r"chunk 48: there are 16, 32, 64"):
        TritonKernel(chunk=48)
