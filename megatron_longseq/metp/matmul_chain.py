"""O = f(A B) C with the shards of B and C circulating: the MLP of METP is an instance.

Every rank keeps its rows of A and O; the pair (B_j, C_j) of rank j passes every rank, so that

    O_r = sum over j of f(A_r B_j) C_j

needs neither all rows nor all columns anywhere. f acts on the columns of one shard at a time: on
each alone (GELU) or on those a shard pairs (SwiGLU, if a shard holds gates with their values).
``f(A_r B_j)`` is dropped after its step; saved for backward is A_r, and B_r and C_r by reference.

Backward, the pairs go round again and A B is recomputed, one matrix product more. The sum of a
pair's gradient follows it one hop behind and ends at its owner. Hops per rank: ``p - 1`` forward,
``p - 1`` backward, and ``p`` of gradients.

Source: the scheme of P. Liang et al., "Memory-efficient tensor parallelism for long-sequence
Transformer training", FITEE 26(5), 2025, doi 10.1631/FITEE.2400602; the way home of the gradients
is derived in ``docs/metp.md``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ..communication.agreement import GridAgreement
from ..communication.buffers import BufferPool
from ..communication.groups import GroupPlace
from ..communication.ring import Ring, accumulation_dtype
from ..communication.transport import DEFAULT_TIMEOUT_SECONDS, Staging
from ..errors import UserError
from .products import Activation, add_product, returned_gradient, row_tiles, without_autocast


class RingMatmulChain:
    """:func:`ring_matmul_chain` over a fixed group, with its buffers, for repeated calls.

    Weights are taken as PyTorch's and Megatron's linear layers store them, ``[out, in]``. One
    object serves all layers of a model; calls may be in flight at the same time.

    Args:
        group: the ranks among which the shards circulate; ``None`` for one rank.
        gradient_group: a second group of these ranks for the gradients; over NCCL they then
            overlap with the weights.
        buffers: a pool to share with other operators; an own one if not given.
        timeout_seconds, staging: see :class:`..communication.transport.Channel`.
        gradient_dtype: in which gradients add up and travel; fp32 (fp64 for fp64) if not given.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        gradient_group: dist.ProcessGroup | None = None,
        buffers: BufferPool | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        gradient_dtype: torch.dtype | None = None,
        staging: Staging = "auto",
    ) -> None:
        self.buffers = buffers or BufferPool()
        self.ring = Ring(
            group,
            self.buffers,
            lane_groups={"gradients": gradient_group} if gradient_group is not None else None,
            timeout_seconds=timeout_seconds,
            gradient_dtype=gradient_dtype,
            staging=staging,
        )

    def __deepcopy__(self, _memo: dict[int, Any]) -> "RingMatmulChain":
        # Copies of a model share groups and buffers, which cannot be copied.
        return self

    def __call__(
        self,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        *,
        f: Activation,
        bias: Tensor | None = None,
        tiles: int = 1,
        fused_gradients: bool = False,
    ) -> Tensor:
        """``sum_j f(x @ w1_j.T + bias_j) @ w2_j.T`` for this rank's rows.

        Args:
            x: ``[.., h]``, this rank's rows.
            w1: ``[width, h]``, this rank's shard of the first weight.
            w2: ``[out, width']``, that of the second; f maps ``[n, width]`` to ``[n, width']``.
            bias: ``[width]``, travels with w1.
            tiles: the rows are worked off in as many parts, one after the other within each step:
                a smaller peak, the same messages.
            fused_gradients: add the weight gradients to ``main_grad``; see
                :func:`.products.returned_gradient`.

        Returns:
            ``[.., out]`` in the dtype of ``x``.
        """
        return _MatmulChain.apply(x, w1, bias, w2, self.ring, f, tiles, fused_gradients)


def ring_matmul_chain(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    group: dist.ProcessGroup | None,
    f: Activation,
    bias: Tensor | None = None,
    tiles: int = 1,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    buffers: BufferPool | None = None,
) -> Tensor:
    """O = f(A B) C for weights that are split over a group, without gathering anything.

    A collective call: all ranks of the group make it, forward and backward. For repeated calls keep
    a :class:`RingMatmulChain`, or at least a pool of buffers.

    Args:
        a: ``[.., h]``, this rank's rows of A; ranks may have different numbers of rows.
        b: ``[h, width]``, this rank's columns of B; the same shape on every rank.
        c: ``[width', out]``, this rank's rows of C; the same shape on every rank.
        group: the ranks that share B and C; ``None`` for one rank.
        f: acts on the columns of one shard, ``[n, width]`` to ``[n, width']``; differentiable, and
            the same on every rank. It may pair columns, as SwiGLU does; it must not mix rows. It is
            applied again in backward: so it has no parameters, draws no random numbers, and leaves
            its input as it is.
        bias: ``[width]``, this rank's part of what is added to A B.
        tiles: see :class:`RingMatmulChain`.
        timeout_seconds: limit of every wait.
        buffers: receive buffers to keep from call to call.

    Returns:
        ``[.., out]``, this rank's rows of O, in the dtype of ``a``. The gradients of b and c are
        complete sums over the rows of all ranks; they cannot be differentiated again.

    Raises:
        UserError: shapes or dtypes do not fit, here or between the ranks; on every rank alike.
        CommunicationError: a transfer failed or took too long.

    Source:
        P. Liang et al., FITEE 26(5), 2025, doi 10.1631/FITEE.2400602 (METP).
    """
    # Whatever one rank finds, all must learn: the others would wait for it.
    problem = _misfit(a, b, c, bias, f, tiles)
    wanted = [
        torch.is_grad_enabled() and t is not None and t.requires_grad for t in (a, b, c, bias)
    ]
    GridAgreement(GroupPlace.of(None), GroupPlace.of(group), timeout_seconds).verify(
        {
            "b": (tuple(b.shape), b.dtype),
            "c": (tuple(c.shape), c.dtype),
            "bias": None if bias is None else (tuple(bias.shape), bias.dtype),
            "b, c and bias need gradients": wanted[1:],
            # All ranks take part in backward, or none.
            "some of a, b, c and bias needs a gradient": any(wanted),
            "problem": problem or "none",
        }
    )
    if problem is not None:
        raise UserError(problem)
    chain = RingMatmulChain(group, buffers=buffers, timeout_seconds=timeout_seconds)
    return chain(a, b.t(), c.t(), f=f, bias=bias, tiles=tiles)


def _misfit(
    a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, f: Activation, tiles: int
) -> str | None:
    """What is wrong with the inputs of :func:`ring_matmul_chain` on this rank."""
    if tiles < 1:
        return f"tiles {tiles}: must be at least 1"
    tensors = [t for t in (a, b, c, bias) if t is not None]
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        shown = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        return f"a, b, c and bias must have one dtype and device; they have {shown}"
    if not a.is_floating_point():
        return f"a, b and c must be floating point, not {a.dtype}"
    if a.dim() < 1 or b.dim() != 2 or c.dim() != 2:
        return f"b and c must be matrices; their shapes are {tuple(b.shape)} and {tuple(c.shape)}"
    if a.shape[-1] != b.shape[0]:
        return f"a has {a.shape[-1]} columns and b {b.shape[0]} rows; they must be equal"
    if bias is not None and bias.shape != b.shape[1:]:
        return f"bias has shape {tuple(bias.shape)}; b has {b.shape[1]} columns"
    return _misfit_of_function(f, b, c)


def _misfit_of_function(f: Activation, b: Tensor, c: Tensor) -> str | None:
    """Tries f on a row of numbers: whether it can be applied again in backward, for b and c."""
    trial = torch.linspace(-2, 2, b.shape[1], dtype=b.dtype, device=b.device)[None]
    tried = trial.clone().requires_grad_()
    try:
        with torch.enable_grad(), torch.autocast(b.device.type, enabled=False):
            constant, first, second = f(trial.clone()), f(tried), f(tried)
    except Exception as error:
        return f"f cannot be applied to [1, {b.shape[1]}]: {type(error).__name__}: {error}"
    if not isinstance(first, Tensor):
        return f"f must return a tensor, not {type(first).__name__}"
    if first.shape != (1, c.shape[0]):
        return (
            f"f maps [1, {b.shape[1]}] to {list(first.shape)}; it must be [1, {c.shape[0]}], "
            f"since c has {c.shape[0]} rows"
        )
    if constant.requires_grad:
        return "f has parameters that need gradients, which would get none; use one without"
    if not torch.equal(first, second):
        return "f gives two results for one input, and backward applies it again; it must not"
    return None


class _MatmulChain(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        bias: Tensor | None,
        w2: Tensor,
        ring: Ring,
        f: Activation,
        tiles: int,
        fused: bool,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        total = x.new_empty(len(rows), w2.shape[0], dtype=accumulation_dtype(x.dtype))
        parts = row_tiles(len(rows), tiles)
        for step, (_, block) in enumerate(ring.circulate(*_block(w1, bias, w2))):
            first, added, second = _unblock(block, bias)
            for part in parts:
                inner = f(linear(rows[part], first, added))
                add_product(total[part], inner, second.t(), first=step == 0)
                del inner
        # The input as it came: Megatron's norm recompute frees and refills its very storage.
        ctx.save_for_backward(x, w1, bias, w2)
        ctx.ring, ctx.f, ctx.parts, ctx.fused = ring, f, parts, fused
        return total.to(x.dtype).view(*x.shape[:-1], w2.shape[0])

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, bias, w2 = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dy = out_gradient.reshape(-1, w2.shape[0])
        dx = rows.new_empty(rows.shape, dtype=accumulation_dtype(x.dtype))
        given = _block(w1, bias, w2)
        if not any(ctx.needs_input_grad[1:4]):
            for step, (_, block) in enumerate(ctx.ring.circulate(*given)):
                for part in ctx.parts:
                    _backward_part(ctx.f, rows[part], dy[part], dx[part], block, bias, step == 0)
            return dx.to(x.dtype).view_as(x), *[None] * 7
        with ctx.ring.circulate_with_gradients(*given) as rotation:
            for step, (_, block, gradient) in enumerate(rotation):
                for part in ctx.parts:
                    dz, inner = _backward_part(
                        ctx.f, rows[part], dy[part], dx[part], block, bias, step == 0
                    )
                    sums = [dz.t() @ rows[part], dy[part].t() @ inner]
                    if bias is not None:
                        sums.insert(1, dz.sum(0, dtype=dx.dtype))
                    gradient.add(*sums)
                    del dz, inner, sums
            home = rotation.gradients(accumulated=True)
        grads = iter(home)
        d1, db, d2 = (None if t is None else next(grads) for t in (w1, bias, w2))
        needed = ctx.needs_input_grad
        assert d1 is not None and d2 is not None
        return (
            dx.to(x.dtype).view_as(x),
            returned_gradient(w1, d1, fused=ctx.fused) if needed[1] else None,
            db.to(bias.dtype) if db is not None and needed[2] else None,
            returned_gradient(w2, d2, fused=ctx.fused) if needed[3] else None,
            *[None] * 4,
        )


def _block(w1: Tensor, bias: Tensor | None, w2: Tensor) -> tuple[Tensor, ...]:
    return (w1, w2) if bias is None else (w1, bias, w2)


def _unblock(block: Sequence[Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    return (block[0], None, block[1]) if bias is None else (block[0], block[1], block[2])


def _backward_part(
    f: Activation,
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    block: Sequence[Tensor],
    bias: Tensor | None,
    first_step: bool,
) -> tuple[Tensor, Tensor]:
    """Recomputes a shard's inner values for some rows; adds to dx and returns (dz, f(z))."""
    first, added, second = _unblock(block, bias)
    z = linear(x, first, added).requires_grad_()
    with torch.enable_grad():
        inner = f(z)
    (dz,) = torch.autograd.grad(inner, z, dy @ second)
    add_product(dx, dz, first, first=first_step)
    return dz, inner.detach()
