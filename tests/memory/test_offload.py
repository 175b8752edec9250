"""Kept results in host memory: there while nobody needs them, back one call ahead, used again."""

import torch
from torch.utils.checkpoint import checkpoint

from megatron_longseq.memory.keep_attention import keep_or_compute
from megatron_longseq.memory.offload import HostStore, Offloaded
from megatron_longseq.memory.recomputed_layer import LayerOffload


class Costly(torch.autograd.Function):
    """x squared, whose forward is counted and kept."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        def compute():
            Costly.runs += 1
            return (x * x,)

        ctx.save_for_backward(x)
        return keep_or_compute(compute)[0].clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def test_what_comes_back_is_what_was_kept_and_its_memory_is_used_again():
    store, kinds = HostStore(), (torch.float32, torch.bfloat16)
    for _ in range(3):
        given = tuple(torch.randn(5, 3).to(dtype) for dtype in kinds)
        wanted = [tensor.clone() for tensor in given]
        away = store.put(given)
        for tensor in given:
            tensor.zero_()
        assert store.pool.leased_bytes == away.host_bytes == 5 * 3 * (4 + 2)
        assert all(torch.equal(a, b) for a, b in zip(away.get(), wanted, strict=True))
        assert store.pool.leased_bytes == 0
    assert store.pool.held_bytes == 5 * 3 * (4 + 2)


def test_what_is_never_fetched_gives_its_memory_back():
    store = HostStore()
    away = store.put((torch.ones(4),))
    del away
    assert store.pool.leased_bytes == 0


def test_the_call_before_is_fetched_while_this_one_runs_again(monkeypatch):
    order, fetch = [], Offloaded.fetch

    def watched(item):
        if item._back is None:
            order.append(item)
        fetch(item)

    monkeypatch.setattr(Offloaded, "fetch", watched)
    Costly.runs, offload, items = 0, LayerOffload(), []
    put = offload.store.put

    def numbered(tensors):
        items.append(put(tensors))
        return items[-1]

    offload.store.put = numbered
    x = start = torch.arange(1.0, 4.0, requires_grad=True)
    fetched_by_layer = []
    for layer in range(4):

        def run(x, layer=layer):
            if len(items) == 4:  # the second runs
                fetched_by_layer.append((layer, [items.index(item) for item in order]))
            return Costly.apply(x)

        x = checkpoint(offload.kept(run, 1.0), x, use_reentrant=True)
    assert Costly.runs == 4 and order == []
    x.sum().backward()
    assert Costly.runs == 4, "no second computation"
    assert torch.equal(start.grad, 16 * torch.arange(1.0, 4.0) ** 15)
    assert fetched_by_layer == [
        (3, [3, 2]),  # its own, and ahead that of the layer before
        (2, [3, 2, 1]),
        (1, [3, 2, 1, 0]),
        (0, [3, 2, 1, 0]),
    ]
    assert offload.store.pool.leased_bytes == 0
