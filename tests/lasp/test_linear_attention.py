"""Linear attention over ranks equals the recurrence: output, states, every gradient, every rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from recurrences import (
    EXACT,
    KINDS,
    PACKED,
    Case,
    begin,
    errors,
    expected,
    finish,
    local,
    small_operator,
)
from torch.utils.checkpoint import checkpoint

from megatron_longseq.communication.scan import Scan

SCHEDULES = {
    "ring": {"schedule": "ring"},
    "gather": {"schedule": "all_gather"},
    "log": {"schedule": "log_scan"},
    "one block": {"schedule": "all_scan", "blocks": 1},
    "three blocks": {"schedule": "all_scan", "blocks": 3},
    "two levels": {"schedule": "two_level", "node_size": 2},
}
LAYOUTS = ("zigzag", "contiguous")


def references(cases):
    """What is expected of each case."""
    return {case: expected(case) for case, *_ in cases}


def parity(cases, wanted, group=None):
    """The largest error of each (case, layout, schedule), with the name of what is wrong."""
    group, operators, worst = group or dist.group.WORLD, {}, {}
    for case, layout, schedule in cases:
        if (layout, schedule) not in operators:
            options = {"timeout_seconds": 30, "check_agreement": False} | SCHEDULES[schedule]
            scan = Scan(group, layout=layout, **options)
            operators[layout, schedule] = small_operator(group, layout, scan=scan)
        found = errors(case, operators[layout, schedule], group, layout, wanted[case])
        worst[case, layout, schedule] = max((value, name) for name, value in found.items())
    return worst


def assert_exact(results):
    for rank, worst in enumerate(results):
        assert worst
        for case, (error, name) in worst.items():
            assert error < EXACT, (rank, case, name, error)


@pytest.fixture(scope="module")
def on_four_ranks(ranks):
    """Every kind x schedule x layout x dense or packed, and some more, in one start of ranks."""
    cases = [
        (Case(kind, documents), layout, schedule)
        for kind in KINDS
        for documents in (None, PACKED)
        for layout in LAYOUTS
        for schedule in SCHEDULES
    ] + [
        (Case(kind, documents, heads=heads, seed=1), layout, "ring")
        for kind, documents, heads, layout in GROUPED
    ]
    return ranks.run(
        parity, world_size=4, args=(cases, references(cases)), backend="gloo", timeout_seconds=200
    )


# (query, key, value) heads: grouped queries, multi-query, grouped values, and 3 heads on 4 ranks.
HEADS = ((4, 2, 2), (3, 1, 1), (1, 1, 2), (2, 2, 4), (3, 3, 3))
GROUPED = [
    (kind, (None, PACKED)[(i + j) % 2], heads, LAYOUTS[j % 2])
    for i, kind in enumerate(("constant", "scalar", "channel", "gated delta", "kda"))
    for j, heads in enumerate(HEADS)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_and_layout_equals_the_recurrence(on_four_ranks, kind):
    chosen = [
        {key: error for key, error in worst.items() if key[0].kind == kind}
        for worst in on_four_ranks
    ]
    assert all(len(worst) >= 24 for worst in chosen)
    assert_exact(chosen)


@pytest.mark.parametrize("heads", HEADS)
def test_fewer_key_or_value_heads_share_states_without_copies(on_four_ranks, heads):
    chosen = [
        {key: error for key, error in worst.items() if key[0].heads == heads}
        for worst in on_four_ranks
    ]
    assert_exact(chosen)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_other_numbers_of_ranks_equal_the_recurrence(ranks, size):
    # Pairwise: each kind meets each layout and both kinds of sequences, schedules take turns.
    names = list(SCHEDULES)[: None if size in (2, 8) else -1]
    cases = [
        (Case(kind, documents), layout, names[(2 * i + j + i // 3) % len(names)])
        for i, kind in enumerate(KINDS)
        for j, (documents, layout) in enumerate(
            ((None, "zigzag"), (PACKED, "contiguous"), (PACKED, "zigzag"), (None, "contiguous"))
        )
        if size < 8 or (i + j) % 2
    ]
    options = {"backend": "gloo", "timeout_seconds": 120}
    args = cases, references(cases)
    assert_exact(ranks.run(parity, world_size=size, args=args, **options))


IN_FLIGHT = (
    Case("scalar"),
    Case("kda", width=4, value_width=3, tokens=48, seed=3),
    Case("delta"),
)
# The two groups have other sequences, and so other sums.
APART = [
    [
        (Case(kind, PACKED, seed=seed), layout, "ring")
        for kind in ("scalar", "gated delta")
        for layout in LAYOUTS
    ]
    for seed in range(2)
]


def in_flight(group, wanted):
    """Micro-batches of two layers under way at once, an evaluation between; one operator."""
    operator = copy.deepcopy(small_operator(group))
    begun = [begin(case, operator, group, "zigzag") for case in IN_FLIGHT]
    with torch.no_grad():
        _, evaluated, _ = begin(IN_FLIGHT[0], operator, group, "zigzag")
    assert not evaluated.requires_grad and torch.equal(evaluated, begun[0][1])
    return [
        max((e, name) for name, e in finish(case, run, group, "zigzag", wanted[case]).items())
        for case, run in zip(IN_FLIGHT, begun, strict=True)
    ]


def recomputed(group):
    """Activation recomputation changes no bit."""
    operator, case, gradients = small_operator(group), Case("gated delta", states=False), []
    for recompute in (False, True):
        data, out_gradient, _ = case.inputs()
        tokens, _, _ = local(case, group, "zigzag")
        q, k, v, log_decay, beta = (tensor[:, tokens].requires_grad_() for tensor in data.values())

        def layer(q, k, v, log_decay=log_decay, beta=beta):
            return operator(q, k, v, log_decay=log_decay, beta=beta)[0]

        out = checkpoint(layer, q, k, v, use_reentrant=False) if recompute else layer(q, k, v)
        gradients.append(
            torch.autograd.grad(out, (q, k, v, log_decay, beta), out_gradient[:, tokens])
        )
    return all(map(torch.equal, *gradients))


def two_by_two(wanted):
    """The ranks of a sequence are two apart, as beside tensor parallelism of two."""
    here = dist.get_rank()
    group = [dist.new_group([first, first + 2]) for first in range(2)][here % 2]
    return parity(APART[here % 2], wanted, group), in_flight(group, wanted), recomputed(group)


@pytest.fixture(scope="module")
def on_two_groups_of_two(ranks):
    wanted = references([*APART[0], *APART[1], *((case,) for case in IN_FLIGHT)])
    return ranks.run(two_by_two, world_size=4, args=(wanted,), backend="gloo")


def test_neighbours_are_those_of_the_group_not_the_next_global_ranks(on_two_groups_of_two):
    # LASP's code sends to global rank + 1; mamba #664 mixes up the groups of TP and CP.
    assert_exact([worst for worst, _, _ in on_two_groups_of_two])


def test_micro_batches_of_two_layers_may_be_in_flight_at_once(on_two_groups_of_two):
    for _, worst, _ in on_two_groups_of_two:
        assert all(error < EXACT for error, _ in worst)


def test_recomputation_changes_no_bit(on_two_groups_of_two):
    assert all(same for _, _, same in on_two_groups_of_two)
