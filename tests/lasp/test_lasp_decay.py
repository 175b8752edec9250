"""Decay: the convention, its extremes, its gradient, and what 16 bits cost."""

import pytest
import torch
import torch.distributed as dist
from recurrences import (
    EXACT,
    KINDS,
    Case,
    begin,
    errors,
    expected,
    local,
    recurrence,
    small_operator,
)

from megatron_longseq.errors import UserError
from megatron_longseq.lasp import LinearAttentionOperator, decode, linear_attention
from megatron_longseq.lasp.segments import Segments
from megatron_longseq.lasp.torch_kernels import TorchKernel

CONVENTION = [
    Case(kind, decay=decay, batch=1)
    for kind in ("constant", "scalar", "channel", "gated delta")
    for decay in (0.5, 1.0)
]


FINAL = [Case(kind) for kind in KINDS[1:]]


def decays(wanted, wanted_of_final):
    """Errors for fixed decays, for a loss on the final state alone, and what underflow leaves."""
    group = dist.group.WORLD
    operators = {layout: small_operator(group, layout) for layout in ("zigzag", "contiguous")}
    fixed = {
        (case, layout): max((e, n) for n, e in errors(case, op, group, layout, reference).items())
        for case, reference in wanted.items()
        for layout, op in operators.items()
    }
    final = {
        (case.kind, layout): final_state_alone(case, operator, group, layout, of_final)
        for case, of_final in wanted_of_final.items()
        for layout, operator in operators.items()
    }
    return fixed, final, [underflow(operators["zigzag"], group, dtype) for dtype in (4, 8)]


def gradients_of_final(case):
    """Those of everything but the query, by name, if only the final state is in the loss."""
    data, _, state_gradient = case.inputs()
    leaves = {name: tensor.requires_grad_() for name, tensor in data.items()}
    _, state = recurrence(**leaves)
    names = [name for name in leaves if name != "q"]
    found = torch.autograd.grad(state, [leaves[name] for name in names], state_gradient)
    return dict(zip(names, found, strict=True))


def final_state_alone(case, operator, group, layout, wanted):
    """Largest error of these gradients."""
    names, (_, _, state_gradient) = list(wanted), case.inputs()
    tokens, _, last = local(case, group, layout)
    leaves, out, final = begin(case, operator, group, layout)
    # A rank whose output is in no loss still takes part.
    results, gradients = ([final], [state_gradient]) if last else ([out], [torch.zeros_like(out)])
    found = torch.autograd.grad(results, [leaves[name] for name in names], gradients)
    worst = 0.0
    for name, gradient, reference in zip(names, found, wanted.values(), strict=True):
        if name == "initial_state":
            continue
        if name == "log_decay" and case.kind == "constant":
            dist.all_reduce(gradient, group=group)
        elif reference.dim() > 2:
            reference = reference[:, tokens]
        worst = max(worst, (gradient - reference).abs().max().item())
    return worst


def underflow(operator, group, itemsize):
    """If every token forgets all, it reads its own write, and the last state is the last one's."""
    dtype = torch.float32 if itemsize == 4 else torch.float64
    case = Case("scalar", states=False)
    data, _, _ = case.inputs()
    tokens, _, _ = local(case, group, "zigzag")
    q, k, v = (data[name][:, tokens].to(dtype).requires_grad_() for name in "qkv")
    log_decay = torch.full(q.shape[:3], -800.0, dtype=dtype, requires_grad=True)
    out, state = operator(q, k, v, log_decay=log_decay, output_final_state=True)
    out.sum().backward()
    tolerance = 1e-5 if itemsize == 4 else 1e-12
    own = (q * k).sum(-1, keepdim=True) * v
    last = data["k"][:, -1, :, :, None].to(dtype) * data["v"][:, -1, :, None].to(dtype)
    return {
        "out": (out - own).abs().max().item() < tolerance,
        "state": torch.equal(state, last),
        "dq": (q.grad - k * v.sum(-1, keepdim=True)).abs().max().item() < tolerance,
        "log_decay": log_decay.grad.abs().max().item() < tolerance,
    }


@pytest.fixture(scope="module")
def decays_on_four_ranks(ranks):
    args = (
        {case: expected(case) for case in CONVENTION},
        {case: gradients_of_final(case) for case in FINAL},
    )
    return ranks.run(decays, world_size=4, args=args, backend="gloo", timeout_seconds=120)


def test_a_decay_of_one_half_has_no_factor_too_many(decays_on_four_ranks):
    # LASP's own code keeps its state times lambda; near 1 nobody would see that.
    for fixed, _, _ in decays_on_four_ranks:
        assert len(fixed) == 2 * len(CONVENTION)
        for case, (error, name) in fixed.items():
            assert error < EXACT, (case, name, error)


def test_a_loss_on_the_final_state_alone_reaches_every_decay(decays_on_four_ranks):
    # flash-linear-attention #459: the decay's gradient lacked the term of the final state.
    for _, final, _ in decays_on_four_ranks:
        assert len(final) == 2 * (len(KINDS) - 1)
        assert max(final.values()) < EXACT, final


def test_decay_that_underflows_leaves_exactly_nothing(decays_on_four_ranks):
    for _, _, kept in decays_on_four_ranks:
        assert all(all(found.values()) for found in kept), kept


@pytest.mark.parametrize("log_reset", [-1e2, -1e3, -1e5, -1e9, "least"])
@pytest.mark.parametrize("kind", ["scalar", "channel", "gated delta", "kda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_reset_inside_a_chunk_leaves_the_tokens_after_it_exact(dtype, kind, log_reset):
    case = Case(kind, tokens=70, batch=1, states=False)
    data, out_gradient, _ = case.inputs()
    reset = torch.finfo(dtype).min if log_reset == "least" else log_reset
    data["log_decay"] *= 0.1
    data["log_decay"][:, [5, 40]] = reset
    found, wanted = [], []
    for results, wide in ((found, dtype), (wanted, torch.float64)):
        leaves = {name: tensor.to(wide).requires_grad_() for name, tensor in data.items()}
        function = linear_attention if results is found else recurrence
        out, _ = function(**leaves)
        results += [out, *torch.autograd.grad(out, list(leaves.values()), out_gradient.to(wide))]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for name, actual, true in zip(("out", *data), found, wanted, strict=True):
        error = (actual.double() - true).abs().max() / true.abs().max()
        assert error < tolerance, (name, error)
    gate = found[1 + list(data).index("log_decay")]
    if reset < -746:
        assert (gate[:, [5, 40]] == 0).all(), "nothing passes that it could let through"


def test_minus_infinity_is_refused_with_what_resets():
    q = torch.ones(1, 4, 1, 2)
    with pytest.raises(UserError, match=r"forgets all before it, -104 or any number below"):
        linear_attention(q, q, q, log_decay=torch.full((1, 4, 1), -torch.inf))


def test_a_decay_of_one_is_no_decay():
    q, k, v = (torch.randn(1, 70, 2, 8, dtype=torch.float64) for _ in range(3))
    plain, state = linear_attention(q, k, v, output_final_state=True)
    for shape in ((2,), (1, 70, 2), (1, 70, 2, 8)):
        out, final = linear_attention(
            q, k, v, log_decay=torch.zeros(shape), output_final_state=True
        )
        assert torch.allclose(out, plain, rtol=1e-13, atol=1e-13)
        assert torch.allclose(final, state, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    case = Case(kind, tokens=5, batch=1, heads=(1, 1, 1), width=3, value_width=2)
    data, _, _ = case.inputs()
    operator = LinearAttentionOperator(None, backend=TorchKernel(chunk=2, chunks=1))

    def function(q, k, v, *rest):
        return operator(q, k, v, **dict(zip(list(data)[3:], rest, strict=True)), **case.options())

    leaves = [tensor.requires_grad_() for tensor in data.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def rounded(kind, dtype):
    """Inputs, and the gradient of the output, in ``dtype``; what fp64 makes of these very ones."""
    case = Case(kind, tokens=192, batch=1, states=False, decay=0.98, width=16, value_width=16)
    data, out_gradient, _ = case.inputs()
    data = {name: tensor.to(dtype) for name, tensor in data.items()}
    out_gradient = out_gradient.to(dtype)
    whole = {name: tensor.double().requires_grad_() for name, tensor in data.items()}
    out, _ = recurrence(**whole)
    found = torch.autograd.grad(out, list(whole.values())[:3], out_gradient.double())
    return case, data, out_gradient, [out.detach(), *found]


def low_precision(case, data, out_gradient, wanted):
    """Relative errors of out, dq, dk, dv of this rank's tokens."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    dtype = out_gradient.dtype
    tokens, _, _ = local(case, group, "zigzag")
    leaves = {
        name: (tensor[:, tokens] if tensor.dim() > 2 else tensor).clone().requires_grad_()
        for name, tensor in data.items()
    }
    q, k, v, *_ = leaves.values()
    gates = {name: leaf for name, leaf in leaves.items() if name not in ("q", "k", "v")}
    out, state = small_operator(group)(q, k, v, **gates, output_final_state=True)
    assert out.dtype == dtype and state.dtype == torch.float32
    actual = [out, *torch.autograd.grad(out, (q, k, v), out_gradient[:, tokens])]
    assert all(tensor.dtype == dtype for tensor in actual)
    return [
        ((a.double() - w[:, tokens]).norm() / w[:, tokens].norm()).item()
        for a, w in zip(actual, wanted, strict=True)
    ]


def low_precisions(given):
    return {key: low_precision(*arguments) for key, arguments in given.items()}


def test_errors_of_low_precision_do_not_grow_with_the_ranks(ranks):
    # LASP's code passes chunk states on in bf16; fla #740 composes transitions in bf16.
    given = {
        (dtype, kind): rounded(kind, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for kind in ("constant", "gated delta")
    }
    worst = {}
    for size in (1, 8):
        results = ranks.run(low_precisions, world_size=size, args=(given,), backend="gloo")
        for key in results[0]:
            columns = zip(*(result[key] for result in results), strict=True)
            worst[size, *key] = [max(column) for column in columns]
    for (size, dtype, kind), found in worst.items():
        assert max(found) < (4e-3 if dtype == torch.bfloat16 else 1e-6), (size, dtype, kind, found)
        if dtype == torch.bfloat16:
            # By rank, so that parts of the sequence differ in size.
            one = worst[1, dtype, kind]
            assert all(e < 1.5 * o for e, o in zip(found, one, strict=True)), (kind, found, one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_states_and_transitions_are_in_the_dtype_of_the_sums(dtype):
    q, k, v = (torch.randn(1, 2, 9, 2, 4, dtype=dtype) for _ in range(3))
    gates = {"log_decay": -torch.rand(1, 2, 9, 2), "beta": torch.rand(1, 2, 9, 2).to(dtype)}
    kernel, segments = TorchKernel(4, 2), Segments(q, k, v, **gates)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for pair in (*kernel.summary(segments), *kernel.d_summary(segments, v)):
        assert pair.transition.dtype == pair.state.dtype == wide
        assert pair.kind == "matrix"


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_does_not_reach_the_sums(causal):
    q, k, v = (torch.randn(1, 70, 2, 8, requires_grad=True) for _ in range(3))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, _ = linear_attention(q, k, v, causal=causal)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(map(torch.equal, *results))


def test_autocast_does_not_reach_decoding():
    q, k, v = (torch.randn(1, 3, 2, 8) for _ in range(3))
    plain = decode(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, decode(q, k, v), plain))
