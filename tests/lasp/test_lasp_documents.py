"""Packed documents: any lengths, cut anywhere; ranks talk only where a document crosses."""

import pytest
import torch
import torch.distributed as dist
from recurrences import EXACT, KINDS, Case, errors, expected, local, small_operator

from megatron_longseq.document_boundaries import boundaries_of, describe_boundaries
from megatron_longseq.errors import UserError
from megatron_longseq.lasp.documents import Documents
from megatron_longseq.measurement import MeasuredTransport
from megatron_longseq.token_layout import SegmentChain

# Over 96 tokens, that is segments of 12 on the zigzag of four ranks and of 24 on contiguous parts.
LISTS = {
    "one document": (0, 96),
    "one token at either end": (0, 1, 95, 96),
    "over three ranks": (0, 20, 70, 96),
    "a start on a boundary": (0, 24, 96),
    "only some ranks cross": (0, 12, 24, 48, 60, 72, 84, 96),
    "empty ones": (0, 0, 30, 30, 30, 96, 96),
    "many in one segment": (0, 2, 3, 5, 9, 11, 96),
}
SEPARATE = {
    "none crosses": (0, 12, 24, 36, 48, 60, 72, 84, 96),
    "none crosses, more starts": (0, 5, 12, 24, 24, 36, 48, 50, 60, 72, 84, 96),
    "one token each": tuple(range(97)),
}


CASES = [
    (name, Case(KINDS[at % len(KINDS)], documents, states=name in LISTS, batch=1))
    for at, (name, documents) in enumerate({**LISTS, **SEPARATE}.items())
]
STATES_ONLY = Case("gated delta", SEPARATE["none crosses"], batch=1, seed=5)


def packed(wanted):
    """Errors by list; for lists that nothing crosses, the messages sent as well."""
    transport, worst, messages = MeasuredTransport(), {}, {}
    group = dist.new_group(backend=transport.register())
    for name, case in CASES:
        for layout in ("zigzag", "contiguous"):
            operator = small_operator(group, layout, check_agreement=False)
            before = transport.traffic.snapshot()
            found = errors(case, operator, group, layout, wanted[case])
            worst[name, layout, case.kind] = max((value, which) for which, value in found.items())
            # The test itself adds up the gradient of a constant decay.
            calls = (transport.traffic - before).total().calls - (case.kind == "constant")
            messages[name, layout] = calls
    return worst, messages, last_state_only(group, wanted[STATES_ONLY])


def last_state_only(group, reference):
    """Nothing crosses, but the states are asked for; as a list and as a tensor."""
    operator = small_operator(group)
    case = STATES_ONLY
    found = errors(case, operator, group, "zigzag", reference)
    data, _, _ = case.inputs()
    tokens, _, _ = local(case, group, "zigzag")
    q, k, v = (data[name][:, tokens] for name in "qkv")
    outs = [
        operator(q, k, v, cu_seqlens=documents)[0]
        for documents in (list(case.documents), torch.tensor(case.documents, dtype=torch.int32))
    ]
    return max(found.values()), torch.equal(*outs)


@pytest.fixture(scope="module")
def packed_on_four_ranks(ranks):
    wanted = {case: expected(case) for case in (STATES_ONLY, *(case for _, case in CASES))}
    return ranks.run(packed, world_size=4, args=(wanted,), backend="gloo")


def test_documents_of_any_lengths_equal_the_recurrence_on_every_rank(packed_on_four_ranks):
    for worst, _, _ in packed_on_four_ranks:
        for case, (error, name) in worst.items():
            assert error < EXACT, (case, name, error)


def test_no_operation_is_issued_where_no_document_crosses(packed_on_four_ranks):
    for _, messages, _ in packed_on_four_ranks:
        for (name, layout), calls in messages.items():
            # Where 12 tokens are not crossed, 24 are not either.
            assert (calls == 0) == (name in SEPARATE), (name, layout, calls)


def test_states_enter_and_leave_though_nothing_crosses(packed_on_four_ranks):
    for _, _, (error, same) in packed_on_four_ranks:
        assert error < EXACT and same


def starts(boundaries, layout="zigzag", ranks=2, total=24, **options):
    """Global tokens at which documents start, by rank, and whether any crosses a boundary."""
    chain, found, connected = SegmentChain(ranks, layout), [], set()
    for rank in range(ranks):
        documents = Documents.of(boundaries, chain, rank, total, torch.device("cpu"), **options)
        connected.add(documents.connected)
        marks = torch.zeros(chain.segments_per_rank, total // chain.length, dtype=torch.bool)
        marks = marks if documents.starts is None else documents.starts
        if options.get("reverse"):
            marks = marks.flip(1)
        found.append(chain.tokens(rank, total)[marks.flatten()].tolist())
    assert len(connected) == 1
    return found, connected.pop()


def test_a_start_is_marked_on_the_rank_that_holds_the_token():
    assert starts([0, 5, 6, 12, 24]) == ([[5], [6, 12]], True)
    assert starts([0, 5, 6, 12, 24], "contiguous") == ([[5, 6], [12]], False)
    assert starts([0, 6, 12, 18, 24]) == ([[18], [6, 12]], False)
    assert starts(None) == ([[], []], True)
    # Empty documents have no token to start at; the chain's own start is no cut.
    assert starts([0, 0, 7, 7, 24, 24]) == ([[], [7]], True)


def test_against_time_a_document_starts_at_its_last_token():
    assert starts([0, 5, 6, 12, 24], reverse=True) == ([[4, 5], [11]], True)


@pytest.mark.parametrize(
    "boundaries, message",
    [
        ([0, 20], r"cu_seqlens from \[0\] to \[20\]: it must begin with 0 and end with 24"),
        ([1, 24], "must begin with 0 and end with 24, the tokens of all ranks together"),
        ([], "an empty list"),
        ([0, 9, 8, 24], r"cu_seqlens\[2\] = 8 is less than cu_seqlens\[1\] = 9"),
        (torch.tensor([[0, 24]]), "one dimension of integers"),
        (torch.tensor([0.0, 24.0]), "torch.float32: expected one dimension of integers"),
    ],
)
def test_a_list_that_cannot_be_is_refused(boundaries, message):
    with pytest.raises(UserError, match=message):
        boundaries_of(boundaries, 24)


def test_lists_that_differ_are_described_differently():
    long = list(range(0, 4000, 2))
    other = [*long[:1000], long[1000] + 1, *long[1001:]]
    assert describe_boundaries(long) != describe_boundaries(other)
    assert len(describe_boundaries(long)) < 500
    assert describe_boundaries([0, 4]) == "[0, 4]"
