"""What a call sends, keeps and computes, and in which order."""

import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist

from megatron_longseq.communication.scan import SCAN, LinkCosts, Scan, ScanShape, scan_traffic
from megatron_longseq.lasp import LinearAttentionOperator
from megatron_longseq.lasp.torch_kernels import TorchKernel
from megatron_longseq.measurement import (
    LiveBytes,
    MeasuredTransport,
    held_after,
    saved_for_backward,
)

B, H, D, E, N = 2, 2, 8, 6, 96
SCHEDULES = {
    "ring": {"schedule": "ring"},
    "all_gather": {"schedule": "all_gather"},
    "log_scan": {"schedule": "log_scan"},
    "all_scan": {"schedule": "all_scan", "blocks": 3},
    "two_level": {"schedule": "two_level", "node_size": 2},
}
# By kind of transition: its elements, and whether gates make it one.
TRANSITIONS = {"scalar": B * H, "diagonal": B * H * D, "matrix": B * H * D * D}


def arguments(kind, tokens, dtype=torch.float32, batch=B):
    """(q, k, v) and gates of one rank, leaves."""
    shape = batch, tokens, H
    gates = {}
    if kind != "constant":
        gates["log_decay"] = -torch.rand(*shape, D) if kind == "diagonal" else -torch.rand(shape)
    if kind == "matrix":
        gates["beta"] = torch.rand(shape)
    gates = {name: gate.requires_grad_() for name, gate in gates.items()}
    data = [torch.randn(*shape, w, dtype=dtype, requires_grad=True) for w in (D, D, E)]
    return data, gates


def costs():
    """((messages, bytes) counted, by formula) of each pass; what backward keeps; the order."""
    transport = MeasuredTransport(streams={SCAN.tag: SCAN.name})
    group = dist.new_group(backend=transport.register())
    size, rank = group.size(), group.rank()
    sent = {}
    for kind, elements in TRANSITIONS.items():
        data, gates = arguments(kind, N // size)
        for layout in ("zigzag", "contiguous"):
            for name, options in SCHEDULES.items():
                scan = Scan(group, layout=layout, check_agreement=False, **options)
                operator = LinearAttentionOperator(
                    group, layout=layout, scan=scan, check_agreement=False
                )
                shape = ScanShape(
                    size,
                    layout,
                    state_bytes=4 * B * H * D * E,
                    transition_bytes=4 * elements,
                    composes_cheaply=kind != "matrix",
                    split_transition=kind == "diagonal",
                    blocks=options.get("blocks", 1),
                    node_size=options.get("node_size"),
                )
                counts = []
                before = transport.traffic.snapshot()
                out, _ = operator(*data, **gates)
                for reverse in (False, True):
                    if reverse:
                        # One scan, not two: the states that came in are still here.
                        before = transport.traffic.snapshot()
                        out.sum().backward()
                    # What a rank sends leaves before the call ends on the rank that gets it.
                    dist.barrier()
                    total = (transport.traffic - before).total(operation="send")
                    if name == "all_gather":
                        total = (transport.traffic - before).total()
                    formula = scan_traffic(name, shape, rank, reverse=reverse)
                    counts.append(
                        ((total.messages, total.bytes_sent), (formula.messages, formula.bytes))
                    )
                sent[kind, layout, name] = counts
    shown = predicted(group, transport)
    return sent, both_ways(group, transport), kept(group), order(group), shown


def both_ways(group, transport):
    """Bytes summed over the ranks for one bidirectional pass, and for its backward."""
    data, _ = arguments("constant", N // group.size())
    operator = LinearAttentionOperator(group, check_agreement=False)
    payloads = []
    before = transport.traffic.snapshot()
    out, _ = operator(*data, causal=False)
    payloads.append((transport.traffic - before).total().payload_bytes)
    before = transport.traffic.snapshot()
    out.sum().backward()
    payloads.append((transport.traffic - before).total().payload_bytes)
    return payloads


def kept(group):
    """Bytes saved for backward, and held otherwise, beyond the inputs; then inputs included."""
    found = {}
    operator = LinearAttentionOperator(group, check_agreement=False)
    for kind in TRANSITIONS:
        data, gates = arguments(kind, N // group.size(), torch.bfloat16)
        inputs = [*data, *gates.values()]
        held = held_after(lambda d=data, g=gates: operator(*d, **g)[0], exclude=inputs)
        with saved_for_backward() as saved:
            out, _ = operator(*data, **gates)
        of_inputs = sum(t.numel() * t.element_size() for t in inputs)
        found[kind] = (held.saved, held.unseen, saved.bytes - of_inputs)
        out.sum().backward()
    return found


class Watched(TorchKernel):
    """Notes its calls, and the tokens it is given."""

    def __init__(self, events):
        super().__init__()
        self._events = events

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name not in ("summary", "intra", "apply", "d_summary", "d_intra", "d_apply"):
            return method

        def noted(segments, *args, **kwargs):
            self._events.append((name, segments.key.shape[1] * segments.key.shape[2]))
            return method(segments, *args, **kwargs)

        return noted


class WatchedScan(Scan):
    """Notes when a scan starts and when it is waited for."""

    def start(self, *args, **kwargs):
        handle = super().start(*args, **kwargs)
        self.events.append("start")
        self.hidden.append(kwargs["hidden_seconds"])
        wait = handle.wait

        def noted():
            self.events.append("wait")
            return wait()

        handle.wait = noted
        return handle


def order(group):
    """The kernel's and the scan's calls in the order of a forward and a backward pass."""
    events = []
    scan = WatchedScan(group, check_agreement=False)
    scan.events, scan.hidden = events, []
    operator = LinearAttentionOperator(
        group, scan=scan, backend=Watched(events), check_agreement=False
    )
    data, gates = arguments("scalar", N // group.size())
    operator(*data, **gates)[0].sum().backward()
    return events


def predicted(group, transport):
    """Seconds each pass says it hides of its scan; gathers that "auto" starts for them."""
    # On such links a gather takes longest, and is the one with fewest steps.
    links = {"latency_seconds": 0.0, "seconds_per_byte": 1.0}
    found = []
    for given, tokens in (
        ({"flops_per_second": 1.0}, N),
        ({"flops_per_second": 1.0}, 2 * N),
        ({"flops_per_second": 1e30}, N),
        ({"hidden_seconds": 1e9}, N),
    ):
        scan = WatchedScan(group, costs=LinkCosts(**links, **given), check_agreement=False)
        scan.events, scan.hidden = [], []
        operator = LinearAttentionOperator(group, scan=scan, check_agreement=False)
        data, gates = arguments("matrix", tokens)
        before = transport.traffic.snapshot()
        operator(*data, **gates)[0].sum().backward()
        dist.barrier()
        gathers = (transport.traffic - before).total(operation="all_gather").calls
        found.append((scan.hidden, gathers))
    return found


@pytest.fixture(scope="module")
def costs_on_four_ranks(ranks):
    return ranks.run(costs, world_size=4, backend="gloo", timeout_seconds=120)


def test_both_passes_send_what_the_formula_of_one_scan_says(costs_on_four_ranks):
    for rank, (sent, *_) in enumerate(costs_on_four_ranks):
        assert len(sent) == 30
        for case, passes in sent.items():
            for counted, formula in passes:
                assert counted == formula, (rank, case, counted, formula)


def test_both_ways_without_decay_sum_one_state_each_pass(costs_on_four_ranks):
    for _, payloads, *_ in costs_on_four_ranks:
        assert payloads == [4 * B * H * D * E] * 2


def test_kept_for_backward_are_the_inputs_and_the_states_that_came_in(costs_on_four_ranks):
    state = 4 * B * H * D * E
    for _, _, found, *_ in costs_on_four_ranks:
        for kind, kept_bytes in found.items():
            # Two segments on the zigzag; no chunk's state, no transition, no output.
            assert kept_bytes == (2 * state, 0, 2 * state), (kind, kept_bytes)


def test_the_scan_runs_beside_the_work_that_does_not_need_it(costs_on_four_ranks):
    # LASP's code receives before any work of its own, so that its ranks run one after another.
    mine = N // 4
    for _, _, _, events, _ in costs_on_four_ranks:
        forward = [("summary", mine), "start", ("intra", mine), "wait", ("apply", mine)]
        backward = [("d_summary", mine), "start", ("d_intra", mine), "wait", ("d_apply", mine)]
        # Each rank works on its own tokens and no others: time falls as ranks are added.
        assert events == forward + backward


def test_auto_chooses_by_the_work_that_hides_a_scan(costs_on_four_ranks):
    for *_, shown in costs_on_four_ranks:
        (short, gathers), (long, _), (_, none), (given, both) = shown
        # Products of 64 x 64 scores and of states, of 2 operations each; backward has five of each.
        forward = 2 * B * N * H * (64 * (D + E) + 2 * D * E)
        assert short == [forward, 2.5 * forward] and long == [2 * forward, 5 * forward]
        assert (gathers, none, both) == (2, 0, 2)
        assert given == [None, None], "the constants have a say of their own"


@pytest.mark.parametrize("kind", ["diagonal", "matrix"])
def test_memory_of_one_rank_grows_with_its_tokens_and_no_faster(kind):
    operator = LinearAttentionOperator(None, backend=TorchKernel(chunk=16, chunks=4))
    peaks = []
    for tokens in (128, 256, 512):
        data, gates = arguments(kind, tokens, batch=1)
        with LiveBytes().include(data, gates.values()) as live:
            operator(*data, **gates)[0].sum().backward()
            peaks.append(live.peak())
    # A tile's worth on top of what is linear.
    assert peaks[2] - peaks[1] <= 2.1 * (peaks[1] - peaks[0])
    per_token = (peaks[2] - peaks[1]) / 256 / (4 * H * (2 * D + E))
    assert per_token < 4, "inputs, their gradients, the output and its gradient"
