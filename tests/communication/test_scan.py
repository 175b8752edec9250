"""Every schedule of the scan finds the states that a serial pass finds, on every rank."""

import gc
import itertools
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from chains import (
    FLAT,
    KINDS,
    LAYOUTS,
    largest_error,
    own,
    random_chain,
    random_state,
    serial_states,
    wait_until,
)

from megatron_longseq.communication import BufferPool
from megatron_longseq.communication.scan import SCAN, Scan
from megatron_longseq.communication.scan import scan as scan_module
from megatron_longseq.communication.scan.side_stream import SideStream
from megatron_longseq.communication.transport import Channel
from megatron_longseq.lasp.recurrence import Affine
from megatron_longseq.measurement import MeasuredTransport

EXACT = 1e-12


class WatchedStream(SideStream):
    """Knows whether its body is being run."""

    inside = False

    @contextmanager
    def after(self, moment, tensors):
        WatchedStream.inside = True
        try:
            with super().after(moment, tensors):
                yield
        finally:
            WatchedStream.inside = False


class PoisonedPool(BufferPool):
    """Hands out memory full of NaN, so that a read before a write shows."""

    def lease(self, shape, dtype, device, *, pinned=False):
        # On a GPU it belongs to the stream on which it is allocated.
        assert WatchedStream.inside or scan_module.SideStream is SideStream
        buffer = super().lease(shape, dtype, device, pinned=pinned)
        buffer.tensor.fill_(torch.nan)
        return buffer


def options_at(size):
    """The options of a Scan under which a group of this size is tested."""
    flat = [{"schedule": name, "blocks": 3} for name in FLAT]
    levels = [
        {"schedule": "two_level", "node_size": node, "across": across, "blocks": 2}
        for node in range(2, size)
        if size % node == 0
        for across in ("ring", "all_scan", "log_scan")
    ]
    return flat + levels


def parity(all_options, kinds=tuple(KINDS), by_steps=False):
    """Error of the states and of the total by case."""
    scan_module.BufferPool = PoisonedPool
    if by_steps:  # as over NCCL: issued whole at the start, receives together with sends
        scan_module.holds_host = lambda *_: False
        scan_module.SideStream = WatchedStream
    size, errors, kept = dist.get_world_size(), {}, []
    for layout, options in itertools.product(LAYOUTS, all_options):
        scan = Scan(dist.group.WORLD, layout=layout, timeout_seconds=20, **options)
        for kind, reverse in itertools.product(kinds, (False, True)):
            pairs, chain = random_chain(kind, layout, size, batch=1 if reverse else 2)
            for initial, total in ((None, "owner"), (random_state(7), "everywhere")):
                expected, end = serial_states(pairs, initial, reverse)
                result = scan.start(
                    own(chain, pairs), reverse=reverse, initial_state=initial, total=total
                ).wait()
                error = largest_error(result.states, own(chain, expected))
                owns = scan.holds_first if reverse else scan.holds_last
                assert (result.total is not None) == (total == "everywhere" or owns)
                if result.total is not None:
                    error = max(error, largest_error([result.total], [end]))
                errors[layout, *options.values(), kind, reverse, total] = error
                # Later scans must leave the memory of earlier results alone.
                kept = [*kept[-2:], (result.states, own(chain, expected))]
                error = max(largest_error(*earlier) for earlier in kept)
                errors["still", *options.values(), kind, reverse, total] = error
        assert wait_until(lambda scan=scan: scan.buffers.leased_bytes == 0)
    return errors


def assert_exact(results):
    for rank, errors in enumerate(results):
        for case, error in errors.items():
            assert error < EXACT, (rank, case, error)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_schedule_equals_the_serial_recurrence(ranks, size):
    assert_exact(ranks.run(parity, world_size=size, args=(options_at(size),), backend="gloo"))


def test_eight_ranks_in_nodes_of_two_and_four(ranks):
    options = [option for option in options_at(8) if option.get("across", "ring") == "ring"]
    results = ranks.run(
        parity, world_size=8, args=(options, ("diagonal", "matrix")), backend="gloo"
    )
    assert_exact(results)


def batches(all_options):
    """The batches of messages this rank posts, by case: a list of (sends to, receives from)."""
    log, plain = [], Channel.exchange

    def logged(channel, *, receives, sends, step):
        log.append([[(m.peer, m.tensor.numel()) for m in side] for side in (sends, receives)])
        return plain(channel, receives=receives, sends=sends, step=step)

    Channel.exchange = logged
    scan_module.holds_host = lambda *_: False
    posted = {}
    for layout, options in itertools.product(LAYOUTS, all_options):
        scan = Scan(dist.group.WORLD, layout=layout, check_agreement=False, **options)
        for kind, reverse in itertools.product(KINDS, (False, True)):
            pairs, chain = random_chain(kind, layout, dist.get_world_size())
            log.clear()
            scan.start(own(chain, pairs), reverse=reverse, total="everywhere").wait()
            posted[layout, *options.values(), kind, reverse] = list(log)
    return posted


def meets(posted):
    """Whether all batches complete if a rank posts the next one only when the last has completed
    on both sides, as NCCL does."""
    queues = [[[list(side) for side in batch] for batch in mine] for mine in posted]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            sends = queue[0][0] if queue else []
            for peer, size in list(sends):
                theirs = queues[peer][0][1] if queues[peer] else []
                # The first receive from this rank takes the first send to it.
                if next((s for p, s in theirs if p == rank), None) == size:
                    theirs.remove((rank, size))
                    sends.remove((peer, size))
                    moved = True
        for queue in queues:
            while queue and queue[0] == [[], []]:
                del queue[0]
                moved = True
    return not any(queues)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_batches_meet_where_operations_run_in_the_order_they_are_issued(ranks, size):
    results = ranks.run(batches, world_size=size, args=(options_at(size),), backend="gloo")
    for case in results[0]:
        assert meets([result[case] for result in results]), case


def test_the_simulation_of_ordered_operations_finds_a_deadlock():
    assert meets([[[[(1, 5)], [(1, 5)]]], [[[(0, 5)], [(0, 5)]]]])
    both_send_first = [[[[(1 - rank, 5)], []], [[], [(1 - rank, 5)]]] for rank in range(2)]
    assert not meets(both_send_first)


def test_receives_posted_with_their_sends_give_the_same_states(ranks):
    results = ranks.run(
        parity, world_size=4, args=(options_at(4), ["diagonal"], True), backend="gloo"
    )
    assert_exact(results)


def bits():
    """States and totals of every schedule under delays, staging and either carrier, against those
    without."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # Latencies of up to 8 ms, different for every link.
    transport = MeasuredTransport(latency_seconds=lambda a, b: (7 * a + 3 * b) % 5 * 0.002)
    delayed = dist.new_group(list(range(size)), backend=transport.register())
    for layout, options in itertools.product(LAYOUTS, options_at(size)[:6]):
        plain = Scan(dist.group.WORLD, layout=layout, timeout_seconds=20, **options)
        others = [
            Scan(delayed, layout=layout, timeout_seconds=20, check_agreement=False, **options),
            Scan(dist.group.WORLD, layout=layout, staging="always", **options),
            Scan(dist.group.WORLD, layout=layout, carried_by="caller", **options),
        ]
        for kind in ("diagonal", "matrix"):
            pairs, chain = random_chain(kind, layout, size)
            given = dict(initial_state=random_state(7), total="everywhere")
            expected = plain.start(own(chain, pairs), **given).wait()
            for scan in others:
                time.sleep(0.002 * ((rank * 5) % 3))
                result = scan.start(own(chain, pairs), **given).wait()
                for a, b in zip(result.states, expected.states, strict=True):
                    assert torch.equal(a, b), (layout, options, kind)
                assert torch.equal(result.total, expected.total)


def test_neither_delays_nor_the_way_of_a_message_change_a_bit(ranks):
    ranks.run(bits, world_size=4, backend="gloo")


def edges():
    """Cuts, underflow, and an initial state of zeros, in fp32."""
    size = dist.get_world_size()
    for layout, options in itertools.product(LAYOUTS, options_at(size)):
        scan = Scan(dist.group.WORLD, layout=layout, check_agreement=False, **options)
        for kind in KINDS:
            pairs, chain = random_chain(kind, layout, size, dtype=torch.float32)
            mine = own(chain, pairs)
            cut = [pair.cut() for pair in mine]
            states = scan.start(cut, initial_state=random_state(7).float()).wait().states
            for position, state in zip(own(chain, range(len(pairs))), states, strict=True):
                before = pairs[position - 1].state if position else random_state(7).float()
                assert torch.equal(state, before), (layout, options, kind)
            tiny = [Affine(pair.transition * 1e-25, pair.state) for pair in mine]
            first = scan.start(tiny).wait().states
            again = scan.start(tiny, initial_state=torch.zeros(2, 3, 4, 5)).wait().states
            for position, state, same in zip(
                own(chain, range(len(pairs))), first, again, strict=True
            ):
                before = pairs[position - 1].state if position else torch.zeros(2, 3, 4, 5)
                torch.testing.assert_close(state, before, rtol=1e-6, atol=1e-6)
                assert torch.isfinite(state).all() and torch.equal(state, same)


def test_cuts_let_nothing_through_and_decays_underflow_to_zero(ranks):
    ranks.run(edges, world_size=4, backend="gloo")


def several_in_flight(carried_by):
    """Scans of both directions at once, waited for last first; then the thread ends."""
    scan_and_wait_in_any_order(carried_by)
    gc.collect()
    return wait_until(lambda: SCAN.name not in [t.name for t in threading.enumerate()])


def scan_and_wait_in_any_order(carried_by):
    size, cases, handles = dist.get_world_size(), [], []
    # All scans are started before anything of the first has arrived.
    transport = MeasuredTransport(latency_seconds=0.02)
    group = dist.new_group(list(range(size)), backend=transport.register())
    options = dict(schedule="all_scan", blocks=2, check_agreement=False)
    scan = Scan(group, carried_by=carried_by, **options)
    for seed in range(6):
        pairs, chain = random_chain(("matrix", "scalar")[seed % 2], "zigzag", size, seed)
        cases.append((pairs, chain, seed % 3 == 0))
        handles.append(scan.start(own(chain, pairs), reverse=seed % 3 == 0))
    for index in (5, 2, 0, 1, 4, 3):
        pairs, chain, reverse = cases[index]
        expected = own(chain, serial_states(pairs, None, reverse)[0])
        for _ in range(2):
            assert largest_error(handles[index].wait().states, expected) < EXACT
    assert wait_until(lambda: scan.buffers.leased_bytes == 0)
    held = scan.buffers.held_bytes
    for _ in range(3):
        pairs, chain, _ = cases[1]
        scan.start(own(chain, pairs)).wait()
        assert wait_until(lambda: scan.buffers.leased_bytes == 0)
    assert scan.buffers.held_bytes == held, "buffers are used again"
    names = [thread.name for thread in threading.enumerate()]
    assert names.count(SCAN.name) == (carried_by == "thread")


@pytest.mark.parametrize("carried_by", ["thread", "caller"])
def test_several_scans_are_under_way_at_a_time(ranks, carried_by):
    assert all(ranks.run(several_in_flight, world_size=3, args=(carried_by,), backend="gloo"))


def overwritten():
    """Error of a scan whose pairs are overwritten as soon as wait() has returned."""
    scan = Scan(dist.group.WORLD, layout="contiguous", schedule="ring", check_agreement=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    state = torch.full((1, 1, 1024, 2048), rank + 1.0)  # more than a socket takes at once
    dist.barrier()
    time.sleep(0.3 * rank)  # nobody is there to receive
    (entering,) = scan.start([Affine(torch.ones(1, 1), state)]).wait().states
    state.fill_(torch.nan)
    dist.barrier()
    assert size > 1
    return (entering - rank * (rank + 1) / 2).abs().max().item()


def test_pairs_may_be_overwritten_once_the_result_is_there(ranks):
    assert ranks.run(overwritten, world_size=2, backend="gloo") == [0.0, 0.0]


def side_by_side():
    """Errors of scans of several objects on one group, under way together or left alone."""
    # What is sent at once arrives together: then only the order of sending keeps scans apart.
    transport = MeasuredTransport(latency_seconds=lambda a, b: 0.01 * ((a + 2 * b) % 3))
    group = dist.new_group(list(range(dist.get_world_size())), backend=transport.register())
    options = dict(layout="contiguous", schedule="ring", timeout_seconds=20, check_agreement=False)
    first, second = (Scan(group, **options) for _ in range(2))
    errors = []
    for seed in range(5):
        started = []
        # One that nobody waits for, and whose object is gone, as after an error of the caller's.
        Scan(group, **options).start(own(*random_chain("matrix", "contiguous", 4, seed)[::-1]))
        for index, scan in enumerate((first, second, first)):
            pairs, chain = random_chain("matrix", "contiguous", 4, seed=10 + 3 * seed + index)
            started.append(
                (scan.start(own(chain, pairs)), own(chain, serial_states(pairs, None)[0]))
            )
        errors += [largest_error(handle.wait().states, wanted) for handle, wanted in started]
    return max(errors)


def test_scans_of_several_objects_on_one_group_do_not_mix(ranks):
    assert max(ranks.run(side_by_side, world_size=4, backend="gloo")) < EXACT


def results_kept():
    """Whether a result lives on after it is let go, while the thread waits for another scan."""
    scan = Scan(dist.group.WORLD, schedule="ring", check_agreement=False)
    pairs, chain = random_chain("scalar", "zigzag", dist.get_world_size())
    result = scan.start(own(chain, pairs), total="everywhere").wait()
    seen = [weakref.ref(tensor) for tensor in (*result.states, result.total)]
    del result
    return not wait_until(lambda: all(ref() is None for ref in seen), 2.0)


def test_a_scan_keeps_no_result(ranks):
    assert not any(ranks.run(results_kept, world_size=2, backend="gloo"))


def freed(all_options):
    """Whether the pairs of a scan are gone with it, without a garbage collection."""
    gc.disable()
    left = []
    for layout, options in itertools.product(LAYOUTS, all_options):
        for carried_by, kind in itertools.product(("thread", "caller"), ("diagonal", "matrix")):
            scan = Scan(dist.group.WORLD, layout=layout, carried_by=carried_by, **options)
            pairs, chain = random_chain(kind, layout, dist.get_world_size())
            seen = [weakref.ref(pair) for pair in own(chain, pairs)]
            handle = scan.start(own(chain, pairs), total="everywhere")
            handle.wait()
            del pairs
            if not wait_until(lambda seen=seen: not any(ref() for ref in seen), 2.0):
                left.append((layout, *options.values(), carried_by, kind))
    return left


def test_a_scan_keeps_no_pair_once_it_has_ended(ranks):
    assert ranks.run(freed, world_size=4, args=(options_at(4),), backend="gloo") == [[]] * 4


def strided_groups():
    """Two groups of every second rank, as beside tensor parallelism; and data with gradients."""
    rank, errors = dist.get_rank(), []
    groups = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])]
    for schedule in FLAT:
        scan = Scan(groups[rank % 2], schedule=schedule, timeout_seconds=20)
        pairs, chain = random_chain("diagonal", "zigzag", 3, seed=rank % 2)
        mine = own(chain, pairs, rank // 2)
        mine = [Affine(p.transition.requires_grad_(), p.state.requires_grad_()) for p in mine]
        initial = random_state(7).requires_grad_()
        result = scan.start(mine, initial_state=initial, total="everywhere").wait()
        expected, _ = serial_states(pairs, random_state(7))
        errors.append(largest_error(result.states, own(chain, expected, rank // 2)))
        assert not any(t.requires_grad for t in (*result.states, result.total))
    return max(errors)


def test_neighbours_are_those_of_the_group(ranks):
    assert max(ranks.run(strided_groups, world_size=6, backend="gloo")) < EXACT


def hidden(carried_by):
    """Seconds waited for a scan of three hops of 0.1 s beside 0.45 s of work."""
    transport = MeasuredTransport(latency_seconds=0.1)
    group = dist.new_group(list(range(dist.get_world_size())), backend=transport.register())
    options = dict(layout="contiguous", schedule="ring", check_agreement=False)
    scan = Scan(group, carried_by=carried_by, **options)
    pairs, chain = random_chain("matrix", "contiguous", dist.get_world_size())
    scan.start(own(chain, pairs)).wait()
    dist.barrier()
    handle = scan.start(own(chain, pairs))
    time.sleep(0.45)
    handle.wait()
    return handle.wait_seconds


def test_hops_are_taken_while_the_caller_works(ranks):
    assert max(ranks.run(hidden, world_size=4, args=("thread",), backend="gloo")) < 0.1
    # The last rank's state passes three ranks, and none passes it on before it waits.
    assert ranks.run(hidden, world_size=4, args=("caller",), backend="gloo")[3] > 0.19


def test_a_single_process_needs_no_group():
    for layout, schedule in itertools.product(LAYOUTS, (*FLAT, "two_level", "auto")):
        pairs, chain = random_chain("matrix", layout, 1)
        expected, end = serial_states(pairs, random_state(7))
        scan = Scan(None, layout=layout, schedule=schedule)
        result = scan.start(
            own(chain, pairs, 0), initial_state=random_state(7), total="everywhere"
        ).wait()
        assert largest_error([*result.states, result.total], [*expected.values(), end]) < EXACT
