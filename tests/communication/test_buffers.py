"""The buffer pool: what is leased, kept, reused and given up."""

import pytest
import torch

from megatron_longseq.communication import BufferPool

CPU = torch.device("cpu")


def test_memory_that_came_back_is_leased_again_in_another_shape_and_dtype():
    pool = BufferPool()
    first = pool.lease((4, 8), torch.float32, CPU)
    address = first.tensor.data_ptr()
    first.give_back()
    second = pool.lease((64,), torch.bfloat16, CPU)
    assert second.tensor.data_ptr() == address
    assert (second.tensor.shape, second.tensor.dtype) == ((64,), torch.bfloat16)
    assert (pool.leased_bytes, pool.held_bytes) == (128, 128)


def test_two_leases_at_a_time_share_no_memory():
    pool = BufferPool()
    first, second = (pool.lease((4,), torch.float32, CPU) for _ in range(2))
    first.tensor.zero_()
    second.tensor.fill_(1)
    assert first.tensor.sum() == 0


def test_the_smallest_sufficient_buffer_is_chosen():
    pool = BufferPool()
    buffers = [pool.lease((size,), torch.float32, CPU) for size in (100, 10, 50)]
    addresses = [buffer.tensor.data_ptr() for buffer in buffers]
    for buffer in buffers:
        buffer.give_back()
    assert pool.lease((20,), torch.float32, CPU).tensor.data_ptr() == addresses[2]


def test_alternating_lengths_hold_the_longest_not_their_sum():
    pool = BufferPool()
    for size in (10, 100, 10, 50, 100, 70):
        pair = [pool.lease((size,), torch.float32, CPU) for _ in range(2)]
        for buffer in pair:
            buffer.give_back()
    assert pool.held_bytes == 2 * 100 * 4


def test_leases_that_belong_together_are_made_all_or_none():
    pool = BufferPool()
    kinds = [((4,), torch.float32), ((2,), torch.float64), ((1 << 60,), torch.float32)]
    with pytest.raises(RuntimeError):
        pool.lease_all(kinds, CPU)
    assert (pool.leased_bytes, pool.held_bytes) == (0, 32)


def test_given_back_twice_counts_once():
    pool = BufferPool()
    buffer = pool.lease((4,), torch.float32, CPU)
    buffer.give_back()
    buffer.give_back()
    buffer.discard()
    assert (pool.leased_bytes, pool.held_bytes) == (0, 16)
    first, second = (pool.lease((4,), torch.float32, CPU) for _ in range(2))
    assert first.tensor.data_ptr() != second.tensor.data_ptr()


def test_discarded_memory_is_never_leased_again():
    pool = BufferPool()
    buffer = pool.lease((4,), torch.float32, CPU)
    kept = buffer.tensor
    buffer.discard()
    assert (pool.leased_bytes, pool.held_bytes) == (0, 0)
    assert pool.lease((4,), torch.float32, CPU).tensor.data_ptr() != kept.data_ptr()
