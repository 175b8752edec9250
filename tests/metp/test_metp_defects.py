"""Ten defects of other implementations of the method; each test fails where its defect is made.

They are listed, with their numbers, in ``docs/metp.md``.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from metp_reference import EXACT, Attention, Chain, gelu, leaves, normal, squared_relu, worst_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_longseq.communication import BufferPool, Ring
from megatron_longseq.metp.embedding import ring_embedding
from megatron_longseq.metp.head_groups import HeadGroupAttention
from megatron_longseq.metp.matmul_chain import RingMatmulChain
from megatron_longseq.metp.vocab_loss import ring_cross_entropy


def chain_of(group=None, **options):
    return RingMatmulChain(group or dist.group.WORLD, timeout_seconds=20, **options)


def attention_of(group=None, **options):
    return HeadGroupAttention(*[group or dist.group.WORLD] * 3, timeout_seconds=20, **options)


def contributions():
    """dW of each shard of a linear chain, where rank r adds (10 ** r) * (1 + owner)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1, 1), 10.0**rank, dtype=torch.float64)
    w1, w2 = leaves(torch.ones(3, 1).double(), torch.full((1, 3), 1.0 + rank).double())
    chain_of()(x, w1, w2, f=lambda z: z).sum().backward()
    return w1.grad.flatten().tolist(), w2.grad.flatten().tolist(), size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_1_every_rank_adds_once_to_every_shard_and_the_sum_ends_at_its_owner(ranks, size):
    # The last hop of a flat buffer sent one element: another's gradient, without one rank's part.
    everyone = float("1" * size)
    for rank, (first, second, _) in enumerate(
        ranks.run(contributions, world_size=size, backend="gloo")
    ):
        assert first == [everyone * (1 + rank)] * 3
        assert second == [everyone] * 3


def parameters_before_and_after():
    """Whether every parameter has the same bits after forward and backward of each operator."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case, layer = Chain.random(gelu, rows=[3] * size), Attention(size, 2 * size, size, bias=True)
    shards = [case.shards(), layer.shards()]
    (table,) = leaves(normal(5 * size, 10, seed=rank).chunk(size)[rank])
    ring = Ring(dist.group.WORLD, BufferPool(), timeout_seconds=20)
    parameters = [t for s in shards for t in s if t is not None] + [table]
    before = [parameter.detach().clone() for parameter in parameters]
    x, w1, bias, w2 = shards[0]
    y, a = chain_of()(x, w1, w2, f=gelu, bias=bias), attention_of()
    out = a(*shards[1][:4], layer.options([]))
    labels = torch.arange(6 * size).view(2, -1) % (5 * size)
    positions = 3 * rank + torch.arange(3)
    order = torch.arange(3 * size)
    loss = ring_cross_entropy(x, table, labels[:, : 3 * size], order, ring=ring, tile_columns=2)
    rows = ring_embedding(labels[:, positions].t(), table, ring=ring)
    after_forward = [torch.equal(p, b) for p, b in zip(parameters, before, strict=True)]
    (y.sum() + out.sum() + loss.sum() + rows.sum()).backward()
    after_backward = [torch.equal(p, b) for p, b in zip(parameters, before, strict=True)]
    return after_forward, after_backward


@pytest.mark.parametrize("size", [3, 4])
def test_2_no_parameter_is_received_into(ranks, size):
    # The first receive buffer was the parameter: from three ranks on, one forward overwrote it.
    for forward, backward in ranks.run(
        parameters_before_and_after, world_size=size, backend="gloo"
    ):
        assert all(forward) and all(backward) and len(forward) == 4 + 4 + 1


def large_scores():
    """Errors where all scores of all heads are about 300, or about -300."""
    worst = {}
    for dtype in (torch.float32, torch.float64):
        for sign in (1, -1):
            layer = Attention(4, 8, 4, bias=True, dtype=dtype)
            of_heads = layer.qkv_bias.view(4, 4, 4)  # two queries, a key, a value; width 4
            of_heads[:, :2], of_heads[:, 2] = 12.0, sign * 12.0
            found = layer.run(attention_of())
            assert all(tensor.isfinite().all() for tensor in found)
            worst[dtype, sign] = worst_error(found, layer.expected())
    return worst


def test_3_scores_beyond_the_range_of_exp_are_merged(ranks):
    # exp(lse) without a maximum: inf / inf above 88 in fp32, 0 / 0 below.
    for worst in ranks.run(large_scores, world_size=4, backend="gloo"):
        for (dtype, sign), error in worst.items():
            assert error < (1e-3 if dtype == torch.float32 else 1e-10), (dtype, sign, error)


def beyond_half():
    """bf16 results whose values fp16 cannot hold, and their dtypes."""
    dtype = torch.bfloat16
    case = replace(
        Chain.random(squared_relu, rows=[3, 3], hidden=8, out=8),
        x=30 * normal(6, 2, 8),
        dy=30 * normal(6, 2, 8),
    ).rounded(dtype)
    layer = Attention(2, 4, 2, dtype=dtype)
    layer.projection = (layer.projection * 2e5).to(dtype).double()
    results = []
    for found, expected in (
        (case.run(chain_of(), dtype=dtype), case.expected()),
        (layer.run(attention_of()), layer.expected()),
    ):
        found, expected = ([t for t in tensors if t is not None] for tensors in (found, expected))
        largest = max(t.double().abs().max().item() for t in found)
        results.append(({t.dtype for t in found}, largest, worst_error(found, expected)))
    return results


def test_4_bf16_stays_bf16_with_its_range(ranks):
    # .half() on the way out: another dtype, and inf above 65504.
    for results in ranks.run(beyond_half, world_size=2, backend="gloo"):
        for dtypes, largest, error in results:
            assert dtypes == {torch.bfloat16}
            assert largest > 65504.0 and error < 5e-2


def with_and_without():
    """Errors of a layer with everything, and how much each of the things matters to it."""
    full = dict(heads=8, groups=2, per_step=2, bias=True, rope_share=1.0)
    layer = Attention(4, **full)
    expected, found = layer.expected(), layer.run(attention_of())
    without_bias = Attention(4, **full)
    without_bias.qkv_bias = torch.zeros_like(layer.qkv_bias)
    differences = [
        worst_error(other.expected()[:1], expected[:1])
        for other in (
            Attention(4, causal=False, **full),
            Attention(4, **full | {"rope_share": 0.0}),
            Attention(4, **full | {"interleaved": True}),
            without_bias,
        )
    ]
    return worst_error(found, expected), differences


def test_5_mask_position_embedding_grouped_queries_and_bias_are_there(ranks):
    for error, differences in ranks.run(with_and_without, world_size=4, backend="gloo"):
        assert error < EXACT
        assert min(differences) > 1e-2, "the reference without it must be another"


def gradients_of_two_layers():
    """Whether a layer's gradients are as before after another layer's backward, and own memory."""
    size = dist.get_world_size()
    pool = BufferPool()
    pieces = []
    attention, chain = attention_of(buffers=pool), chain_of(buffers=pool)
    for seed in (1, 2):
        pieces.append(Attention(size, 2 * size, size, bias=True, seed=seed).run(attention))
        pieces.append(Chain.random(gelu, rows=[3] * size, seed=seed).run(chain))
        if seed == 1:
            before = [[t.clone() for t in piece] for piece in pieces]
    same = [
        torch.equal(a, b)
        for piece, kept in zip(pieces[:2], before, strict=True)
        for a, b in zip(piece, kept, strict=True)
    ]
    free = {m.untyped_storage().data_ptr() for each in pool._free.values() for m in each}
    held = {t.untyped_storage().data_ptr() for piece in pieces for t in piece}
    return same, len(free & held), pool.held_bytes > 0


@pytest.mark.parametrize("size", [2, 3])
def test_6_gradients_are_no_views_of_buffers_that_the_next_layer_writes(ranks, size):
    for same, shared, used in ranks.run(gradients_of_two_layers, world_size=size, backend="gloo"):
        assert all(same) and len(same) == 10
        assert used and shared == 0


def in_two_groups():
    """Each half of four ranks works on data of its own, in a group that skips ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half, place = rank % 2, rank // 2
    case = Chain.random(gelu, rows=[3, 4], seed=10 * half, place=place)
    layer = Attention(2, 4, 2, bias=True, seed=10 * half, place=place)
    return (
        worst_error(case.run(chain_of(groups[half])), case.expected()),
        worst_error(layer.run(attention_of(groups[half])), layer.expected()),
    )


def test_7_any_group_of_ranks_will_do(ranks):
    for errors in ranks.run(in_two_groups, world_size=4, backend="gloo"):
        assert max(errors) < EXACT


def options_of_each_call():
    """Two calls in flight that differ in every option; each backward must use its own."""
    chain, attention = chain_of(), attention_of()
    cases = [
        Chain.random(gelu, rows=[3, 4]),
        Chain.random(squared_relu, rows=[3, 4], bias=False),
    ]
    layers = [
        Attention(2, 4, 4, scale=0.2),
        Attention(2, 4, 4, scale=0.9, causal=False, per_step=2, bias=True, kernel="reference"),
    ]
    pending = []
    for tiles, case in enumerate(cases, 1):
        x, w1, bias, w2 = kept = case.shards()
        y = chain(x, w1, w2, f=case.f, bias=bias, tiles=tiles)
        pending.append((y, kept, case.mine(case.dy), case.expected()))
    for layer in layers:
        kept = layer.shards()
        y = attention(*kept[:4], layer.options([]))
        pending.append((y, kept, layer.dy[layer.positions], layer.expected()))
    for y, _, dy, _ in pending:
        y.backward(dy)
    return max(
        worst_error([y, *(None if t is None else t.grad for t in kept)], expected)
        for y, kept, _, expected in pending
    )


def test_8_backward_uses_the_options_of_its_own_forward(ranks):
    # A probability of dropout was written into the backward; it has to come from the call.
    assert max(ranks.run(options_of_each_call, world_size=2, backend="gloo")) < EXACT


def many_small_parts():
    """Sums over eight ranks of 256 once and 1 seven times, in bf16: y, dx, and the dW of rank 0."""
    rank = dist.get_rank()
    large = 256.0 if rank == 0 else 1.0

    def run(x, w2):
        x = torch.tensor([[x]], dtype=torch.bfloat16, requires_grad=True)
        w1, w2 = leaves(
            torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[w2]], dtype=torch.bfloat16)
        )
        y = chain_of()(x, w1, w2, f=lambda z: z)
        y.sum().backward()
        return y.item(), x.grad.item(), w2.grad.item()

    y, dx, _ = run(1.0, large)
    _, _, dw2 = run(large, 1.0)
    return y, dx, dw2


def test_9_sums_are_kept_in_fp32(ranks):
    # In the dtype of the wire, 256 + 1 is 256 in bf16, seven times over.
    right = torch.tensor(256.0 + 7.0).bfloat16().item()
    assert right != 256.0
    for sums in ranks.run(many_small_parts, world_size=8, backend="gloo"):
        assert sums == (right,) * 3


class Readers(TorchDispatchMode):
    """The operators that read one of some tensors, views of it apart."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {t.untyped_storage().data_ptr() for t in tensors}
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not func.is_view and any(
            t.untyped_storage().data_ptr() in self.storages for t in inputs
        ):
            self.names.append(func.overloadpacket.__name__)
        return result


def readers_of_the_output():
    """What reads the saved attention output in a backward, besides the kernel."""
    layer, operator = Attention(2, 4, 2), attention_of()
    kept = layer.shards()
    y = operator(*kept[:4], layer.options([]))
    *_, out, other, _, _ = y.grad_fn.saved_tensors
    assert out.shape == other.shape == (layer.tokens_per_rank, 2, 2, 4)
    with Readers([out, other]) as readers:
        y.backward(layer.dy[layer.positions])
    return readers.names


def test_10_the_output_is_read_by_the_kernel_and_by_one_product_alone(ranks):
    # rowsum(dO * O) was computed and never used.
    for names in ranks.run(readers_of_the_output, world_size=2, backend="gloo"):
        assert set(names) == {"_scaled_dot_product_flash_attention_for_cpu_backward", "mm"}, names
        blocks, groups = 2, 2
        assert len(names) == groups * (blocks + 1)
