"""Shards on all ranks in the same step, and their gradients back at the owner; and lost peers."""

import time

import pytest
import torch
import torch.distributed as dist
from grids import refused
from metp_reference import leaves, normal

from megatron_longseq.communication import BufferPool, Ring
from megatron_longseq.communication import collectives as collectives_module
from megatron_longseq.communication import slots as slots_module
from megatron_longseq.metp.lockstep import OwnerReduce, ShardBroadcast
from megatron_longseq.metp.vocab_loss import ring_cross_entropy

SIZES = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 2, 4), 8: (1, 2, 4, 8)}


def world():
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def shard_of(owner):
    """Integers, so that sums are exact; of another dtype each."""
    generator = torch.Generator().manual_seed(owner)
    return (
        torch.randint(-99, 99, (3, 4), generator=generator).float(),
        torch.randint(-99, 99, (5,), generator=generator).bfloat16(),
    )


def part_of(rank, owner):
    return tuple(
        (1 + rank + 10 * owner) * torch.ones_like(t, dtype=torch.float64) for t in shard_of(0)
    )


def visits(size):
    rank, pool = dist.get_rank(), BufferPool()
    broadcast = ShardBroadcast(world(), pool, timeout_seconds=20)
    own = leaves(*shard_of(rank))
    for per_step in SIZES[size]:
        seen = []
        with OwnerReduce(world(), pool, own, timeout_seconds=20) as reduce:
            for first, shards in broadcast.visit(*own, per_step=per_step):
                assert len(shards) == per_step
                for owner, shard in enumerate(shards, first):
                    seen.append(owner)
                    assert all(
                        torch.equal(a, b) for a, b in zip(shard, shard_of(owner), strict=True)
                    )
                    assert not any(tensor.requires_grad for tensor in shard)
                    reduce.add(owner, *part_of(rank, owner))
            home = reduce.home()
        assert seen == list(range(size))
        total = sum(1 + other + 10 * rank for other in range(size))
        assert [t.dtype for t in home] == [torch.float32] * 2
        assert all(torch.equal(t, torch.full_like(t, total)) for t in home)
        assert all(torch.equal(a, b) for a, b in zip(own, shard_of(rank), strict=True))
        assert pool.leased_bytes == 0
    return pool.held_bytes


@pytest.mark.parametrize("size", list(SIZES))
def test_every_rank_sees_every_shard_in_order_and_sums_end_at_their_owner(ranks, size):
    shard, total = 3 * 4 * 4 + 5 * 2, (3 * 4 + 5) * 4
    held = max(ranks.run(visits, world_size=size, args=(size,), backend="gloo"))
    # Two sets of half of the shards, or one set of all; two buffers for sums if they travel.
    assert held == (size * shard + 2 * total if size > 1 else total)


def leaves_early():
    """Leaves at every step, in several ways, on all ranks alike; then everything works again."""
    rank, pool = dist.get_rank(), BufferPool()
    broadcast = ShardBroadcast(world(), pool, timeout_seconds=20)
    own, leased = shard_of(rank), set()
    for step in range(4):
        for how in ("break", "raise", "reduce"):
            try:
                with OwnerReduce(world(), pool, own, timeout_seconds=20) as reduce:
                    for first, _ in broadcast.visit(*own):
                        if how == "reduce":
                            reduce.add(first, *part_of(rank, first))
                        if first == step:
                            if how != "break":
                                raise KeyError(step)
                            break
            except KeyError:
                pass
            leased.add(pool.leased_bytes)
    with OwnerReduce(world(), pool, own) as reduce:
        unfinished = refused(reduce.home)
    return leased, unfinished, visits(4) > 0, refused(list, broadcast.visit(*own, per_step=3))


def test_buffers_return_from_exceptions_and_abandoned_loops(ranks):
    for leased, unfinished, works, refusal in ranks.run(leaves_early, world_size=4, backend="gloo"):
        assert leased == {0} and works
        assert "no gradient has been added" in unfinished
        assert "3 weight shards per step do not divide 4 ranks" in refusal
        assert "nearest that do: [1, 2, 4]" in refusal


class SmallPool(BufferPool):
    """Runs out of memory at the given lease."""

    def __init__(self, leases):
        super().__init__()
        self.left = leases

    def lease(self, *args, **options):
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no room")
        return super().lease(*args, **options)


def runs_out(leases):
    pool = SmallPool(leases)
    own = shard_of(dist.get_rank())
    broadcast = ShardBroadcast(world(), pool, timeout_seconds=20)
    errors = [refused(list, broadcast.visit(*own))]
    pool.left = leases
    errors.append(refused(OwnerReduce(world(), pool, own).__enter__))
    return errors, pool.leased_bytes


def test_running_out_of_memory_leaves_nothing_on_lease(ranks):
    for leases in (1, 3):
        for errors, leased in ranks.run(runs_out, world_size=2, args=(leases,), backend="gloo"):
            assert errors == ["MemoryError: no room"] * 2 and leased == 0


def missing_peer(gone):
    """Rank 1 is late, or gone; what the others' errors say, after how long, and what is leased."""
    rank, results = dist.get_rank(), {}
    limit = 3.0 if gone else 0.3
    slots_module.SETTLE_SECONDS = collectives_module.SETTLE_SECONDS = 0.3
    groups = {what: dist.new_group() for what in ("broadcast", "reduce", "losses")}
    pools = {what: BufferPool() for what in groups}
    for group in groups.values():  # connected
        dist.all_reduce(torch.zeros(1), group=group)
    own = tuple(torch.zeros(1 << 18) for _ in range(3))
    ring = Ring(groups["losses"], pools["losses"], timeout_seconds=limit)
    x, weight, labels = normal(2, 1, 4), normal(3, 4), torch.zeros(1, 6, dtype=torch.int64)

    def visit():
        broadcast = ShardBroadcast(groups["broadcast"], pools["broadcast"], timeout_seconds=limit)
        return list(broadcast.visit(*own))

    def add():
        with OwnerReduce(groups["reduce"], pools["reduce"], own, timeout_seconds=limit) as reduce:
            for owner in range(3):
                reduce.add(owner, *own)
            reduce.home()

    def gather():
        # The ring itself has been gone round: rank 1 stops before the losses are gathered.
        ring_cross_entropy(x, weight, labels, torch.arange(6), ring=ring)

    if rank == 1:
        plain = dist.all_gather

        def stop(*args, **options):
            raise KeyError

        dist.all_gather = stop
        refused(gather)
        dist.all_gather = plain
        if gone:
            dist.destroy_process_group()
        time.sleep(1 if gone else 2.5)
        return results
    for what, call in (("losses", gather), ("broadcast", visit), ("reduce", add)):
        started = time.monotonic()
        error = refused(call)
        results[what] = error, time.monotonic() - started, pools[what].leased_bytes
    return results


@pytest.mark.parametrize("gone", [False, True])
def test_a_missing_peer_is_named_with_stream_group_and_step(ranks, gone):
    results = ranks.run(missing_peer, world_size=3, args=(gone,), backend="gloo")
    for what, words in (
        ("broadcast", "weight shards: broadcast from ranks ["),
        ("reduce", "weight gradients: sum at rank "),
        ("losses", "losses: gathering at the last step"),
    ):
        named = 0
        for rank in (0, 2):
            error, seconds, leased = results[rank][what]
            assert seconds < 4 and leased == 0, (rank, what, seconds, leased)
            if error is None:
                continue  # A sender is done when its message has left.
            assert error.startswith(("CommunicationError: ", "CommunicationTimeout: ")), error
            assert words in error, (rank, what, error)
            assert f"on rank {rank} in the group of ranks [0, 1, 2]" in error
            assert what == "losses" or ("at step " in error and " of 3" in error)
            if gone:
                # One notices at once; another may wait for the one that has noticed.
                named += "Connection closed by peer" in error and seconds < 2.5
            else:
                named += "not completed within 0.3 s" in error
        assert named, (what, results)
