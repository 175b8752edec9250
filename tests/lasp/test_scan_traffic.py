"""What a scan sends equals its formulas, and the choice of a schedule follows from them."""

import itertools

import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
from chains import FLAT, KINDS, LAYOUTS, own, random_chain

from megatron_longseq.communication.scan import (
    SCAN,
    LinkCosts,
    Scan,
    ScanShape,
    choose_schedule,
    scan_seconds,
    scan_steps,
    scan_traffic,
)
from megatron_longseq.communication.scan.costs import best_blocks
from megatron_longseq.measurement import MeasuredTransport, TrafficCounter

STREAMS = {SCAN.tag: SCAN.name}


def cases(size):
    yield from ({"schedule": name, "blocks": 3} for name in FLAT)
    if size % 2 == 0 and size > 2:
        for across in ("ring", "all_scan", "log_scan"):
            yield {"schedule": "two_level", "node_size": 2, "across": across, "blocks": 2}


def sent(traffic):
    """(messages, bytes) of sends and gathers."""
    counts = traffic.total(operation="send") + traffic.total(operation="all_gather")
    return counts.messages, counts.bytes_sent


def counted():
    """(counted, formula) by case, with the operations on the caller's thread and on another."""
    size, rank, pairs_of = dist.get_world_size(), dist.get_rank(), {}
    transport = MeasuredTransport(streams=STREAMS)
    measured = dist.new_group(list(range(size)), backend=transport.register())
    for layout, options in itertools.product(LAYOUTS, cases(size)):
        options = options | {"layout": layout, "check_agreement": False}
        on_caller = Scan(dist.group.WORLD, carried_by="caller", **options)
        on_thread = Scan(measured, **options)
        for kind, reverse, total in itertools.product(KINDS, (False, True), ("none", "everywhere")):
            pairs, chain = random_chain(kind, layout, size, dtype=torch.float32, batch=1 + reverse)
            given = dict(reverse=reverse, total=total)
            with TrafficCounter(STREAMS) as counter:
                on_caller.start(own(chain, pairs), **given).wait()
            before = transport.traffic.snapshot()
            on_thread.start(own(chain, pairs), **given).wait()
            formula = scan_traffic(
                options["schedule"],
                on_caller.shape(pairs[0]),
                rank,
                reverse=reverse,
                total_everywhere=total == "everywhere",
            )
            case = (layout, *options.values(), kind, reverse, total)
            expected = formula.messages, formula.bytes
            pairs_of[case] = sent(counter.traffic), sent(transport.traffic - before), expected
    return pairs_of


@pytest.mark.parametrize("size", [1, 3, 4])
def test_bytes_and_messages_equal_the_formulas(ranks, size):
    for rank, results in enumerate(ranks.run(counted, world_size=size, backend="gloo")):
        for case, (on_caller, on_thread, expected) in results.items():
            assert on_caller == expected, (rank, case)
            assert on_thread == expected, (rank, case)


def shape(size=8, layout="contiguous", kind="matrix", megabytes=1.0, **options):
    state = round(megabytes * 2**20)
    transition = {"scalar": state >> 14, "diagonal": state >> 7, "matrix": state}[kind]
    return ScanShape(size, layout, state, transition, kind != "matrix", **options)


def test_what_the_papers_count():
    # H = 16, d = e = 128, B = 1 in fp32: a state of 1 MiB, over 8 and 64 ranks.
    for size in (8, 64):
        received = {
            (name, kind): scan_traffic(name, shape(size, kind=kind, blocks=4), 1).bytes / 2**20
            for name in FLAT
            for kind in ("scalar", "matrix")
        }
        assert received["ring", "matrix"] == received["all_scan", "matrix"] == 1
        assert received["all_gather", "scalar"] == pytest.approx(size - 1, rel=1e-3)
        assert received["all_gather", "matrix"] == 2 * (size - 1)


def test_on_the_zigzag_the_gather_doubles_and_other_schedules_do_not():
    # The table of docs/lasp-operator.md: what 8 ranks send, each on average, in states.
    def mean(name, layout, kind):
        scan = shape(layout=layout, kind=kind)
        return sum(scan_traffic(name, scan, p).bytes for p in range(8)) / 8 / 2**20

    for name, contiguous, cheap, matrix in (
        ("ring", 0.875, 2.625, 1.75),
        ("log_scan", 2.125, 6.0, 12.0),
        ("all_gather", 7.0, 14.0, 28.0),
    ):
        assert mean(name, "contiguous", "scalar") == pytest.approx(contiguous, rel=1e-3)
        assert mean(name, "zigzag", "scalar") == pytest.approx(cheap, rel=1e-3)
        assert mean(name, "zigzag", "matrix") == matrix


@pytest.mark.parametrize("layout, kind, steps", [
    ("contiguous", "matrix", {"ring": 7, "all_gather": 1, "log_scan": 3, "all_scan": 10}),
    ("zigzag", "matrix", {"ring": 14, "all_gather": 1, "log_scan": 4, "all_scan": 17}),
    ("zigzag", "scalar", {"ring": 10, "all_gather": 1, "log_scan": 4, "all_scan": 13}),
])  # fmt: skip
def test_steps_that_wait_for_one_another(layout, kind, steps):
    scan = shape(layout=layout, kind=kind, blocks=4)
    assert {name: scan_steps(name, scan) for name in FLAT} == steps
    # With nothing but latency, a serial scan takes one per step.
    costs = LinkCosts(latency_seconds=1.0, seconds_per_byte=0.0)
    for name in ("ring", "all_scan", "log_scan"):
        assert scan_seconds(name, scan, costs) == steps[name]


def test_the_gather_is_chosen_while_it_is_hidden_and_blocks_when_it_is_not():
    costs = LinkCosts(latency_seconds=10e-6, seconds_per_byte=1 / 25e9)
    large = shape(64, blocks=best_blocks(shape(64), costs, 128))
    gather = scan_seconds("all_gather", large, costs)
    blocks = scan_seconds("all_scan", large, costs)
    assert blocks < scan_seconds("ring", large, costs) / 2
    assert choose_schedule(large, costs) in ("all_scan", "log_scan")
    hidden = LinkCosts(latency_seconds=10e-6, seconds_per_byte=1 / 25e9, hidden_seconds=gather)
    assert choose_schedule(large, hidden) == "all_gather"
    # States of 1 KB cost latency alone, and a collective is one step.
    assert choose_schedule(shape(64, megabytes=0.001), costs) == "all_gather"
    assert choose_schedule(shape(64, node_size=8), costs) == "two_level"
    assert choose_schedule(shape(8, node_size=8), costs) != "two_level"


def test_the_number_of_blocks_is_the_best_one():
    costs = LinkCosts(latency_seconds=10e-6, seconds_per_byte=1 / 25e9)
    for scan in (shape(8), shape(64), shape(16, "zigzag", "scalar"), shape(64, "zigzag")):
        best = best_blocks(scan, costs, 128)
        seconds = [
            scan_seconds("all_scan", ScanShape(**(vars(scan) | {"blocks": k})), costs)
            for k in range(1, 129)
        ]
        assert seconds[best - 1] < 1.03 * min(seconds)
    assert best_blocks(shape(2), costs, 128) == 1, "one hop gains nothing"
    assert best_blocks(shape(64), LinkCosts(seconds_per_byte=1.0), 128) == 128


def started_by_auto():
    """The traffic of a scan whose schedule is chosen at its start."""
    transport = MeasuredTransport(streams=STREAMS)
    measured = dist.new_group(list(range(dist.get_world_size())), backend=transport.register())
    slow = LinkCosts(latency_seconds=0.0, seconds_per_byte=1.0)
    scan = Scan(measured, layout="contiguous", costs=slow, check_agreement=False)
    pairs, chain = random_chain("matrix", "contiguous", dist.get_world_size())
    gathers = []
    for hidden_seconds in (None, 1e9):
        before = transport.traffic.snapshot()
        scan.start(own(chain, pairs), hidden_seconds=hidden_seconds).wait()
        gathers.append((transport.traffic - before).total(operation="all_gather").calls)
    return gathers


def test_auto_goes_by_the_work_beside_which_a_scan_runs(ranks):
    assert ranks.run(started_by_auto, world_size=3, backend="gloo") == [[0, 1]] * 3
