"""The kernel's contract: its six parts fit together, whatever the tiles; no unwritten memory."""

from dataclasses import replace

import pytest
import torch
from recurrences import KINDS, Case

from megatron_longseq.errors import UserError
from megatron_longseq.lasp.chunk_kernels import choose_kernel, kernels
from megatron_longseq.lasp.segments import Segments
from megatron_longseq.lasp.torch_kernels import TorchKernel

F64 = torch.float64
HEADS = ((2, 2, 2), (4, 2, 2), (1, 1, 2))


def segments_of(kind, heads=(2, 2, 2), packed=False, tokens=23, width=8):
    """Two segments, and random (state, gradient of the state after, of the output)."""
    case = Case(kind, heads=heads, tokens=2 * tokens, batch=1, width=width)
    data, out_gradient, state_gradient = case.inputs()
    cut = {
        name: tensor.unflatten(1, (2, -1)) if tensor.dim() > 2 and "state" not in name else tensor
        for name, tensor in data.items()
    }
    state = torch.stack((cut.pop("initial_state"), state_gradient), 1)
    starts = None
    if packed:
        starts = torch.zeros(2, tokens, dtype=torch.bool)
        starts[0, [0, 3, 4, 17]] = True
        starts[1, [20]] = True
    log_decay, beta = cut.get("log_decay"), cut.get("beta")
    segments = Segments(cut["q"], cut["k"], cut["v"], log_decay, beta, starts, 0.7)
    return segments, state, state.flip(1), out_gradient.unflatten(1, (2, -1))


def everything(kernel, segments, state, state_gradient, out_gradient):
    """All results of a kernel, with the state and its gradient known from the start."""
    out, after = kernel.intra(segments, dtype=F64, state=state)
    gradients = kernel.d_intra(
        segments, out_gradient, state, dtype=F64, state_gradient=state_gradient
    )
    return {"out": out, "after": after} | {
        f"d {name}": value for name, value in vars(gradients).items() if value is not None
    }


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.allclose(value, expected[name], rtol=1e-11, atol=1e-11), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ("constant", "scalar", "channel", "gated delta"))
def test_other_gradients_are_the_same_without_that_of_the_decay(kind, packed):
    kernel = TorchKernel(chunk=5, chunks=3)
    for heads in HEADS:
        segments, state, state_gradient, dout = segments_of(kind, heads, packed)
        found = {}
        for gates in (True, False):
            result = kernel.d_intra(segments, dout, state, dtype=F64, gates=gates)
            kernel.d_apply(segments, result, state, state_gradient)
            found[gates] = {name: value for name, value in vars(result).items()}
        assert found[False].pop("log_decay") is None
        del found[True]["log_decay"]
        if segments.beta is None:
            assert found[False].pop("beta") is found[True].pop("beta") is None
        assert_close(found[False], found[True])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_two_phases_equal_one(kind, packed):
    for heads in HEADS:
        kernel = TorchKernel(chunk=5, chunks=3)
        segments, state, state_gradient, out_gradient = segments_of(kind, heads, packed)
        whole = everything(kernel, segments, state, state_gradient, out_gradient)
        out, own = kernel.intra(segments, dtype=F64)
        kernel.apply(segments, out, state)
        gradients = kernel.d_intra(segments, out_gradient, state, dtype=F64)
        from_outputs = gradients.state.clone()
        kernel.d_apply(segments, gradients, state, state_gradient)
        forward = kernel.summary(segments)
        backward = kernel.d_summary(segments, out_gradient)
        after = [pair.apply(state[:, i]) for i, pair in enumerate(forward)]
        before = [pair.apply(state_gradient[:, i]) for i, pair in enumerate(backward)]
        halves = {"out": out, "after": torch.stack(after, 1)} | {
            f"d {name}": value for name, value in vars(gradients).items() if value is not None
        }
        assert_close(halves, whole)
        assert_close({"": torch.stack(before, 1)}, {"": whole["d state"]})
        assert_close({"": own}, {"": torch.stack([pair.state for pair in forward], 1)})
        assert_close({"": from_outputs}, {"": torch.stack([pair.state for pair in backward], 1)})
        for one, other in zip(forward, backward, strict=True):
            matrix = one.kind == "matrix"
            assert_close(
                {"": other.transition},
                {"": one.transition.mT if matrix else one.transition},
            )
        if packed:
            # A cut passes exactly nothing on.
            assert all((pair.transition == 0).all() for pair in forward)
            if gradients.log_decay is not None and gradients.log_decay.dim() > 1:
                # The decay of a document's first token acts on nothing, exactly.
                assert (gradients.log_decay[0][segments.starts] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_do_not_matter(kind):
    given = segments_of(kind, packed=True, tokens=34)
    # Decay per channel goes through a reference token in chunks of more than 16.
    first, *others = (
        everything(TorchKernel(*size), *given)
        for size in ((64, 16), (1, 20), (7, 1), (33, 1), (34, 1))
    )
    for other in others:
        assert_close(other, first)


@pytest.mark.parametrize("kind", ["channel", "kda"])
def test_strong_decay_per_channel_does_not_overflow(kind):
    # exp(-b) alone would: b falls to -1900 inside a chunk.
    segments, *given = segments_of(kind, tokens=46)
    strong = replace(segments, log_decay=segments.log_decay * 60)
    for one, other in zip(
        everything(TorchKernel(64, 1), strong, *given).values(),
        everything(TorchKernel(4, 1), strong, *given).values(),
        strict=True,
    ):
        assert one.isfinite().all()
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_unwritten_is_read(kind):
    # LASP's kernels read torch.empty; Linear-MoE leaves tails unwritten.
    given, clean = segments_of(kind), TorchKernel(chunk=5, chunks=3)
    expected = everything(clean, *given)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        poisoned = everything(TorchKernel(chunk=5, chunks=3), *given)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert_close(poisoned, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_left_as_they_were(kind):
    segments, *given = segments_of(kind, tokens=8)
    tensors = [t for t in (*vars(segments).values(), *given) if isinstance(t, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    everything(TorchKernel(chunk=5, chunks=3), segments, *given)
    kernel = TorchKernel(chunk=5, chunks=3)
    kernel.summary(segments)
    kernel.d_summary(segments, given[2])
    assert all(map(torch.equal, tensors, before))


def test_kernels_are_chosen_by_name_and_refused_with_a_reason():
    class Never(TorchKernel):
        name = "never"

        def unusable(self, segments):
            return "it has no engine"

    segments, *_ = segments_of("scalar")
    assert choose_kernel("torch", segments).name == "torch"
    assert choose_kernel("auto", segments).unusable(segments) is None
    with pytest.raises(UserError, match=r"backend 'fast': unknown; there are auto, .*torch"):
        choose_kernel("fast", segments)
    assert "torch" in kernels()
