"""The head exchange: there and back, in the ring's order, with heads that count several times."""

from math import lcm

import pytest
import torch
import torch.distributed as dist

from megatron_longseq.communication import BufferPool, HeadExchange
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
    copies = [lcm(heads, size) // heads for heads in head_counts]
    mine = [grid.split(whole, rank) for whole in wholes]
    # A gradient expanded from a scalar, or a slice of a projection, is not contiguous.
    mine[-1] = mine[-1].repeat(1, 1, 2, 1)[:, :, : head_counts[-1]]
    blocks = exchange.to_heads(*mine, copies=copies)
    for block, whole, repeat in zip(blocks, wholes, copies, strict=True):
        repeated = whole.repeat_interleave(repeat, 2)
        count = repeated.shape[2] // size
        assert block.is_contiguous() or size == 1
        assert torch.equal(block, repeated[:, :, rank * count : (rank + 1) * count])
    back = exchange.to_tokens(*blocks, copies=copies)
    for tensor, original, repeat in zip(back, mine, copies, strict=True):
        assert torch.equal(tensor, original * repeat), "the sum over the copies of each head"
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
    ranks.run(there_and_back, world_size=4, args=([12, 6, 10], "auto"), backend="gloo")
    ranks.run(there_and_back, world_size=3, args=([9, 4, 2], "auto"), backend="gloo")


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
    exchange.to_heads(torch.randn(4, 1, heads, 8), copies=[lcm(heads, size) // heads])
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
