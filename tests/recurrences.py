"""What the tests of linear attention share: cases, and the recurrence read token by token."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_longseq.lasp import LinearAttentionOperator
from megatron_longseq.lasp.torch_kernels import TorchKernel
from megatron_longseq.token_layout import SegmentChain

KINDS = ("none", "constant", "scalar", "channel", "delta", "gated delta", "kda")
# One token, empty, over three ranks of four, a start exactly on a boundary of segments, and again.
PACKED = (0, 1, 1, 13, 24, 60, 61, 96)
EXACT = 1e-10


@dataclass(frozen=True)
class Case:
    """A sequence and how it is attended to; random numbers come from ``seed``."""

    kind: str
    documents: tuple[int, ...] | None = None
    heads: tuple[int, int, int] = (2, 2, 2)
    tokens: int = 96
    batch: int = 2
    width: int = 8
    value_width: int = 6
    scale: float = 0.7
    normalize: bool = False
    causal: bool = True
    states: bool = True  # initial and final
    decay: float | None = None  # constant for all tokens, in place of random ones
    seed: int = 0

    def inputs(self):
        """Whole-sequence fp64 leaves by the names of the operator's arguments, and gradients."""
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        batch = 1 if self.documents else self.batch
        shape = batch, self.tokens
        hq, hk, hv = self.heads
        h = max(hk, hv)
        q, k = random(*shape, hq, self.width), random(*shape, hk, self.width)
        if self.normalize:
            q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
        else:
            k = torch.nn.functional.normalize(k, dim=-1)
        gates = {
            "constant": (h,),
            "scalar": (*shape, h),
            "gated delta": (*shape, h),
            "channel": (*shape, h, self.width),
            "kda": (*shape, h, self.width),
        }
        data = {"q": q, "k": k, "v": random(*shape, hv, self.value_width)}
        if self.kind in gates:
            data["log_decay"] = -torch.rand(gates[self.kind], generator=generator).double()
            if self.decay is not None:
                data["log_decay"] = torch.full(gates[self.kind], self.decay).double().log()
        if self.kind in ("delta", "gated delta", "kda"):
            data["beta"] = torch.rand(*shape, h, generator=generator).double()
        columns = self.value_width + int(self.normalize)
        state = random(batch, h, self.width, columns)
        if self.states:
            data["initial_state"] = state.abs() if self.normalize else state
        out_gradient = random(*shape, max(hq, hv), self.value_width)
        return data, out_gradient, random(batch, h, self.width, columns)

    def options(self):
        """The operator's arguments that are not tensors."""
        options = {"scale": self.scale, "normalize": self.normalize, "causal": self.causal}
        if self.documents:
            options["cu_seqlens"] = list(self.documents)
        if self.states:
            options["output_final_state"] = True
        return options


def recurrence(
    q, k, v, *, log_decay=None, beta=None, initial_state=None, starts=(), scale=1.0, normalize=False
):
    """(out, final state) by definition; differentiable."""
    states, outs = max(k.shape[2], v.shape[2]), []
    if normalize:
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    k, v = (x.repeat_interleave(states // x.shape[2], 2) for x in (k, v))
    readers = max(q.shape[2], states)
    q = scale * q.repeat_interleave(readers // q.shape[2], 2)
    batch, tokens, _, width = k.shape
    state = initial_state
    if state is None:
        state = torch.zeros(batch, states, width, v.shape[3], dtype=v.dtype)
    for t in range(tokens):
        if t in starts:
            state = torch.zeros_like(state)
        if log_decay is not None:
            gate = log_decay.expand(batch, -1) if log_decay.dim() == 1 else log_decay[:, t]
            state = gate.exp().reshape(batch, states, -1, 1) * state
        write = v[:, t]
        if beta is not None:
            read = torch.einsum("bhd,bhde->bhe", k[:, t], state)
            write = beta[:, t, :, None] * (write - read)
        state = state + k[:, t, :, :, None] * write[:, :, None]
        seen = state.repeat_interleave(readers // states, 1)
        outs.append(torch.einsum("bhd,bhde->bhe", q[:, t], seen))
    out = torch.stack(outs, 1)
    return (out[..., :-1] / (out[..., -1:] + 1e-6) if normalize else out), state


def both_ways(q, k, v, *, log_decay=None, documents=None, scale=1.0, normalize=False):
    """Bidirectional linear attention by its weights, over all pairs of tokens."""
    tokens = q.shape[1]
    heads = max(q.shape[2], v.shape[2])
    states = max(k.shape[2], v.shape[2])
    if log_decay is None:
        log_decay = torch.zeros(states, 1, dtype=q.dtype)
    if log_decay.dim() <= 2:
        log_decay = log_decay.reshape(1, 1, -1, 1).expand(q.shape[0], tokens, -1, 1)
    if log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    total = log_decay.repeat_interleave(heads // states, 2).cumsum(1)
    # j <= i: the decays of j + 1 .. i; j > i: those of i .. j - 1.
    before = total - log_decay.repeat_interleave(heads // states, 2)
    forward = (total[:, :, None] - total[:, None]).clamp(max=0)
    backward = (before[:, None] - before[:, :, None]).clamp(max=0)
    index = torch.arange(tokens)
    lower = (index[:, None] >= index)[None, :, :, None, None]
    weights = torch.where(lower, forward, backward).exp()
    if documents:
        owner = torch.bucketize(index, torch.tensor(documents[1:-1]), right=True)
        weights = weights * (owner[:, None] == owner)[None, :, :, None, None]
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v))
    scores = scale * (q[:, :, None] * k[:, None] * weights).sum(-1)  # [b, i, j, h]
    out = torch.einsum("bijh,bjhe->bihe", scores, v)
    return out / (scores.sum(2)[..., None] + 1e-6) if normalize else out


@functools.cache
def expected(case):
    """Output, final state and gradients of the whole sequence, by name.

    Computed once, by the tests' own process: ranks are given it.
    """
    data, out_gradient, state_gradient = case.inputs()
    leaves = {name: tensor.requires_grad_() for name, tensor in data.items()}
    arguments = {"scale": case.scale, "normalize": case.normalize}
    if case.causal:
        # What enters before the first token is the first document's that has tokens.
        starts = set(case.documents or ()) - {0}
        out, state = recurrence(**leaves, **arguments, starts=starts)
    else:
        out, state = both_ways(**leaves, **arguments, documents=case.documents), None
    results, gradients = [out], [out_gradient]
    if case.states:
        results.append(state)
        gradients.append(state_gradient)
    found = torch.autograd.grad(results, list(leaves.values()), gradients, allow_unused=True)
    values = {"out": out.detach()}
    if case.states:
        values["final"] = state.detach()
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        values[f"d {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return values


def local(case, group, layout):
    """Positions of this rank's tokens in the sequence, and whether it holds first and last."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    chain = SegmentChain(size, layout)
    first = chain.holder(0)[0] == rank
    last = chain.holder(chain.length - 1)[0] == rank
    return chain.tokens(rank, case.tokens), first, last


def part(name, tensor, tokens):
    """What a rank has of an argument or gradient."""
    return tensor[:, tokens] if tensor.dim() > 2 and "state" not in name else tensor


def begin(case, operator, group, layout):
    """The forward pass of this rank: its leaves by name, output and final state."""
    data, _, _ = case.inputs()
    tokens, first, _ = local(case, group, layout)
    leaves = {n: part(n, t, tokens).clone().requires_grad_() for n, t in data.items()}
    # A rank that reads no initial state must not look at it.
    if "initial_state" in leaves and not first:
        leaves["initial_state"] = torch.full_like(data["initial_state"], torch.nan).requires_grad_()
    q, k, v, *_ = leaves.values()
    rest = {name: leaf for name, leaf in leaves.items() if name not in ("q", "k", "v")}
    return leaves, *operator(q, k, v, **rest, **case.options())


def finish(case, begun, group, layout, reference):
    """The backward pass: largest error by name, relative to the largest value of the sequence."""
    leaves, out, final = begun
    _, out_gradient, state_gradient = case.inputs()
    tokens, first, last = local(case, group, layout)
    results, gradients = [out], [out_gradient[:, tokens]]
    actual, wanted = {"out": out.detach()}, {"out": reference["out"][:, tokens]}
    if case.states:
        actual["final"], wanted["final"] = final.detach(), reference["final"]
        assert final.requires_grad == last
        if last:
            results.append(final)
            gradients.append(state_gradient)
    found = torch.autograd.grad(results, list(leaves.values()), gradients)
    for name, gradient in zip(leaves, found, strict=True):
        full = reference[f"d {name}"]
        if name == "log_decay" and case.kind == "constant" and group is not None:
            # The sum over ranks is data parallelism's.
            dist.all_reduce(gradient, group=group)
        if name == "initial_state" and not first:
            full = torch.zeros_like(full)
        actual[f"d {name}"], wanted[f"d {name}"] = gradient, part(f"d {name}", full, tokens)
    worst = {}
    for name, value in actual.items():
        assert value.shape == wanted[name].shape and value.dtype == torch.float64, name
        largest = reference[name].abs().max().clamp(min=1e-3)
        worst[name] = ((value - wanted[name]).abs().max() / largest).item()
        # NaN compares as false with everything.
        assert worst[name] == worst[name], (name, "NaN")
    return worst


def errors(case, operator, group, layout, reference):
    """As :func:`finish`, forward and backward."""
    return finish(case, begin(case, operator, group, layout), group, layout, reference)


def small_operator(group, layout="zigzag", **options):
    """An operator with chunks of 5 tokens, so that segments have several and a tail."""
    kernel = TorchKernel(chunk=5, chunks=2)
    return LinearAttentionOperator(
        group, layout=layout, backend=kernel, timeout_seconds=30, **options
    )
