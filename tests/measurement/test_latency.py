"""Claims about links with latency: when data arrives, who waits, and that results are the same.

Times are bounded tightly from below, which a loaded machine cannot break, and loosely from above.
"""

import time

import pytest
import torch
from torch import distributed as dist

from megatron_longseq.measurement import LiveBytes, MeasuredTransport

LATENCY = 0.25
SLACK = 0.2
# The ranks start together only as exactly as a barrier ends on all of them.
START = 0.02


def delayed_group(latency=LATENCY, **options):
    transport = MeasuredTransport(latency_seconds=latency, **options)
    group = dist.new_group(backend=transport.register(), group_desc="DELAYED")
    dist.barrier()  # over the default group, without latency: all start together
    return group, transport


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def pass_a_token_around():
    rank, size = dist.get_rank(), dist.get_world_size()
    group, _ = delayed_group()
    token = torch.zeros(1)

    def lap():
        if rank == 0:
            dist.send(token, group=group, group_dst=1)
            dist.recv(token, group=group, group_src=size - 1)
        else:
            dist.recv(token, group=group, group_src=rank - 1)
            token.add_(1)
            dist.send(token, group=group, group_dst=(rank + 1) % size)

    return seconds(lap), token.item()


def test_a_token_takes_one_latency_per_hop(ranks):
    results = ranks.run(pass_a_token_around, world_size=3, backend="gloo")
    lap, token = results[0]
    assert token == 2
    assert 3 * LATENCY - START <= lap < 3 * LATENCY + SLACK
    # Sending holds nobody up: rank 1 is done after its own receive.
    assert LATENCY - START <= results[1][0] < LATENCY + SLACK


def exchange_many(count):
    rank = dist.get_rank()
    group, _ = delayed_group()
    sent = [torch.full((1000,), float(rank * 100 + i)) for i in range(count)]
    got = [torch.zeros(1000) for _ in range(count)]

    def exchange():
        ops = []
        for i in range(count):
            ops.append(dist.P2POp(dist.isend, sent[i], group=group, group_peer=1 - rank, tag=i % 2))
            ops.append(dist.P2POp(dist.irecv, got[i], group=group, group_peer=1 - rank, tag=i % 2))
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return seconds(exchange), [int(x[0]) for x in got]


def test_latencies_of_messages_in_flight_overlap_and_order_is_kept(ranks):
    results = ranks.run(exchange_many, world_size=2, backend="gloo", args=(10,))
    for rank, (elapsed, got) in enumerate(results):
        assert LATENCY - START <= elapsed < LATENCY + SLACK
        assert got == [(1 - rank) * 100 + i for i in range(10)]


def read_early_then_compute():
    rank = dist.get_rank()
    group, transport = delayed_group()
    x, y = torch.full((1000,), float(rank)), torch.full((1000,), -1.0)
    ops = [
        dist.P2POp(dist.isend, x, group=group, group_peer=1 - rank),
        dist.P2POp(dist.irecv, y, group=group, group_peer=1 - rank),
    ]
    works = dist.batch_isend_irecv(ops)
    time.sleep(LATENCY / 2)
    early = y[0].item()
    time.sleep(LATENCY)
    for work in works:
        work.wait()
    return early, y[0].item(), transport.traffic.total().wait_seconds


def test_computation_hides_latency_and_reading_before_waiting_is_exposed(ranks):
    results = ranks.run(read_early_then_compute, world_size=2, backend="gloo")
    for rank, (early, late, waited) in enumerate(results):
        assert (early, late) == (-1.0, 1.0 - rank)
        assert waited < LATENCY / 4


def arrive_late():
    rank = dist.get_rank()
    group, _ = delayed_group()
    x = torch.full((4,), float(rank))
    if rank == 1:
        time.sleep(2 * LATENCY)
    return seconds(lambda: dist.broadcast(x, group=group, group_src=0)), x[0].item()


def test_latency_counts_from_the_send_not_from_the_receive(ranks):
    _, late = ranks.run(arrive_late, world_size=2, backend="gloo")
    assert late[1] == 0.0
    assert late[0] < LATENCY / 2  # the message had been under way for long


def time_collectives(ring):
    rank, size = dist.get_rank(), dist.get_world_size()
    group, _ = delayed_group(ring_collectives=ring)
    x = torch.ones(12)
    calls = {
        "all_gather": lambda: dist.all_gather_single(torch.empty(12 * size), x, group=group),
        "all_reduce": lambda: dist.all_reduce(x.clone(), group=group),
        "broadcast": lambda: dist.broadcast(x.clone(), group=group, group_src=0),
        "reduce": lambda: dist.reduce(x.clone(), group=group, group_dst=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(12), x, group=group),
    }
    times = {}
    for name, call in calls.items():
        dist.barrier()
        times[name] = seconds(call)
    return rank, times


@pytest.mark.parametrize("ring", [False, True])
def test_collectives_take_one_latency_or_the_hops_of_a_ring(ranks, ring):
    hops = {
        "all_gather": [2, 2, 2] if ring else [1, 1, 1],
        "all_reduce": [4, 4, 4] if ring else [1, 1, 1],
        "broadcast": [0, 1, 2] if ring else [0, 1, 1],
        "reduce": [2, 0, 0] if ring else [1, 0, 0],
        "all_to_all": [1, 1, 1],
    }
    for rank, times in ranks.run(time_collectives, world_size=3, backend="gloo", args=(ring,)):
        for name, expected in hops.items():
            least = expected[rank] * LATENCY
            assert least - START <= times[name] < least + SLACK, name


def between_nodes(source, target):
    return LATENCY if source // 2 != target // 2 else 0.0


def exchange_with(partner_of):
    rank = dist.get_rank()
    group, _ = delayed_group(between_nodes)
    partner = partner_of[rank]
    x, y = torch.ones(4), torch.zeros(4)

    def exchange():
        ops = [
            dist.P2POp(dist.isend, x, group=group, group_peer=partner),
            dist.P2POp(dist.irecv, y, group=group, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return seconds(exchange)


def test_latency_may_differ_between_links(ranks):
    inside = ranks.run(exchange_with, world_size=4, backend="gloo", args=([1, 0, 3, 2],))
    across = ranks.run(exchange_with, world_size=4, backend="gloo", args=([2, 3, 0, 1],))
    assert max(inside) < LATENCY
    assert min(across) >= LATENCY - START
    assert max(across) < LATENCY + SLACK


def run_everything(latency):
    rank, size = dist.get_rank(), dist.get_world_size()
    group, _ = delayed_group(latency)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(12, generator=generator)
    results = []

    def keep(tensor, call):
        call(tensor)
        results.append(tensor)

    keep(x.clone(), lambda y: dist.all_reduce(y, group=group))
    keep(torch.empty(12 * size), lambda y: dist.all_gather_single(y, x, group=group))
    keep(torch.empty(12 // size), lambda y: dist.reduce_scatter_single(y, x, group=group))
    keep(torch.empty(12), lambda y: dist.all_to_all_single(y, x, group=group))
    keep(x.clone(), lambda y: dist.broadcast(y, group=group, group_src=1))
    keep(x.clone(), lambda y: dist.reduce(y, group=group, group_dst=0))
    parts = list(x.chunk(size)) if rank == 0 else None
    keep(torch.empty(12 // size), lambda y: dist.scatter(y, parts, group=group, group_src=0))
    gathered = [torch.zeros(12) for _ in range(size)] if rank == 0 else None
    dist.gather(x, gathered, group=group, group_dst=0)
    results += gathered or []
    part = torch.zeros(3, 12)[1]  # a receive into a part of a tensor
    ops = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, part, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    results.append(part)
    objects = [None] * size
    dist.all_gather_object(objects, str(rank), group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return [tensor.tolist() for tensor in results], objects


def test_results_are_bitwise_equal_with_and_without_latency(ranks):
    with_latency = ranks.run(run_everything, world_size=3, backend="gloo", args=(0.02,))
    without = ranks.run(run_everything, world_size=3, backend="gloo", args=(0.0,))
    assert with_latency == without


def count_memory_of_an_exchange():
    rank = dist.get_rank()
    group, _ = delayed_group(0.01)
    with LiveBytes() as live:
        x, y = torch.ones(100), torch.empty(100)
        ops = [
            dist.P2POp(dist.isend, x, group=group, group_peer=1 - rank),
            dist.P2POp(dist.irecv, y, group=group, group_peer=1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.all_reduce(x, group=group)
        return live.peak()


def test_the_link_s_own_buffers_are_not_counted_as_the_computation_s(ranks):
    assert ranks.run(count_memory_of_an_exchange, world_size=2, backend="gloo") == [800, 800]


def ask_for_what_latency_cannot_do():
    group, _ = delayed_group(0.01)
    messages = []
    try:
        dist.irecv(torch.zeros(1), group=group)
    except NotImplementedError as error:
        messages.append(str(error))
    work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    try:
        work.get_future()
    except NotImplementedError as error:
        messages.append(str(error))
    work.wait()
    return messages


def test_what_cannot_be_delayed_is_refused(ranks):
    (messages,) = set(
        map(tuple, ranks.run(ask_for_what_latency_cannot_do, world_size=2, backend="gloo"))
    )
    assert len(messages) == 2
    assert all("latency_seconds" in message for message in messages)


def test_negative_latency_is_refused():
    with pytest.raises(ValueError, match="negative"):
        MeasuredTransport(latency_seconds=-1.0)
