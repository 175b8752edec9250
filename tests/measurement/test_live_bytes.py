"""Claims about LiveBytes, each against numbers worked out by hand (float32: 4 bytes)."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_longseq.measurement import LiveBytes


def test_a_tensor_counts_until_its_last_reference_dies():
    with LiveBytes() as live:
        a = torch.zeros(100)
        assert live.current() == 400
        b = a
        del a
        assert live.current() == 400
        del b
        assert live.current() == 0
        assert live.peak() == 400


def test_a_view_costs_nothing_and_keeps_its_whole_base():
    with LiveBytes() as live:
        base = torch.zeros(10, 10)
        view = base.view(100).narrow(0, 3, 2)
        assert live.current() == 400
        del base
        assert live.current() == 400
        del view
        assert live.current() == 0


def test_in_place_and_out_operators_cost_nothing():
    with LiveBytes() as live:
        a, b, out = torch.zeros(100), torch.ones(100), torch.empty(100)
        a.add_(b).mul_(2)
        torch.add(a, b, out=out)
        assert live.peak() == live.current() == 1200


def test_storage_size_counts_not_the_elements_in_use():
    with LiveBytes() as live:
        x = torch.empty(7, dtype=torch.bfloat16)
        y = torch.empty_strided((2, 2), (10, 1))
        assert live.current() == 14 + 4 * 12
        del x, y


def test_what_only_autograd_holds_is_counted_until_backward_frees_it():
    weight = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        live.include([weight])
        hidden = weight.exp()
        loss = hidden.sin().sum()
        del hidden
        # weight, exp's result (held by exp and by sin), the sum; sin's result is saved by nobody.
        assert live.current() == 400 + 400 + 4
        loss.backward()
        # The gradient is there, exp's result is gone.
        assert live.current() == 400 + 400 + 4
        del loss
        assert live.current() == 800


def test_peak_is_found_inside_a_function():
    def inside():
        a = torch.zeros(100)
        b = a + 1
        c = a + b
        del a, b
        return c

    with LiveBytes() as live:
        c = inside()
        assert live.current() == 400
        assert live.peak() == 1200
        live.reset_peak()
        assert live.peak() == 400
        del c
        assert live.peak() == 400


def test_peak_of_a_backward_pass_matches_the_hand_count():
    n, h = 8, 32
    x = torch.randn(n, h)
    weight = nn.Parameter(torch.randn(h, h))
    with LiveBytes() as live:
        live.include(x, weight)
        base = live.current()
        assert base == 4 * (n * h + h * h)
        y = x @ weight
        loss = y.pow(2).sum()
        held = live.current() - base
        assert held == 4 * (n * h + 1)  # y, loss; pow's result is not needed again
        live.reset_peak()
        loss.backward()
        # Largest moment: y, loss, its gradient 1, y's gradient, and the weight's new gradient;
        # the gradient of pow's result is an expanded view of the 1.
        assert live.peak() - base == 4 * (n * h + 1 + 1 + n * h + h * h)


def test_storage_shrunk_by_hand_no_longer_counts():
    with LiveBytes() as live:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        assert live.current() == 0
        b = torch.zeros(50)
        assert live.current() == 200
        assert live.peak() == 400
        del b


def test_peak_does_not_believe_in_storages_shrunk_by_hand():
    with LiveBytes() as live:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        b = torch.zeros(90)
        assert live.peak() == 400  # never 400 + 360
        c = torch.zeros(20)
        assert live.peak() == 440
        del a, b, c


def test_storage_grown_by_hand_counts_from_its_next_use():
    with LiveBytes() as live:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        live.reset_peak()
        a.untyped_storage().resize_(400)
        a.fill_(1)
        a.untyped_storage().resize_(0)
        assert live.peak() == 400
        assert live.current() == 0


def test_storage_grown_by_an_operator_counts():
    with LiveBytes() as live:
        a = torch.zeros(10)
        a.resize_(100)
        assert live.current() == 400


def test_output_discarded_after_use_and_recomputed_in_backward():
    # The way Megatron's CheckpointWithoutOutput works, with its storage trick.
    x = torch.randn(100, requires_grad=True)
    with LiveBytes() as live:
        live.include(x)
        with torch.no_grad():
            y = x * 2
        y.requires_grad_()
        z = y.sin()
        size = y.untyped_storage().nbytes()
        y.untyped_storage().resize_(0)
        assert live.current() == 400 + 400  # x, z
        live.reset_peak()
        with torch.no_grad():
            again = x * 2
        y.untyped_storage().resize_(size)
        y.untyped_storage().copy_(again.untyped_storage())
        del again
        z.sum().backward()
        assert torch.equal(y.grad, torch.cos(x.detach() * 2))
        # x, z, y restored, the recomputed copy while it was copied; later y's gradient, cos(y)..
        assert live.peak() >= 400 * 4


def test_tensor_from_before_counts_when_included_or_used():
    a, b, c = torch.zeros(100), torch.zeros(200), torch.zeros(300)
    with LiveBytes() as live:
        live.include(a)
        assert live.current() == 400
        b.view(-1)
        assert live.current() == 1200
        assert live.by_origin() == {"given": 1200}
    del c


def test_module_is_included_with_buffers_and_gradients():
    module = nn.BatchNorm1d(10)
    module.weight.grad = torch.zeros(10)
    live = LiveBytes().include(module)
    # weight, bias, gradient, running mean and variance, and the int64 step counter
    assert live.current() == 5 * 40 + 8


def test_optimizer_state_is_counted():
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    with LiveBytes() as live:
        live.include(model)
        model(torch.ones(1, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert live.current() == 400 + 2 * 400 + 4  # weight, two moments, a step count


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_trades_held_bytes_for_a_recomputation(use_reentrant):
    def block(x):
        return x.exp().sin().exp()

    x = torch.randn(100, requires_grad=True)

    def held_and_peak(run):
        with LiveBytes() as live:
            live.include(x)
            y = run(x)
            held = live.current()
            live.reset_peak()
            y.sum().backward()
            peak = live.peak()
        x.grad = None
        return held, peak

    plain = held_and_peak(block)
    short = held_and_peak(lambda x: checkpoint(block, x, use_reentrant=use_reentrant))
    # Plain: x, exp (saved by exp and sin), y (saved by the last exp). Else: x and y.
    assert plain[0] == 1200
    # A checkpoint needs no more than x, y, and an empty tensor or two to hang its node on.
    assert 800 <= short[0] <= 816
    # Recomputation brings the inner exp and the last exp back.
    assert short[1] >= 1200


def test_meta_and_sparse_tensors_do_not_count():
    with LiveBytes() as live:
        torch.empty(1000, device="meta")
        a = torch.eye(10)
        a.to_sparse()
        assert live.current() == 400


def test_wrapper_subclass_counts_what_it_wraps():
    from torch.testing._internal.two_tensor import TwoTensor

    with LiveBytes() as live:
        pair = TwoTensor(torch.zeros(100), torch.zeros(100))
        twice = pair * 2
        assert live.current() == 1600
        del twice
        assert live.current() == 800


def test_numpy_and_shared_memory_count_with_their_storage():
    numpy = pytest.importorskip("numpy")
    with LiveBytes() as live:
        from_numpy = torch.from_numpy(numpy.zeros(100, dtype=numpy.float32))
        shared = torch.zeros(100).share_memory_()
        from_numpy + shared
        assert live.current() == 800


def test_tensor_freed_by_another_thread_is_noticed():
    with LiveBytes() as live:
        box = [torch.zeros(100)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert live.current() == 0


def test_tensor_freed_by_the_garbage_collector_is_noticed():
    class Node:
        pass

    gc.collect()
    with LiveBytes() as live:
        node = Node()
        node.itself, node.tensor = node, torch.zeros(100)
        del node
        assert live.current() == 400
        gc.collect()
        assert live.current() == 0


def test_reused_addresses_do_not_confuse_the_count():
    with LiveBytes() as live:
        kept = []
        for i in range(500):
            x = torch.zeros(i % 7 + 1)
            if i % 5 == 0:
                kept.append(x)
        expected = sum(4 * x.numel() for x in kept) + 4 * (499 % 7 + 1)
        assert live.current() == expected


def test_meaning_survives_leaving_and_entering_again():
    live = LiveBytes()
    with live:
        a = torch.zeros(100)
    b = torch.zeros(100)
    assert live.current() == 400
    with live:
        c = a + b
        assert live.current() == 1200
    del a, b, c
    assert live.current() == 0


def test_every_run_gives_the_same_numbers():
    def measure():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        with LiveBytes() as live:
            live.include(model)
            x = torch.randn(8, 16)
            loss = model(x).pow(2).mean()
            held = live.current()
            loss.backward()
            return held, live.current(), live.peak()

    assert measure() == measure() == measure()


def test_results_are_unchanged():
    def run():
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        model(torch.randn(4, 16)).pow(2).sum().backward()
        return model.weight.grad

    plain = run()
    with LiveBytes():
        assert torch.equal(run(), plain)
