"""The affine pairs obey their algebra, for every kind of transition."""

import pytest
import torch

from megatron_longseq.lasp.recurrence import Affine, wire_bytes

KINDS = {"scalar": (), "diagonal": (4,), "matrix": (4, 4)}
EXACT = dict(rtol=1e-13, atol=1e-13)


def pair(kind, seed=0, batch=None, dtype=torch.float64):
    """A random pair with B = 2, H = 3, d = 4, e = 5; ``batch``: of the transition."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch or 2, 3, *KINDS[kind])
    transition = torch.randn(shape, generator=generator, dtype=dtype) / 2
    return Affine(transition, torch.randn(2, 3, 4, 5, generator=generator, dtype=dtype))


def state(seed=9):
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)).double()


def dense(affine):
    """A as a matrix [B, H, d, d], whatever its kind."""
    if affine.kind == "scalar":
        return torch.diag_embed(affine.transition[..., None].expand(-1, -1, 4))
    return torch.diag_embed(affine.transition) if affine.kind == "diagonal" else affine.transition


every_kind = pytest.mark.parametrize("kind", KINDS)
every_batch = pytest.mark.parametrize("batch", [1, 2])


@every_kind
@every_batch
def test_a_pair_is_the_affine_map_of_its_matrix(kind, batch):
    affine = pair(kind, batch=batch)
    assert affine.kind == kind
    torch.testing.assert_close(
        affine.apply(state()), dense(affine) @ state() + affine.state, **EXACT
    )


@every_kind
@every_batch
def test_a_composition_applies_the_earlier_map_first(kind, batch):
    early, middle, late = (pair(kind, seed, batch) for seed in range(3))
    composed = Affine.compose(late, early)
    torch.testing.assert_close(composed.apply(state()), late.apply(early.apply(state())), **EXACT)
    assert composed.transition.shape == early.transition.shape
    left = late.compose(middle).compose(early)
    right = late.compose(middle.compose(early))
    torch.testing.assert_close(left.transition, right.transition, **EXACT)
    torch.testing.assert_close(left.state, right.state, **EXACT)
    swapped = early.compose(late)
    assert not torch.allclose(swapped.state, composed.state)


@every_kind
def test_the_identity_changes_nothing_from_either_side(kind):
    affine = pair(kind)
    one = affine.identity_like()
    assert torch.equal(one.apply(state()), state())
    for same in (affine.compose(one), one.compose(affine)):
        assert torch.equal(same.transition, affine.transition)
        assert torch.equal(same.state, affine.state)


@every_kind
def test_the_transposed_pair_is_the_adjoint_map(kind):
    affine, own = pair(kind), state(3)
    backward = affine.transposed(own)
    incoming = state().requires_grad_()
    affine.apply(incoming).backward(state(5))
    torch.testing.assert_close(backward.apply(state(5)), incoming.grad + own, **EXACT)


@every_kind
def test_a_cut_lets_nothing_through_not_even_infinity_in_log_space(kind):
    affine = pair(kind)
    assert torch.equal(affine.cut().apply(state()), affine.state)
    after = pair(kind, 1).cut().compose(affine)
    assert not after.transition.any() and torch.equal(after.state, pair(kind, 1).state)


@every_kind
def test_a_product_of_decays_that_underflows_is_exactly_zero(kind):
    decay = pair(kind, dtype=torch.float32)
    decay = Affine(decay.transition * 1e-30, decay.state)
    twice = decay.compose(decay)
    assert not twice.transition.any()
    assert torch.isfinite(twice.state).all()


@every_kind
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_blocks_act_apart_and_join_to_the_whole(kind, count):
    affine = pair(kind)
    parts = affine.blocks(count)
    assert len(parts) == count and parts[0].kind == kind
    out = [p.apply(s) for p, s in zip(parts, affine.split(state(), count), strict=True)]
    torch.testing.assert_close(affine.join(out), affine.apply(state()), **EXACT)


@every_kind
def test_more_blocks_than_rows_or_columns_are_refused(kind):
    limit = pair(kind).block_limit
    assert limit == (5 if kind == "matrix" else 4)
    for count in (0, limit + 1):
        with pytest.raises(ValueError, match=f"{count} blocks: a state here has 1 to {limit}"):
            pair(kind).blocks(count)


@every_kind
@every_batch
def test_the_wire_form_holds_the_whole_pair(kind, batch):
    affine = pair(kind, batch=batch)
    flat = affine.to_wire()
    assert flat.shape == (affine.wire_elements,)
    back = pair(kind, 1, batch).from_wire(flat)
    assert torch.equal(back.transition, affine.transition)
    assert torch.equal(back.state, affine.state)
    if batch == 2:
        assert sum(wire_bytes(2, 3, 4, 5, kind)) == 4 * affine.wire_elements


def test_shapes_dtypes_and_kinds_that_do_not_fit_are_refused():
    fitting = torch.zeros(2, 3, 4, 5)
    for shape in ((2,), (3, 3), (2, 1), (2, 3, 5), (2, 3, 4, 5)):
        with pytest.raises(ValueError, match="does not act on a state"):
            Affine(torch.zeros(shape), fitting)
    with pytest.raises(ValueError, match="does not act on a state"):
        Affine(torch.zeros(2, 3), torch.zeros(3, 4, 5))
    with pytest.raises(ValueError, match="both must be float32"):
        Affine(torch.zeros(2, 3).bfloat16(), fitting.bfloat16())
    with pytest.raises(ValueError, match="both must be float32"):
        Affine(torch.zeros(2, 3).double(), fitting)
    with pytest.raises(ValueError, match="scalar transition composed with a matrix one"):
        pair("scalar").compose(pair("matrix"))
