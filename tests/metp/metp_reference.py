"""What the tests of METP's operators share: one-process references with autograd, and data."""

import time
from dataclasses import dataclass, replace

import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
import torch.nn.functional as F
from grids import dense_attention, relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_longseq.communication.transport import Channel
from megatron_longseq.metp.head_groups import HeadGroups
from megatron_longseq.softmax import choose_kernel
from megatron_longseq.token_layout import zigzag_tokens

EXACT = 1e-12  # fp64; 1e-10 is asked for


def normal(*shape, seed=0, scale=1.0, dtype=torch.float64):
    """Random data that is the same on every rank; each takes its own part of it."""
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def leaves(*tensors):
    """Parameters with these values; ``None`` stays ``None``."""
    return [None if t is None else torch.nn.Parameter(t.clone().contiguous()) for t in tensors]


def worst_error(actual, expected):
    """Largest relative error over pairs of tensors of which neither, or both, are ``None``."""
    pairs = list(zip(actual, expected, strict=True))
    assert all((a is None) == (e is None) for a, e in pairs)
    return max(relative_error(a.detach(), e) for a, e in pairs if a is not None and a.numel())


# f of a shard, [n, width] -> [n, width'], and the same for gate and value apart.


def gelu(z):
    return F.gelu(z)


def squared_relu(z):
    return F.relu(z).square()


def swiglu(z):
    """With Megatron's clamp value and linear offset."""
    gate, value = z.chunk(2, -1)
    return F.silu(gate.clamp(max=0.8)) * (value.clamp(-0.9, 0.9) + 1.0)


def geglu(z):
    gate, value = z.chunk(2, -1)
    return F.gelu(gate) * value


GATED = (swiglu, geglu)


@dataclass
class Chain:
    """A matmul chain over the whole sequence, in fp64, and this rank's part of it."""

    f: object
    x: torch.Tensor
    w1: torch.Tensor
    bias: torch.Tensor | None
    w2: torch.Tensor
    dy: torch.Tensor
    rows: list[int]  # of each rank
    place: int  # of this rank in its group

    @classmethod
    def random(
        cls, f, *, rows, hidden=10, ffn_per_rank=6, out=10, bias=True, seed=0, batch=2, place=None
    ):
        ffn = ffn_per_rank * len(rows)
        width = 2 * ffn if f in GATED else ffn
        return cls(
            f,
            normal(sum(rows), batch, hidden, seed=seed),
            normal(width, hidden, seed=seed + 1, scale=hidden**-0.5),
            normal(width, seed=seed + 2) if bias else None,
            normal(out, ffn, seed=seed + 3, scale=ffn**-0.5),
            normal(sum(rows), batch, out, seed=seed + 4),
            list(rows),
            (dist.get_rank() if len(rows) > 1 else 0) if place is None else place,
        )

    def rounded(self, dtype):
        """The same with values that ``dtype`` holds."""
        kept = {n: getattr(self, n).to(dtype).double() for n in ("x", "w1", "w2", "dy")}
        bias = None if self.bias is None else self.bias.to(dtype).double()
        return replace(self, bias=bias, **kept)

    def mine(self, tensor):
        return tensor.split(self.rows)[self.place]

    def columns(self, tensor):
        """This rank's rows of w1 or bias: for gated f its gates, then its values."""
        parts = tensor.chunk(2) if self.f in GATED else (tensor,)
        return torch.cat([part.chunk(len(self.rows))[self.place] for part in parts])

    def shards(self, dtype=torch.float64):
        """This rank's x, w1, bias, w2 as leaves."""
        return leaves(
            self.mine(self.x).to(dtype),
            self.columns(self.w1).to(dtype),
            None if self.bias is None else self.columns(self.bias).to(dtype),
            self.w2.chunk(len(self.rows), 1)[self.place].to(dtype),
        )

    def expected(self):
        """This rank's part of y, dx, dw1, dbias, dw2, from one process with autograd."""
        x, w1, bias, w2 = leaves(self.x, self.w1, self.bias, self.w2)
        y = self.f(F.linear(x, w1, bias)) @ w2.t()
        y.backward(self.dy)
        return [
            self.mine(y.detach()),
            self.mine(x.grad),
            self.columns(w1.grad),
            None if bias is None else self.columns(bias.grad),
            w2.grad.chunk(len(self.rows), 1)[self.place],
        ]

    def run(self, chain, dtype=torch.float64, **options):
        """This rank's y, dx, dw1, dbias, dw2 from a RingMatmulChain."""
        x, w1, bias, w2 = self.shards(dtype)
        y = chain(x, w1, w2, f=self.f, bias=bias, **options)
        y.backward(self.mine(self.dy).to(dtype))
        return [y.detach(), x.grad, w1.grad, None if bias is None else bias.grad, w2.grad]


def rope(t, positions, share, interleaved):
    """Rotates the first ``share`` of the head width of ``[rows, b, heads, d]`` by position."""
    width = int(t.shape[-1] * share) // 2 * 2
    angle = positions.double()[:, None] * 3.0 ** -torch.arange(width // 2)
    cos, sin = (f(angle).to(t.dtype)[:, None, None] for f in (torch.cos, torch.sin))
    turned, rest = t[..., :width], t[..., width:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned, rest), -1)


def rms_norm(t, weight):
    return t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@dataclass
class Attention:
    """A self-attention layer over the whole sequence, in fp64, and this rank's part of it.

    ``qkv`` is interleaved by key/value head, as Megatron stores it: its queries, then its key, then
    its value.
    """

    ranks: int
    heads: int
    groups: int
    width: int = 4
    per_step: int = 1
    bias: bool = False
    norm: bool = False
    rope_share: float = 0.0
    interleaved: bool = False
    causal: bool = True
    scale: float | None = None
    score_range: float | None = None  # scale so that the largest score is this
    tokens_per_rank: int = 4
    batch: int = 2
    hidden: int = 12
    seed: int = 0
    dtype: torch.dtype = torch.float64
    kernel: object = "auto"
    place: int | None = None  # of this rank in its group

    def __post_init__(self):
        a, g, d, h = self.heads, self.groups, self.width, self.hidden
        total = self.tokens_per_rank * self.ranks
        s = self.seed
        self.x = self._values(total, self.batch, h, seed=s)
        self.qkv = self._values((a + 2 * g) * d, h, seed=s + 1, scale=h**-0.5)
        self.qkv_bias = self._values((a + 2 * g) * d, seed=s + 2) if self.bias else None
        self.projection = self._values(h, a * d, seed=s + 3, scale=(a * d) ** -0.5)
        self.norms = [1 + self._values(d, seed=s + 4 + i) / 4 for i in range(2 * self.norm)]
        self.dy = self._values(total, self.batch, h, seed=s + 6)
        self.used_scale = self.scale or d**-0.5
        if self.score_range is not None:
            q, k, _ = self.to_heads(F.linear(self.x, self.qkv, self.qkv_bias), range(total), [])
            scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(a // g, 2))
            self.used_scale = self.score_range / scores.abs().max().item()

    def _values(self, *shape, **options):
        return normal(*shape, **options).to(self.dtype).double()

    def to_heads(self, mixed, positions, norms):
        """[rows, b, some heads] -> query, key, value."""
        per_group = self.heads // self.groups
        rows, batch, _ = mixed.shape
        parts = mixed.reshape(rows, batch, -1, per_group + 2, self.width)
        query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        if norms:
            query, key = rms_norm(query, norms[0]), rms_norm(key, norms[1])
        if self.rope_share:
            positions = torch.as_tensor(positions)
            query, key = (
                rope(t, positions, self.rope_share, self.interleaved) for t in (query, key)
            )
        return query, key, value

    @property
    def rank(self):
        if self.place is not None:
            return self.place
        return dist.get_rank() if self.ranks > 1 else 0

    @property
    def positions(self):
        return zigzag_tokens(self.rank, self.ranks, self.tokens_per_rank * self.ranks)

    def expected(self):
        """This rank's y, dx, dqkv, dbias, dprojection, and the whole gradients of the norms."""
        x, qkv, bias, projection = leaves(self.x, self.qkv, self.qkv_bias, self.projection)
        norms = leaves(*self.norms)
        q, k, v = self.to_heads(F.linear(x, qkv, bias), range(len(x)), norms)
        out, _ = dense_attention(q, k, v, self.causal, self.used_scale)
        y = out.flatten(2) @ projection.t()
        y.backward(self.dy)
        return [
            y.detach()[self.positions],
            x.grad[self.positions],
            qkv.grad.chunk(self.ranks)[self.rank],
            None if bias is None else bias.grad.chunk(self.ranks)[self.rank],
            projection.grad.chunk(self.ranks, 1)[self.rank],
            *(norm.grad for norm in norms),
        ]

    def shards(self):
        """This rank's x, qkv, bias, projection and norms as leaves."""
        bias = None if self.qkv_bias is None else self.qkv_bias.chunk(self.ranks)[self.rank]
        return leaves(
            *(
                None if t is None else t.to(self.dtype)
                for t in (
                    self.x[self.positions],
                    self.qkv.chunk(self.ranks)[self.rank],
                    bias,
                    self.projection.chunk(self.ranks, 1)[self.rank],
                    *self.norms,
                )
            )
        )

    def options(self, norms, **changes):
        positions = self.positions
        kernel = self.kernel
        if isinstance(kernel, str):
            kernel = choose_kernel(kernel, self.dtype, torch.device("cpu"))
        return HeadGroups(
            **{
                "to_heads": lambda mixed: self.to_heads(mixed, positions, norms),
                "kernel": kernel,
                "causal": self.causal,
                "scale": self.used_scale,
                "per_step": self.per_step,
                "parameters": tuple(norms),
                **changes,
            }
        )

    def run(self, operator, **changes):
        """This rank's y, dx, dqkv, dbias, dprojection, dnorms (summed over ranks)."""
        x, qkv, bias, projection, *norms = self.shards()
        y = operator(x, qkv, bias, projection, self.options(norms, **changes))
        y.backward(self.dy[self.positions].to(self.dtype))
        for norm in norms:
            if self.ranks > 1:
                dist.all_reduce(norm.grad)
        return [
            y.detach(),
            x.grad,
            qkv.grad,
            None if bias is None else bias.grad,
            projection.grad,
            *(norm.grad for norm in norms),
        ]


def stock_cross_entropy(logits, labels):
    """Megatron's vocab_parallel_cross_entropy, by its definition, of ``[s, b, V]`` and ``[s, b]``.

    It subtracts the largest logit first and sets the label's to 0 afterwards if the label is
    outside the vocabulary: such a token's loss is lse - max, and its gradient the softmax alone.
    """
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    outside = (labels < 0) | (labels >= logits.shape[-1])
    picked = shifted.gather(-1, labels.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1)
    return shifted.logsumexp(-1) - picked.masked_fill(outside, 0.0)


class LargestCreated(TorchDispatchMode):
    """The bytes of the largest storage that any operator has returned, and its origin."""

    def __init__(self):
        super().__init__()
        self.bytes, self.origin = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > self.bytes:
                self.bytes = leaf.untyped_storage().nbytes()
                self.origin = f"{func} {tuple(leaf.shape)} {leaf.dtype}"
        return result


def log_exchanges(log):
    """From now on every exchange of this process is noted as ``(stream, step)``."""
    plain = Channel.exchange

    def logged(channel, *, receives, sends, step):
        log.append((channel.stream.name, step))
        return plain(channel, receives=receives, sends=sends, step=step)

    Channel.exchange = logged


def hold_up_messages(sleepy):
    """From now on every message of this process waits a random while, if sleepy[0] is set."""
    plain_exchange, plain_broadcast, plain_reduce = Channel.exchange, dist.broadcast, dist.reduce

    def held_up(call):
        def late(*args, **kwargs):
            if sleepy[0] is not None:
                time.sleep(sleepy[0].random() * 0.01)
            return call(*args, **kwargs)

        return late

    Channel.exchange = held_up(plain_exchange)
    dist.broadcast, dist.reduce = held_up(plain_broadcast), held_up(plain_reduce)
