"""Time limits that name what did not come, and the path through host memory."""

import time

import torch
import torch.distributed as dist
from grids import grid_groups, refused

from megatron_longseq.communication import BufferPool, GridAgreement, GroupPlace, HeadExchange, Ring
from megatron_longseq.communication import slots as slots_module


def late_peer(what):
    """Rank 1 stays away; returns what the others' errors say, and after how many seconds."""
    rank, pool = dist.get_rank(), BufferPool()
    ring = Ring(dist.group.WORLD, pool, timeout_seconds=1.0)
    heads = HeadExchange(dist.group.WORLD, pool, timeout_seconds=1.0)
    slots_module.SETTLE_SECONDS = 1.0
    dist.barrier()
    if rank == 1:
        time.sleep(2.5)
        return None, 0.0, pool.leased_bytes
    started = time.monotonic()
    if what == "agreement":
        agreement = GridAgreement(GroupPlace.of(None), ring.place, timeout_seconds=1.0)
        error = refused(agreement.verify, {"tokens": 4})
    elif what == "ring":
        error = refused(lambda: [None for _ in ring.circulate(torch.zeros(1 << 20))])
    else:
        error = refused(heads.to_heads, torch.zeros(4, 1, 3, 2))
    return error, time.monotonic() - started, pool.leased_bytes


def test_a_late_peer_is_named_with_group_step_and_direction(ranks):
    for what, waiting, moment in (
        ("ring", 2, "ring blocks: receiving from rank 1 at step 1 of 3"),
        ("heads", 0, "head exchange: receiving from rank 1 at the way to heads"),
        ("agreement", 0, "agreement on inputs: comparing shapes at the start of the operation"),
    ):
        results = ranks.run(late_peer, world_size=3, args=(what,), backend="gloo")
        named = results[waiting][0]
        assert named.startswith(f"CommunicationTimeout: {moment}, on rank {waiting}"), results
        assert "in the group of ranks [0, 1, 2]" in named
        assert "within 1 s" in named and "--longseq-comm-timeout-seconds" in named
        assert all(seconds < 4 for _, seconds, _ in results)
        assert all(leased == 0 for _, _, leased in results), "nothing stays on lease"


def fails_alone():
    """Rank 1 fails at its second step; the others learn that it does not go on."""
    rank, pool = dist.get_rank(), BufferPool()
    ring = Ring(dist.group.WORLD, pool, timeout_seconds=1.0)
    slots_module.SETTLE_SECONDS = 1.0
    dist.barrier()
    started, error = time.monotonic(), None
    try:
        with ring.circulate_with_gradients(torch.zeros(1 << 16)) as rotation:
            for step, (_, (block,), gradient) in enumerate(rotation):
                if rank == 1 and step == 1:
                    raise MemoryError("no room")
                gradient.add(block)
            rotation.gradients()
    except (MemoryError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - started
    if rank == 1:
        time.sleep(2.5)
    return error, seconds, pool.leased_bytes


def test_a_rank_that_fails_alone_raises_its_own_error_and_the_others_name_it(ranks):
    results = ranks.run(fails_alone, world_size=3, backend="gloo")
    assert results[1][0] == "MemoryError: no room"
    assert "rank 1" in results[2][0] and "Communication" in results[2][0]
    assert "Communication" in results[0][0]
    assert all(seconds < 4 for _, seconds, _ in results)
    assert all(leased == 0 for _, _, leased in results)


def gone_peer():
    rank = dist.get_rank()
    ring = Ring(dist.group.WORLD, BufferPool(), timeout_seconds=30)
    for _ in ring.circulate(torch.zeros(4)):
        pass
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(1)
        return None
    started = time.monotonic()
    error = refused(lambda: [None for _ in ring.circulate(torch.zeros(4))])
    return error, time.monotonic() - started


def test_a_peer_that_has_ended_is_reported_at_once(ranks):
    error, seconds = ranks.run(gone_peer, world_size=2, backend="gloo")[0]
    assert "CommunicationError" in error and "from rank 1" in error
    assert seconds < 10


def both_ways(size):
    """A rotation and a head exchange, sent directly and through host copies."""
    head_group, ring_group = grid_groups(2, size // 2)
    rank, results = dist.get_rank(), []
    for staging in ("never", "always"):
        pool = BufferPool()
        ring = Ring(ring_group, pool, timeout_seconds=20, staging=staging)
        heads = HeadExchange(head_group, pool, timeout_seconds=20, staging=staging)
        generator = torch.Generator().manual_seed(rank)
        (block,) = heads.to_heads(torch.randn(4, 2, 6, 3, generator=generator))
        with ring.circulate_with_gradients(block) as rotation:
            for owner, (visitor,), gradient in rotation:
                gradient.add(visitor * (1 + owner) + rank)
            (home,) = rotation.gradients()
        results.append(heads.to_tokens(home)[0])
        assert pool.leased_bytes == 0
    return torch.equal(*results)


def test_the_path_through_host_memory_gives_the_same_bits(ranks):
    assert all(ranks.run(both_ways, world_size=4, args=(4,), backend="gloo"))
