"""Claims about what is saved for backward, against formulas (float32: 4 bytes)."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_longseq.measurement import held_after, saved_for_backward


class Mlp(nn.Module):
    def __init__(self, h, f):
        super().__init__()
        self.up = nn.Linear(h, f)
        self.down = nn.Linear(f, h)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


def test_mlp_saves_its_input_and_its_activation():
    n, h, f = 6, 8, 20
    model, x = Mlp(h, f), torch.randn(n, h)
    with saved_for_backward() as saved:
        y = model(x)
    # relu saves its result, the second product the same storage; no weight counts.
    assert saved.bytes == 4 * (n * h + n * f)
    del y


def test_attention_saves_q_k_v_and_the_probabilities():
    n, a, d = 5, 3, 4
    q, k, v = (torch.randn(a, n, d, requires_grad=True) for _ in range(3))
    with saved_for_backward() as saved:
        y = attention(q, k, v)
    assert saved.bytes == 4 * (3 * a * n * d + a * n * n)
    with saved_for_backward(exclude=[q, k, v]) as saved:
        y = attention(q, k, v)
    assert saved.bytes == 4 * a * n * n
    del y


def test_views_of_one_storage_count_once_and_keep_all_of_it():
    x = torch.randn(100, requires_grad=True)
    with saved_for_backward() as saved:
        y = x[:10].sin() + x[20:30].cos()
    assert saved.bytes == 400
    assert [t.bytes for t in saved.tensors] == [40, 40]
    assert [t.new_bytes for t in saved.tensors] == [400, 0]
    del y


def test_parameters_do_not_count_not_even_as_views():
    weight = nn.Parameter(torch.randn(10, 10))
    x = torch.randn(3, 10, requires_grad=True)
    with saved_for_backward() as saved:
        y = x @ weight.t() + nn.functional.linear(x, weight[:5].view(5, 10)).sum()
    assert saved.bytes == 120
    del y


def test_excluded_modules_and_tensors_do_not_count():
    norm = nn.BatchNorm1d(10)
    x = torch.randn(4, 10, requires_grad=True)
    scale = torch.randn(10)  # a plain tensor in the role of a weight
    with saved_for_backward(exclude=[norm, scale]) as saved:
        y = norm(x) * scale
    # x, batch norm's mean and inverse deviation; its running statistics are buffers
    assert saved.bytes == 4 * (40 + 10 + 10)
    del y


def test_custom_function_is_seen_through_save_for_backward_only():
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x + 1)
            ctx.attribute = torch.zeros(7)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    x = torch.randn(100, requires_grad=True)
    with saved_for_backward() as saved:
        y = Both.apply(x)
    assert saved.bytes == 400
    del y

    held = held_after(lambda: Both.apply(x))
    assert (held.saved, held.result, held.unseen) == (400, 400, 28)


def test_held_after_finds_nothing_unseen_in_ordinary_operators():
    model, x = Mlp(8, 20), torch.randn(6, 8)
    held = held_after(lambda: model(x))
    assert (held.saved, held.result, held.unseen) == (4 * 6 * 20, 4 * 6 * 8, 0)


def test_backward_lets_go_of_everything():
    x = torch.randn(100, requires_grad=True)
    with saved_for_backward() as saved:
        loss = x.exp().sin().sum()
    assert saved.live_bytes() == saved.bytes == 400  # exp's result, saved by exp and sin
    loss.backward()
    assert saved.live_bytes() == 0
    assert saved.bytes == 400


def test_dropping_the_graph_lets_go_of_everything():
    x = torch.randn(100, requires_grad=True)
    with saved_for_backward() as saved:
        y = x.exp()
    storage = weakref.ref(y.untyped_storage())
    gc.disable()
    try:
        del y  # without the collector: no reference cycle holds the graph
        assert storage() is None
        assert saved.live_bytes() == 0
    finally:
        gc.enable()


def test_storages_shrunk_by_hand_are_not_live():
    x = torch.randn(100, requires_grad=True)
    with saved_for_backward() as saved:
        hidden = x * 2
        y = hidden.sin()
    hidden.untyped_storage().resize_(0)
    assert saved.bytes == 400
    assert saved.live_bytes() == 0
    del y


def test_same_values_saved_anew_count_anew():
    x = torch.randn(100, requires_grad=True)
    with saved_for_backward() as saved:
        for _ in range(5):
            x.exp()  # dies at once; its address may be reused by the next
    assert saved.bytes == 5 * 400
    assert saved.live_bytes() == 0


def test_modifying_a_saved_tensor_in_place_is_still_refused():
    x = torch.randn(3, requires_grad=True)
    with saved_for_backward():
        hidden = x * 1
        y = hidden.sin().sum()
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_saves_its_input_only(use_reentrant):
    model = Mlp(8, 20)
    x = torch.randn(6, 8, requires_grad=True)
    with saved_for_backward() as saved:
        y = checkpoint(model, x, use_reentrant=use_reentrant)
    assert saved.bytes == 4 * 6 * 8
    assert saved.live_bytes() == saved.bytes
    y.sum().backward()
    assert saved.live_bytes() == 0


def test_recomputation_inside_the_scope_counts_too():
    n, h, f = 6, 8, 20
    model = Mlp(h, f)
    x = torch.randn(n, h, requires_grad=True)
    with saved_for_backward() as saved:
        checkpoint(model, x, use_reentrant=True).sum().backward()
    assert saved.bytes == 4 * (n * h + n * f)
    assert saved.live_bytes() == 0


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_gradients_are_bitwise_unchanged(use_reentrant):
    def gradients(scope):
        torch.manual_seed(0)
        model = Mlp(8, 20)
        x = torch.randn(6, 8, requires_grad=True)
        with scope:
            if use_reentrant is None:
                y = model(x)
            else:
                y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.pow(2).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    plain = gradients(torch.enable_grad())
    hooked = gradients(saved_for_backward())
    assert all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True))


def test_second_derivatives_are_unchanged():
    x = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
    with saved_for_backward():
        y = (x.exp() * x.sin()).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    expected = 2 * x.detach().exp() * x.detach().cos()
    torch.testing.assert_close(second, expected)


def test_origin_names_the_module_and_the_line():
    model = nn.Sequential(Mlp(8, 20), Mlp(8, 20))
    with saved_for_backward(exclude=[model]) as saved:
        y = model(torch.randn(6, 8))
    origins = {row["origin"] for row in saved.rows() if row["bytes"] == 4 * 6 * 20}
    # The activation belongs to the line that calls relu, in the module that runs there.
    assert {origin.split(" ")[0] for origin in origins} == {"0", "1"}
    assert all("test_saved_bytes.py" in origin for origin in origins)
    assert sum(row["bytes"] for row in saved.rows()) == saved.bytes
    del y


def test_module_hooks_are_gone_after_the_scope_even_after_an_error():
    from torch.nn.modules import module as modules

    with pytest.raises(ZeroDivisionError), saved_for_backward():
        raise ZeroDivisionError
    assert not modules._global_forward_pre_hooks
    assert not modules._global_forward_hooks
