"""A convolution over ranks equals one over the whole sequence: outputs and every gradient."""

import copy

import pytest
import torch
import torch.distributed as dist

from megatron_longseq.errors import UserError
from megatron_longseq.lasp.halo import CausalConvolution
from megatron_longseq.token_layout import SegmentChain

BATCH, TOKENS, CHANNELS = 2, 48, 5


def whole_sequence(width, states):
    """Inputs, and output, final rows and gradients by definition, over the whole sequence."""
    generator = torch.Generator().manual_seed(width)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = random(BATCH, TOKENS, CHANNELS).requires_grad_()
    weight = random(CHANNELS, width).requires_grad_()
    initial = random(BATCH, width - 1, CHANNELS).requires_grad_()
    out_gradient, final_gradient = random(*x.shape), random(*initial.shape)
    before = initial if states else torch.zeros_like(initial)
    rows = torch.cat((before, x), 1)
    out = torch.stack(
        [(rows[:, t : t + width].transpose(1, 2) * weight).sum(2) for t in range(TOKENS)], 1
    )
    final = rows[:, rows.shape[1] - (width - 1) :]
    results, gradients = [out], [out_gradient]
    if states:
        results.append(final)
        gradients.append(final_gradient)
    found = torch.autograd.grad(results, [x, weight, initial], gradients, allow_unused=True)
    inputs = tuple(t.detach() for t in (x, weight, initial))
    return inputs, (out_gradient, final_gradient), (out.detach(), final.detach(), *found)


def over_ranks(cases):
    """The largest error of each case on this rank."""
    torch.set_num_threads(1)
    group, worst = dist.group.WORLD, {}
    rank, size = dist.get_rank(), dist.get_world_size()
    for width, layout, states, staging in cases:
        inputs, gradients, wanted = whole_sequence(width, states)
        chain = SegmentChain(size, layout)
        tokens = chain.tokens(rank, TOKENS)
        convolution = CausalConvolution(group, layout=layout, timeout_seconds=30, staging=staging)
        assert copy.deepcopy(convolution) is convolution
        first, last = chain.holder(0)[0] == rank, chain.holder(chain.length - 1)[0] == rank
        x = inputs[0][:, tokens].requires_grad_()
        weight = inputs[1].clone().requires_grad_()
        initial = inputs[2] if first else torch.full_like(inputs[2], torch.nan)
        initial.requires_grad_()
        out, final = convolution(
            x,
            weight,
            initial_rows=initial if states else None,
            output_final_rows=states,
        )
        results, leaves, given = [out], [x, weight], [gradients[0][:, tokens]]
        if states:
            leaves.append(initial)
            assert final.requires_grad == last
            if last:
                results.append(final)
                given.append(gradients[1])
        dx, dweight, *rest = torch.autograd.grad(results, leaves, given)
        dist.all_reduce(dweight)
        pairs = [(out, wanted[0][:, tokens]), (dx, wanted[2][:, tokens]), (dweight, wanted[3])]
        if states:
            pairs.append((final, wanted[1]))
            pairs.append((rest[0], wanted[4] if first else torch.zeros_like(wanted[4])))
        errors = [(a - b).abs().max().item() for a, b in pairs if b.numel()]
        assert all(e == e for e in errors)
        worst[width, layout, states, staging] = max(errors)
    return worst


CASES = [
    (width, layout, states, "auto")
    for width in (1, 2, 4)
    for layout in ("zigzag", "contiguous")
    for states in (False, True)
] + [(4, "zigzag", True, "always")]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_convolution_over_ranks_equals_one_process(size, ranks):
    for worst in ranks.run(over_ranks, world_size=size, args=(CASES,), backend="gloo"):
        assert len(worst) == len(CASES)
        for case, error in worst.items():
            assert error < 1e-12, (case, error)


def traffic():
    """Bytes this rank sends, forward and backward, on a sequence of two lengths."""
    from megatron_longseq.measurement import TrafficCounter

    sent = []
    for tokens in (12, 24):
        convolution = CausalConvolution(dist.group.WORLD, timeout_seconds=30)
        x = torch.zeros(1, tokens, 3, dtype=torch.float64, requires_grad=True)
        with TrafficCounter() as counter:
            out, _ = convolution(x, torch.zeros(3, 4, dtype=torch.float64, requires_grad=True))
            out.sum().backward()
        sent.append(counter.traffic.total().bytes_sent)
    return sent


def test_what_is_sent_does_not_grow_with_the_sequence(ranks):
    row = 1 * 3 * 3 * 8  # batch x (width - 1) x channels, fp64
    # One segment of each rank has a successor on the other, and one a predecessor.
    assert ranks.run(traffic, world_size=2, backend="gloo") == [[2 * row, 2 * row]] * 2


def refusals():
    """What is said of segments that are too short, and of inputs that do not fit."""
    convolution = CausalConvolution(dist.group.WORLD, timeout_seconds=30)
    weight, messages = torch.zeros(3, 4), []
    for tokens, rows in ((4, None), (7, None), (8, torch.zeros(1, 2, 3))):
        with pytest.raises(UserError) as error:
            convolution(torch.zeros(1, tokens, 3), weight, initial_rows=rows)
        messages.append(str(error.value))
    return messages


def test_a_segment_shorter_than_the_window_is_refused(ranks):
    short, odd, rows = ranks.run(refusals, world_size=2, backend="gloo")[0]
    assert "segments of 2 tokens" in short and "at least 12 tokens" in short
    assert "must be even" in odd
    assert "initial_rows of shape (1, 2, 3)" in rows and "[1, 3, 3]" in rows


def test_the_last_rows_hold_no_more_than_themselves():
    # They are kept between the chunks of a sequence: a view would keep every chunk's tokens.
    x, weight = torch.randn(2, 64, 6), torch.randn(6, 4)
    _, final = CausalConvolution(None)(x, weight, output_final_rows=True)
    assert final.untyped_storage().nbytes() == final.nbytes == 2 * 3 * 6 * 4
    assert torch.equal(final, x[:, -3:])
