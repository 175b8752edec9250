"""Decoding, the denominator, looking both ways, and sequences that come in pieces."""

import pytest
import torch
import torch.distributed as dist
from recurrences import EXACT, KINDS, PACKED, Case, errors, expected, recurrence, small_operator

from megatron_longseq.lasp import decode, linear_attention

MODES = [
    *(Case(kind, documents, normalize=True) for kind in KINDS[:4] for documents in (None, PACKED)),
    *(
        Case(kind, documents, causal=False, states=False, normalize=normalize, heads=heads)
        for kind in KINDS[:4]
        for documents in (None, PACKED)
        for normalize, heads in ((False, (2, 2, 2)), (True, (4, 2, 2)))
    ),
]
PROMPTS = [Case(kind, tokens=32, heads=(2, 2, 4), seed=7) for kind in KINDS]
PIECES = Case("gated delta", tokens=48, seed=8)


def modes(wanted, wanted_of_pieces):
    group = dist.group.WORLD
    worst = {}
    for case, reference in wanted.items():
        for layout in ("zigzag", "contiguous"):
            found = errors(case, small_operator(group, layout), group, layout, reference)
            worst[case, layout] = max((value, name) for name, value in found.items())
    decoded = {
        (case.kind, layout): prefill_and_decode(case, group, layout)
        for case in PROMPTS
        for layout in ("zigzag", "contiguous")
    }
    return worst, decoded, in_pieces(PIECES, group, wanted_of_pieces)


def prefill_and_decode(case, group, layout):
    """Error of tokens decoded on this rank after a prompt that all ranks have a part of."""
    data, _, _ = case.inputs()
    prompt = case.tokens // 2

    def piece(where):
        return {
            name: tensor[:, where] if tensor.dim() > 2 and "state" not in name else tensor
            for name, tensor in data.items()
        }

    part = small_operator(group, layout).chain.tokens(dist.get_rank(group), prompt)
    first, rest = piece(part), piece(torch.arange(prompt, case.tokens))
    q, k, v = (first.pop(name) for name in "qkv")
    _, state = small_operator(group, layout)(
        q, k, v, **first, scale=case.scale, output_final_state=True
    )
    whole = {name: tensor for name, tensor in data.items() if name not in ("q", "k", "v")}
    whole_out, final = linear_attention(
        *(data[name] for name in "qkv"), **whole, scale=case.scale, output_final_state=True
    )
    rest.pop("initial_state")
    outs = []
    for token in range(case.tokens - prompt):
        now = {n: t[:, token : token + 1] if t.dim() > 2 else t for n, t in rest.items()}
        out, state = decode(
            now.pop("q"), now.pop("k"), now.pop("v"), state, scale=case.scale, **now
        )
        outs.append(out)
    outs = torch.cat(outs, 1)
    return max(
        (outs - whole_out[:, prompt:]).abs().max().item(), (state - final).abs().max().item()
    )


def in_pieces(case, group, wanted):
    """Error of out and gradients if the sequence comes in two pieces, the second from a state."""
    operator = small_operator(group)
    data, out_gradient, _ = case.inputs()
    length = case.tokens // 2
    state, outs, leaves = None, [], []
    positions = []
    for start in (0, length):
        tokens = operator.chain.tokens(dist.get_rank(group), length) + start
        positions.append(tokens)
        own = {
            name: tensor[:, tokens].clone().requires_grad_()
            for name, tensor in data.items()
            if name != "initial_state"
        }
        leaves.append(own)
        q, k, v, log_decay, beta = own.values()
        initial = data["initial_state"] if state is None else state
        out, state = operator(
            q,
            k,
            v,
            log_decay=log_decay,
            beta=beta,
            initial_state=initial,
            output_final_state=True,
            scale=case.scale,
        )
        outs.append(out)
    flat = [leaf for own in leaves for leaf in own.values()]
    found = torch.autograd.grad(outs, flat, [out_gradient[:, tokens] for tokens in positions])
    names = [(name, tokens) for own, tokens in zip(leaves, positions, strict=True) for name in own]
    worst = max(
        (out - wanted["out"][:, tokens]).abs().max().item()
        for out, tokens in zip(outs, positions, strict=True)
    )
    for (name, tokens), gradient in zip(names, found, strict=True):
        worst = max(worst, (gradient - wanted[f"d {name}"][:, tokens]).abs().max().item())
    return worst


@pytest.fixture(scope="module")
def modes_on_four_ranks(ranks):
    args = {case: expected(case) for case in MODES}, without_final(PIECES)
    return ranks.run(modes, world_size=4, args=args, backend="gloo", timeout_seconds=120)


def without_final(case):
    """What is expected if the final state is in no loss."""
    data, out_gradient, _ = case.inputs()
    leaves = {name: tensor.requires_grad_() for name, tensor in data.items()}
    out, _ = recurrence(**leaves, scale=case.scale)
    found = torch.autograd.grad(out, list(leaves.values()), out_gradient)
    gradients = {f"d {name}": g for name, g in zip(leaves, found, strict=True)}
    return {"out": out.detach()} | gradients


@pytest.mark.parametrize("causal", [True, False])
def test_denominator_and_both_ways_equal_their_definitions(modes_on_four_ranks, causal):
    for worst, _, _ in modes_on_four_ranks:
        chosen = {key: error for key, error in worst.items() if key[0].causal == causal}
        assert len(chosen) == (16 if causal else 32)
        for case, (error, name) in chosen.items():
            assert error < EXACT, (case, name, error)


def test_decoding_on_any_rank_continues_a_prompt_spread_over_all(modes_on_four_ranks):
    for _, decoded, _ in modes_on_four_ranks:
        assert len(decoded) == 2 * len(KINDS)
        assert max(decoded.values()) < EXACT, decoded


def test_a_sequence_in_pieces_is_the_whole_sequence(modes_on_four_ranks):
    # Sequence accumulation: on the zigzag rank 0 holds both ends, so autograd carries dS itself.
    for _, _, error in modes_on_four_ranks:
        assert error < EXACT


@pytest.mark.parametrize("case", [MODES[3], MODES[4], MODES[9], MODES[-2]], ids=str)
def test_modes_of_one_process(case):
    found = errors(case, small_operator(None), None, "zigzag", expected(case))
    assert max(found.values()) < EXACT, found


@pytest.mark.parametrize(
    "kind, normalize",
    [*((kind, False) for kind in KINDS), ("scalar", True), ("channel", True), ("none", True)],
)
def test_decoding_by_itself_is_the_recurrence(kind, normalize):
    case = Case(kind, tokens=12, heads=(4, 2, 2), normalize=normalize)
    data, _, _ = case.inputs()
    names = {"initial_state": "state"}
    out, state = decode(
        **{names.get(name, name): tensor for name, tensor in data.items()},
        scale=case.scale,
        normalize=normalize,
    )
    wanted = expected(case)
    assert torch.allclose(out, wanted["out"], rtol=1e-12, atol=1e-12)
    assert torch.allclose(state, wanted["final"], rtol=1e-12, atol=1e-12)


def test_decoding_leaves_the_given_state_alone():
    q, k, v = (torch.randn(1, 1, 2, 4) for _ in range(3))
    state = torch.randn(1, 2, 4, 4)
    before = state.clone()
    decode(q, k, v, state, log_decay=torch.tensor([-0.5, -1.0]))
    assert torch.equal(state, before)


def test_a_token_does_not_see_what_comes_after_it():
    # Linear-MoE's kernel leaked future tokens inside its diagonal blocks.
    for kind in KINDS:
        data, _, _ = Case(kind, states=False, batch=1).inputs()
        late = {n: t.clone() for n, t in data.items()}
        for name, tensor in late.items():
            if tensor.dim() > 2:
                tensor[:, 50:] = torch.rand_like(tensor[:, 50:]) * (-1 if "log" in name else 1)
        outs = [small_operator(None)(*list(d.values())[:3], **rest(d))[0] for d in (data, late)]
        assert torch.equal(outs[0][:, :50], outs[1][:, :50]), kind
        assert not torch.allclose(outs[0][:, 50:], outs[1][:, 50:])


def rest(data):
    return {name: tensor for name, tensor in data.items() if name not in ("q", "k", "v")}
