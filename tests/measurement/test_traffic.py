"""Claims about what is counted as sent, against formulas, on real groups of 2, 3 and 4 ranks."""

import json
import time

import pytest
import torch
from torch import distributed as dist

from megatron_longseq.measurement import (
    Counts,
    LiveBytes,
    MeasuredTransport,
    Traffic,
    TrafficCounter,
)
from megatron_longseq.measurement.operations import Place, all_reduce

SIZES = (2, 3, 4)
ROWS = 12  # divisible by every size above
STREAMS = {1: "weights", 2: "gradients"}


def float_bytes(count):
    return 4 * count


def operations(group, rank, size):
    """Name -> (call, expected messages and bytes sent); x has ROWS elements of 4 bytes."""
    x = torch.arange(float(ROWS))
    s, others = float_bytes(ROWS), size - 1
    right, left = (rank + 1) % size, (rank - 1) % size
    own_part = s // size
    splits = [(rank + peer) % size for peer in range(size)]  # rows this rank sends to each
    incoming = [(peer + rank) % size for peer in range(size)]

    def exchange():
        y = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x, group=group, tag=1, group_peer=right),
            dist.P2POp(dist.irecv, y, group=group, tag=1, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def coalesced():
        with dist.distributed_c10d._coalescing_manager(group):
            dist.all_reduce(x.clone(), group=group)
            dist.all_reduce(x.clone(), group=group)

    def functional():
        from torch.distributed import _functional_collectives as functional_collectives

        y = functional_collectives.all_reduce(x, "sum", group)
        functional_collectives.wait_tensor(y)

    return {
        "send": (exchange, 1, s),
        "all_reduce": (
            lambda: dist.all_reduce(x.clone(), group=group),
            2 * others,
            2 * (s - own_part),
        ),
        "coalesced": (coalesced, 2 * others, 2 * (2 * s - 2 * own_part)),
        "functional": (functional, 2 * others, 2 * (s - own_part)),
        "all_gather": (
            lambda: dist.all_gather([torch.empty_like(x) for _ in range(size)], x, group=group),
            others,
            others * s,
        ),
        "all_gather_single": (
            lambda: dist.all_gather_single(torch.empty(size * ROWS), x, group=group),
            others,
            others * s,
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(
                torch.empty(ROWS // size), list(x.chunk(size)), group=group
            ),
            others,
            s - own_part,
        ),
        "reduce_scatter_single": (
            lambda: dist.reduce_scatter_single(torch.empty(ROWS // size), x, group=group),
            others,
            s - own_part,
        ),
        "broadcast": (
            lambda: dist.broadcast(x, group=group, group_src=1),
            int(right != 1),
            s * (right != 1),
        ),
        "reduce": (
            lambda: dist.reduce(x.clone(), group=group, group_dst=1),
            int(rank != 1),
            s * (rank != 1),
        ),
        "gather": (
            lambda: dist.gather(
                x,
                [torch.empty_like(x) for _ in range(size)] if rank == 1 else None,
                group=group,
                group_dst=1,
            ),
            int(rank != 1),
            s * (rank != 1),
        ),
        "scatter": (
            lambda: dist.scatter(
                torch.empty_like(x), [x] * size if rank == 1 else None, group=group, group_src=1
            ),
            others * (rank == 1),
            others * s * (rank == 1),
        ),
        "all_to_all": (
            lambda: dist.all_to_all(
                [torch.empty(ROWS // size) for _ in range(size)], list(x.chunk(size)), group=group
            ),
            others,
            s - own_part,
        ),
        "all_to_all_single": (
            lambda: dist.all_to_all_single(torch.empty_like(x), x, group=group),
            others,
            s - own_part,
        ),
        "all_to_all_splits": (
            lambda: dist.all_to_all_single(
                torch.empty(sum(incoming), 5),
                torch.ones(sum(splits), 5),
                incoming,
                splits,
                group=group,
            ),
            sum(rows > 0 for peer, rows in enumerate(splits) if peer != rank),
            float_bytes(5) * (sum(splits) - splits[rank]),
        ),
        "barrier": (lambda: dist.barrier(group=group), {2: 1, 3: 2, 4: 2}[size], 0),
    }


def count_everything():
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = MeasuredTransport(streams=STREAMS)
    measured = dist.new_group(backend=transport.register(), group_desc="MEASURED")
    plain = dist.new_group(group_desc="PLAIN")
    counter = TrafficCounter(streams=STREAMS)
    results = {}
    for group, traffic in ((measured, transport.traffic), (plain, counter.traffic)):
        for name, (call, messages, sent) in operations(group, rank, size).items():
            before = traffic.snapshot()
            if group is plain:
                with counter:
                    call()
            else:
                call()
            rows = (traffic - before).rows()
            results[group.group_desc, name] = (rows, messages, sent)
    return results


@pytest.fixture(scope="module")
def counted(ranks):
    """The rows of every operation, by world size, then rank: counted once, asked often."""
    return {size: ranks.run(count_everything, world_size=size, backend="gloo") for size in SIZES}


@pytest.mark.parametrize("how", ["MEASURED", "PLAIN"])
@pytest.mark.parametrize("size", SIZES)
def test_every_operation_counts_what_its_formula_says(counted, size, how):
    for rank, results in enumerate(counted[size]):
        for (group, name), (rows, messages, sent) in results.items():
            if group == how:
                got = (sum(r["messages"] for r in rows), sum(r["bytes_sent"] for r in rows))
                assert got == (messages, sent), f"{name} on rank {rank} of {size}"


@pytest.mark.parametrize("size", SIZES)
def test_counter_and_measured_transport_agree_in_all_but_waits(counted, size):
    for results in counted[size]:
        names = {name for _, name in results}
        for name in names:
            of = {}
            for group in ("MEASURED", "PLAIN"):
                rows = results[group, name][0]
                assert rows, name
                of[group] = [row | {"group": "", "wait_seconds": 0} for row in rows]
            assert of["MEASURED"] == of["PLAIN"]


@pytest.mark.parametrize("size", SIZES)
def test_messages_are_told_apart_by_peer_and_stream(counted, size):
    for rank, results in enumerate(counted[size]):
        receive, send = sorted(results["MEASURED", "send"][0], key=lambda row: row["operation"])
        assert (send["peer"], receive["peer"]) == ((rank + 1) % size, (rank - 1) % size)
        assert send["stream"] == receive["stream"] == "weights"
        assert send["exact"]
        assert (receive["messages"], receive["bytes_sent"]) == (0, 0)
        assert receive["payload_bytes"] == send["payload_bytes"] == float_bytes(ROWS)


@pytest.mark.parametrize("size", SIZES)
def test_only_counts_that_hold_for_every_implementation_are_called_exact(counted, size):
    exact = {"send", "gather", "scatter", "all_to_all", "all_to_all_single", "all_to_all_splits"}
    for results in counted[size]:
        for (_, name), (rows, _, _) in results.items():
            assert all(row["exact"] == (name in exact) for row in rows), name


def test_rows_are_json_and_say_when_waits_were_not_measured(counted):
    for (group, _), (rows, _, _) in counted[2][0].items():
        assert json.loads(json.dumps(rows)) == rows
        assert all((row["wait_seconds"] is None) == (group == "PLAIN") for row in rows)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_uneven_all_reduce_adds_up_exactly_over_the_ranks(size):
    x = torch.zeros(11, dtype=torch.bfloat16)
    sent = [all_reduce(Place(rank, size), [x]).bytes_sent for rank in range(size)]
    assert sum(sent) == 2 * (size - 1) * 22
    assert max(sent) - min(sent) <= 4


def count_in_backward():
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.contiguous()
            dist.all_reduce(gradient)
            return gradient

    x = torch.ones(5, requires_grad=True)
    with LiveBytes() as live, TrafficCounter() as counter:
        y = Exchange.apply(x).sum()
        forward = counter.traffic.total().calls, live.peak()
        y.backward()
    return forward, counter.rows()


def test_communication_inside_backward_is_counted_beside_memory(ranks):
    for forward, rows in ranks.run(count_in_backward, world_size=2, backend="gloo"):
        assert forward == (0, 20 + 20 + 4)  # x, its multiple, the sum
        assert [(row["operation"], row["payload_bytes"]) for row in rows] == [("all_reduce", 20)]


def count_objects_and_groups():
    rank = dist.get_rank()
    transport = MeasuredTransport()
    name = transport.register()
    everyone = dist.new_group(backend=name, group_desc="ALL")
    pairs = [dist.new_group([i, i + 1], backend=name, group_desc="PAIR") for i in (0, 2)]
    unnamed = dist.new_group(backend=name)
    pair = pairs[rank // 2]
    dist.all_reduce(torch.ones(3), group=pair)
    dist.all_reduce(torch.ones(3), group=everyone)
    dist.all_reduce(torch.ones(3), group=unnamed)
    gathered = [None] * 2
    dist.all_gather_object(gathered, {"rank": rank}, group=pair)
    dist.destroy_process_group(pair)
    return transport.traffic.rows(), gathered


def test_groups_keep_their_names_and_sizes(ranks):
    results = ranks.run(count_objects_and_groups, world_size=4, backend="gloo")
    for rank, (rows, gathered) in enumerate(results):
        assert gathered == [{"rank": rank // 2 * 2}, {"rank": rank // 2 * 2 + 1}]
        reduced = [row for row in rows if row["operation"] == "all_reduce"]
        named = {row["group"]: row["group_size"] for row in reduced}
        assert {"ALL": 4, "PAIR": 2}.items() <= named.items()
        (other,) = set(named) - {"ALL", "PAIR"}
        assert other.startswith("group ")


def wait_for_a_slow_rank(lag_seconds):
    rank = dist.get_rank()
    transport = MeasuredTransport(streams=STREAMS)
    group = dist.new_group(backend=transport.register(), group_desc="RING")
    x = torch.ones(4)
    dist.barrier(group)
    transport.traffic.reset()
    if rank == 0:
        time.sleep(lag_seconds)
        dist.send(x, group=group, group_dst=1, tag=2)
        time.sleep(lag_seconds)
        dist.all_reduce(x, group=group)
    else:
        dist.recv(x, group=group, group_src=0, tag=2)
        dist.all_reduce(x, group=group)
    return transport.traffic.snapshot().rows()


def test_waits_belong_to_the_rank_that_waits_and_to_its_stream(ranks):
    lag = 0.4
    quick, slow = ranks.run(wait_for_a_slow_rank, world_size=2, backend="gloo", args=(lag,))
    waited = {(row["operation"], row["stream"]): row["wait_seconds"] for row in slow}
    assert lag * 0.9 < waited["receive", "gradients"] < lag * 1.5
    assert lag * 0.9 < waited["all_reduce", ""] < lag * 1.5
    assert sum(row["wait_seconds"] for row in quick) < lag * 0.5


class NamedGroup:
    """As much of a process group as a Traffic asks for."""

    group_name = "0"

    def __init__(self, group_desc, size):
        self.group_desc = group_desc
        self._size = size

    def size(self):
        return self._size


def test_traffic_can_be_split_into_steps_and_summed():
    traffic = Traffic(waits_measured=True)
    group, place = NamedGroup("TP", 2), Place(0, 2)
    flow = traffic.record(group, all_reduce(place, torch.zeros(10)))
    traffic.record_wait(flow, 0.5)
    before = traffic.snapshot()
    traffic.record(group, all_reduce(place, torch.zeros(10)))
    traffic.record(NamedGroup("CP", 2), all_reduce(place, torch.zeros(20)))

    step = traffic - before
    assert step.total(group="TP") == Counts(1, 2, 40, 40, 0.0)
    assert traffic.total() == Counts(3, 6, 160, 160, 0.5)
    assert before.total().calls == 1  # a snapshot no longer changes
    assert (traffic - traffic.snapshot()).rows() == []
    traffic.reset()
    assert traffic.rows() == []


def test_asking_for_an_attribute_a_flow_does_not_have_is_refused():
    with pytest.raises(TypeError, match="gruop"):
        Traffic().total(gruop="TP")
