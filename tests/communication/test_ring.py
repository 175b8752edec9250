"""The ring engine: who sees what, where gradients end, and what happens to buffers."""

import pytest
import torch
import torch.distributed as dist
from grids import refused

from megatron_longseq.communication import BufferPool, DoubleRing, Ring, SingleRing
from megatron_longseq.communication.ring import receive_buffers
from megatron_longseq.communication.schedule import interleaved
from megatron_longseq.communication.transport import Channel


class PoisonedPool(BufferPool):
    """Hands out memory full of NaN, so that a read before a write shows."""

    def lease(self, shape, dtype, device, *, pinned=False):
        buffer = super().lease(shape, dtype, device, pinned=pinned)
        buffer.tensor.fill_(torch.nan)
        return buffer


def own_block(rank):
    """Two tensors of different width and dtype, distinct on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return (
        torch.randint(-99, 99, (6, 2, 3), generator=generator).double(),
        torch.randint(-99, 99, (6, 5), generator=generator).float(),
    )


def part_of(rank, owner):
    """What ``rank`` adds to the gradient of the block of ``owner``: integers, so sums are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + owner)
    return tuple(torch.randint(-99, 99, t.shape, generator=generator) for t in own_block(0))


def expected_sum(owner, ranks):
    parts = [part_of(rank, owner) for rank in range(ranks)]
    return [sum(part[i] for part in parts) for i in range(2)]


def tour(ring, rank):
    """One rotation with every check on the way; returns the owners in the order seen."""
    tensors = own_block(rank)
    owners = []
    with ring.circulate_with_gradients(*tensors) as rotation:
        for owner, block, gradient in rotation:
            assert all(torch.equal(a, b) for a, b in zip(block, own_block(owner), strict=True))
            gradient.add(*(part.double() for part in part_of(rank, owner)))
            owners.append(owner)
        home = rotation.gradients()
    for total, tensor, expected in zip(home, tensors, expected_sum(rank, ring.size), strict=True):
        assert total.dtype == tensor.dtype and torch.equal(total.long(), expected)
    assert all(torch.equal(a, b) for a, b in zip(tensors, own_block(rank), strict=True))
    assert ring.pool.leased_bytes == 0
    return owners


def tours(schedules):
    """Owners in the order of the hops, forward only and with gradients, per schedule."""
    rank, seen = dist.get_rank(), []
    for schedule in schedules:
        ring = Ring(dist.group.WORLD, PoisonedPool(), schedule=schedule, timeout_seconds=20)
        forward = []
        for owner, block in ring.circulate(*own_block(rank)):
            assert all(torch.equal(a, b) for a, b in zip(block, own_block(owner), strict=True))
            forward.append(owner)
        assert ring.pool.leased_bytes == 0
        assert tour(ring, rank) == forward
        assert tour(ring, rank) == forward, "a second rotation over the same buffers"
        seen.append(forward)
    return seen


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_blocks_pass_in_order_and_gradients_return_to_their_owner(ranks, size):
    for rank, (seen,) in enumerate(
        ranks.run(tours, world_size=size, args=([SingleRing()],), backend="gloo")
    ):
        assert seen == [(rank - step) % size for step in range(size)]


@pytest.mark.parametrize("size, windows", [(4, (1, 2, 4)), (6, (2, 3)), (8, (2, 4))])
def test_a_double_ring_is_another_schedule_of_the_same_engine(ranks, size, windows):
    schedules = [DoubleRing(window) for window in windows]
    for rank, seen in enumerate(
        ranks.run(tours, world_size=size, args=(schedules,), backend="gloo")
    ):
        for window, owners in zip(windows, seen, strict=True):
            mine, place = divmod(rank, window)
            count = size // window
            assert owners == [
                (mine - j) % count * window + (place - i) % window
                for j in range(count)
                for i in range(window)
            ]


def test_interleaved_windows_leave_a_node_from_as_many_ranks_as_it_has_pairs(ranks):
    order = interleaved(8, 4, 2)
    assert order == (0, 2, 1, 3, 4, 6, 5, 7)
    assert interleaved(8, 4, 4) is None and interleaved(8, 2, 4) is None
    schedule = DoubleRing(2, order)
    inner, outer = schedule.groups(8)
    assert inner == [(0, 2), (1, 3), (4, 6), (5, 7)] and outer == [(0, 1, 4, 5), (2, 3, 6, 7)]
    crossing = {
        (rank, hop.send_to)
        for rank in range(8)
        for step in schedule.steps(rank, 8)
        for hop in step.hops
        if rank // 4 != hop.send_to // 4
    }
    # Of every pair of neighbours one: with windows of neighbours it would be 2, 3, 6 and 7.
    assert {rank for rank, _ in crossing} == {1, 3, 5, 7}
    for rank, (seen,) in enumerate(
        ranks.run(tours, world_size=8, args=([schedule],), backend="gloo")
    ):
        assert sorted(seen) == list(range(8)) and seen[0] == rank


@pytest.mark.parametrize(
    ("size", "window", "buffers"),
    [
        (8, 4, {"inner": 2, "outer": 1}),
        (8, 2, {"inner": 1, "outer": 2}),
        (4, 2, {"inner": 1, "outer": 1}),
        (9, 3, {"inner": 2, "outer": 2}),
        (8, 8, {"inner": 2}),
        (8, 1, {"outer": 2}),
    ],
)
def test_a_double_ring_holds_no_more_buffers_than_it_needs(size, window, buffers):
    for position in range(size):
        assert receive_buffers(DoubleRing(window).steps(position, size)) == buffers


def lanes_apart(window):
    """A double ring whose lanes run on groups of their own; returns the group of each batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, used = {"gradients": dist.new_group(list(range(size)))}, set()
    lists = {
        "inner": [list(range(w, w + window)) for w in range(0, size, window)],
        "outer": [list(range(x, size, window)) for x in range(window)],
    }
    for lane, members in lists.items():
        groups = [(ranks, dist.new_group(ranks)) for ranks in members]
        own[lane] = next(group for ranks, group in groups if rank in ranks)
    plain = Channel.exchange

    def logged(channel, **messages):
        used.add((channel.stream.name, channel.place.ranks))
        return plain(channel, **messages)

    Channel.exchange = logged
    ring = Ring(
        dist.group.WORLD,
        PoisonedPool(),
        schedule=DoubleRing(window),
        lane_groups=own,
        timeout_seconds=20,
    )
    tour(ring, rank)
    return used


def test_lanes_may_have_process_groups_of_their_own(ranks):
    for rank, used in enumerate(ranks.run(lanes_apart, world_size=6, args=(3,), backend="gloo")):
        window = 3 * (rank // 3)
        assert used == {
            ("ring blocks", (window, window + 1, window + 2)),
            ("ring blocks", (rank % 3, rank % 3 + 3)),
            ("ring gradients", (0, 1, 2, 3, 4, 5)),
        }


def interleaved_rotations():
    rank = dist.get_rank()
    ring = Ring(dist.group.WORLD, PoisonedPool(), timeout_seconds=20)
    first, second = (ring.circulate_with_gradients(*own_block(rank)) for _ in range(2))
    for (owner, _, gradient), (_, _, other) in zip(first, second, strict=True):
        gradient.add(*part_of(rank, owner))
        other.add(*(2 * part for part in part_of(rank, owner)))
    sums = second.gradients(), first.gradients()
    expected = expected_sum(rank, ring.size)
    assert all(torch.equal(t.long(), 2 * e) for t, e in zip(sums[0], expected, strict=True))
    assert all(torch.equal(t.long(), e) for t, e in zip(sums[1], expected, strict=True))
    return ring.pool.leased_bytes


def test_several_rotations_are_alive_at_a_time(ranks):
    assert ranks.run(interleaved_rotations, world_size=3, backend="gloo") == [0, 0, 0]


def parts_of_blocks():
    """Rows added apart, twice over, or not at all."""
    rank, results = dist.get_rank(), []
    ring = Ring(dist.group.WORLD, PoisonedPool(), timeout_seconds=20)
    block = torch.zeros(6, 2)
    for rows in ([slice(0, 3)], [slice(3, 6), slice(0, 3)], [slice(2, 6), slice(2, 6)], []):
        with ring.circulate_with_gradients(block) as rotation:
            for owner, _, gradient in rotation:
                for at in rows:
                    part = torch.full_like(block[at], float(1 + rank + 10 * owner))
                    gradient.add(part, at=at)
            results.append(rotation.gradients()[0][:, 0].tolist())
    return results


def test_gradients_of_parts_of_a_block_add_up(ranks):
    for rank, results in enumerate(ranks.run(parts_of_blocks, world_size=3, backend="gloo")):
        total = float(1 + 2 + 3 + 3 * 10 * rank)
        assert results == [
            [total] * 3 + [0.0] * 3,
            [total] * 6,
            [0.0] * 2 + [2 * total] * 4,
            [0.0] * 6,
        ]


def fresh_parameter():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    ring = Ring(dist.group.WORLD, BufferPool(), timeout_seconds=20)
    before, total = weight.detach().clone(), torch.zeros(4, 4)
    for _ in range(2):
        for _, (block,) in ring.circulate(weight.t()):  # a message takes no such form
            assert not block.requires_grad
            total += block
    assert torch.equal(weight, before)
    whole = before.t().clone()
    dist.all_reduce(whole)
    return (total - 2 * whole).abs().max().item()


def test_a_parameter_is_never_received_into(ranks):
    assert max(ranks.run(fresh_parameter, world_size=4, backend="gloo")) < 1e-5


class Stop(Exception):
    pass


def leave_early(size):
    """Leaves a rotation at every step, in every way; then the ring still works."""
    rank = dist.get_rank()
    ring = Ring(dist.group.WORLD, BufferPool(), timeout_seconds=20)
    held = []
    for step in range(size):
        for how in ("break", "raise", "raise in gradients", "drop"):
            try:
                rotation = ring.circulate_with_gradients(*own_block(rank))
                source = ring.circulate(*own_block(rank)) if how in ("break", "raise") else rotation
                for index, item in enumerate(source):
                    if how in ("raise in gradients", "drop"):
                        item[2].add(*part_of(rank, item[0]))
                    if index == step:
                        if how.startswith("raise"):
                            raise Stop
                        break
            except Stop:
                pass
            else:
                if how == "drop":
                    assert "gone through all" in refused(rotation.gradients)
            source = rotation = item = None
            held.append((ring.pool.leased_bytes, ring.pool.held_bytes))
    tour(ring, rank)
    return {leased for leased, _ in held}, held[-1][1]


def test_buffers_return_from_exceptions_and_abandoned_loops(ranks):
    for leased, held in ranks.run(leave_early, world_size=4, args=(4,), backend="gloo"):
        assert leased == {0}
        blocks = 6 * 2 * 3 * 8 + 6 * 5 * 4
        assert held == 4 * blocks, "two buffers for blocks and two for gradients, kept"


def unfinished_rotation():
    ring = Ring(dist.group.WORLD, BufferPool(), timeout_seconds=20)
    rotation = ring.circulate_with_gradients(torch.zeros(3))
    kept = None
    for _, _, gradient in rotation:
        kept = gradient
    late = refused(kept.add, torch.zeros(3))
    again = refused(next, iter(rotation))
    del rotation  # its last hop is on its way
    return late, again, ring.pool.leased_bytes


def test_a_rotation_dropped_before_its_gradients_returns_its_buffers(ranks):
    for late, again, leased in ranks.run(unfinished_rotation, world_size=2, backend="gloo"):
        assert "has been sent on" in late
        assert "goes round once" in again
        assert leased == 0


def operation_log(schedule):
    """What the ring posts and when, with peers relative to the rank."""
    rank, size, log = dist.get_rank(), dist.get_world_size(), []
    plain = Channel.exchange

    def logged(channel, *, receives, sends, step):
        peers = [[(m.peer - rank) % size for m in messages] for messages in (receives, sends)]
        shapes = [tuple(m.tensor.shape) for m in receives]
        log.append((channel.stream.name, step, *peers, shapes))
        return plain(channel, receives=receives, sends=sends, step=step)

    Channel.exchange = logged
    ring = Ring(dist.group.WORLD, BufferPool(), schedule=schedule, timeout_seconds=20)
    with ring.circulate_with_gradients(*own_block(rank)) as rotation:
        for index, (owner, _, gradient) in enumerate(rotation):
            log.append(f"compute {index + 1}")
            gradient.add(*part_of(rank, owner))
        rotation.gradients()
    return log


def test_all_ranks_post_the_same_batches_each_block_before_the_compute_it_hides_behind(ranks):
    logs = ranks.run(operation_log, world_size=4, args=(SingleRing(),), backend="gloo")
    assert all(log == logs[0] for log in logs)
    shapes = [(6, 2, 3), (6, 5)]
    block, home = ([3, 3], [1, 1], shapes), ([3, 3], [1, 1], shapes)
    expected = []
    for step in range(1, 5):
        if step > 1:
            expected.append(("ring gradients", f"step {step - 1} of 4", *home))
        if step < 4:
            expected.append(("ring blocks", f"step {step} of 4", *block))
        expected.append(f"compute {step}")
    expected.append(("ring gradients", "step 4 of 4", *home))
    assert logs[0] == expected


def rounding_of_a_16_bit_way_home():
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for dtype in (None, torch.bfloat16):
        ring = Ring(dist.group.WORLD, BufferPool(), gradient_dtype=dtype, timeout_seconds=20)
        with ring.circulate_with_gradients(torch.zeros(64)) as rotation:
            for owner, _, gradient in rotation:
                gradient.add(torch.linspace(0, 1, 64) * (1 + rank) / (1 + owner))
            (total,) = rotation.gradients()
        exact = torch.linspace(0, 1, 64).double() * sum(range(1, size + 1)) / (1 + rank)
        results.append(((total - exact).abs().max() / exact.max()).item())
    return results


def test_gradients_add_up_in_fp32_and_a_16_bit_way_home_rounds_once_per_hop(ranks):
    for fp32, bf16 in ranks.run(rounding_of_a_16_bit_way_home, world_size=4, backend="gloo"):
        assert fp32 < 4e-7
        assert 4e-7 < bf16 < 4 * 2.0**-8


def gradients_alone():
    """A tour without blocks: (owners, blocks seen, sums, bytes of each dtype, hops) per rank."""
    rank, log = dist.get_rank(), []
    plain = Channel.exchange

    def logged(channel, **messages):
        log.append((channel.stream.name, messages["step"]))
        return plain(channel, **messages)

    Channel.exchange = logged
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    ring = Ring(group, PoisonedPool(), timeout_seconds=20)
    tensors, owners = own_block(rank), []
    for how in ("add", "in place", "some ranks add nothing", "nobody adds"):
        with ring.circulate_gradients(*tensors) as rotation:
            for owner, block, gradient in rotation:
                assert block == ()
                owners.append(owner)
                parts = part_of(rank, owner)
                if how == "add":
                    gradient.add(*parts)
                elif how == "in place" or (how == "some ranks add nothing" and rank % 2):
                    for total, part in zip(gradient.sums(), parts, strict=True):
                        total += part
            late = refused(gradient.sums)
            home = rotation.gradients()
        assert "has been sent on" in late
        adding = [r for r in range(ring.size) if how in ("add", "in place") or r % 2]
        for index, (total, tensor) in enumerate(zip(home, tensors, strict=True)):
            parts = [part_of(r, rank)[index] for r in adding if how != "nobody adds"]
            assert total.dtype == tensor.dtype
            assert torch.equal(total.long(), sum(parts, torch.zeros_like(total).long()))
    assert ring.pool.leased_bytes == 0
    return owners, log


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_go_round_alone_in_as_many_hops_as_there_are_ranks(ranks, size):
    for rank, (owners, log) in enumerate(
        ranks.run(gradients_alone, world_size=size, backend="gloo")
    ):
        assert owners == [(rank - step) % size for step in range(size)] * 4
        hops = [("ring gradients", f"step {step} of {size}") for step in range(1, size + 1)]
        assert log == (hops * 4 if size > 1 else [])


def kept_wide():
    """Sums of 16-bit blocks, as they added up and as the blocks are; neither shares memory."""
    ring = Ring(dist.group.WORLD, BufferPool(), timeout_seconds=20)
    results = []
    for accumulated in (True, False):
        with ring.circulate_with_gradients(torch.zeros(3, dtype=torch.bfloat16)) as rotation:
            for _, _, gradient in rotation:
                gradient.add(torch.full((3,), 256.0 if ring.position == 0 else 1.0))
            (home,) = rotation.gradients(accumulated=accumulated)
        kept = home.clone()
        tour(ring, ring.position)  # over the same buffers
        assert torch.equal(home, kept)
        results.append((home.dtype, home.tolist()))
    return results


def test_finished_gradients_can_be_had_in_the_dtype_they_added_up_in(ranks):
    for wide, narrow in ranks.run(kept_wide, world_size=4, backend="gloo"):
        assert wide == (torch.float32, [259.0] * 3)
        assert narrow == (torch.bfloat16, [260.0] * 3)
