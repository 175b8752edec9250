"""The head exchange: there and back, in the ring's order, with shares that differ or overlap."""

import pytest
import torch
import torch.distributed as dist

from megatron_longseq.communication import BufferPool, HeadExchange
from megatron_longseq.communication.all_to_all import even_shares, serving_shares
from megatron_longseq.communication.transport import Channel
from megatron_longseq.token_layout import ZigzagGrid


def sequence(heads, width, total):
    """Values that name their token, micro-batch, head and column."""
    shape = (total, 2, heads, width)
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def there_and_back(head_counts, staging):
    rank, size = dist.get_rank(), dist.get_world_size()
    total = 2 * size * 3
    grid = ZigzagGrid(size, 1)
    pool = BufferPool()
    exchange = HeadExchange(dist.group.WORLD, pool, timeout_seconds=20, staging=staging)
    wholes = [sequence(heads, width, total) for width, heads in enumerate(head_counts, 1)]
    queries = even_shares(head_counts[0], size)
    shares = [serving_shares(queries, head_counts[0], heads) for heads in head_counts]
    mine = [grid.split(whole, rank) for whole in wholes]
    # A gradient expanded from a scalar, or a slice of a projection, is not contiguous.
    mine[-1] = mine[-1].repeat(1, 1, 2, 1)[:, :, : head_counts[-1]]
    blocks = exchange.to_heads(*mine, shares=shares)
    for block, whole, share in zip(blocks, wholes, shares, strict=True):
        assert block.is_contiguous() or size == 1
        assert torch.equal(block, whole[:, :, list(share[rank])])
    back = exchange.to_tokens(*blocks, shares=shares)
    for tensor, original, share in zip(back, mine, shares, strict=True):
        users = [sum(head in part for part in share) for head in range(tensor.shape[2])]
        summed = original * torch.tensor(users, dtype=original.dtype)[:, None]
        assert torch.equal(tensor, summed), "the sum over all ranks that have a head"
    return pool.leased_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_to_heads_is_the_whole_sequence_in_order_and_to_tokens_its_inverse(ranks, size):
    counts = [size * 2, size, 1]
    for staging in ("auto", "always"):
        assert (
            ranks.run(there_and_back, world_size=size, args=(counts, staging), backend="gloo")
            == [0] * size
        )


def test_heads_that_neither_divide_nor_are_divided_by_the_group(ranks):
    for size, counts in ((4, [30, 6, 10]), (3, [8, 4, 2])):
        leased = ranks.run(there_and_back, world_size=size, args=(counts, "auto"), backend="gloo")
        assert leased == [0] * size


def test_query_heads_never_part_from_their_key_head():
    # InternEvo PR #224 and others pad queries and keys apart, and tear groups: 28 heads on 8 ranks.
    for heads, kv_heads, size in ((28, 4, 8), (24, 6, 4), (7, 7, 5), (40, 8, 16), (5, 1, 4)):
        queries = even_shares(heads, size)
        keys = serving_shares(queries, heads, kv_heads)
        assert [head for share in queries for head in share] == list(range(heads))
        assert max(map(len, queries)) - min(map(len, queries)) <= 1
        for mine, theirs in zip(queries, keys, strict=True):
            assert {head * kv_heads // heads for head in mine} == set(theirs)


def memory_of_messages(heads):
    """(distinct addresses sent from, messages, bytes leased) for one exchange of ``heads``."""
    size, sent = dist.get_world_size(), []
    plain = Channel.exchange

    def watched(channel, *, receives, sends, step):
        sent.extend(message.tensor.data_ptr() for message in sends)
        return plain(channel, receives=receives, sends=sends, step=step)

    Channel.exchange = watched
    pool = BufferPool()
    exchange = HeadExchange(dist.group.WORLD, pool, timeout_seconds=20)
    shares = serving_shares(even_shares(size, size), size, heads)
    exchange.to_heads(torch.randn(4, 1, heads, 8), shares=[shares])
    return len(set(sent)), len(sent), pool.held_bytes


def test_what_several_ranks_get_is_packed_once(ranks):
    # Four ranks, two heads: ranks 0 and 1 get head 0, ranks 2 and 3 head 1. Each rank has three
    # peers and two distinct messages for them.
    for addresses, messages, held in ranks.run(
        memory_of_messages, world_size=4, args=(2,), backend="gloo"
    ):
        early_and_late = 2
        assert messages == 3 * early_and_late
        assert addresses == 2 * early_and_late
        assert held == 2 * 4 * 8 * 4, "bytes of two heads, not of three messages"
