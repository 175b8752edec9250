"""What ``benchmarks/lasp.py`` times: linear attention by ours, by LASP's order, and by Ulysses.

All compute with the same kernel. Query, key and value are ``[1, n, heads, d]``: this rank's tokens.
"""

import os
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from attention_contenders import quiet, sample
from torch import Tensor

from megatron_longseq.communication.scan import Scan
from megatron_longseq.communication.scan.costs import ScheduleName
from megatron_longseq.communication.scan.job import ScanResult
from megatron_longseq.communication.scan.scan import ScanHandle
from megatron_longseq.lasp.linear_attention import LinearAttentionOperator
from megatron_longseq.lasp.presets import alibi_slopes
from megatron_longseq.lasp.segments import Segments
from megatron_longseq.lasp.torch_kernels import TorchKernel
from megatron_longseq.token_layout import Layout

HEADS, WIDTH = 8, 64
# The schedules that need no nodes.
FLAT: tuple[ScheduleName, ...] = ("ring", "all_gather", "log_scan", "all_scan")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_decay() -> Tensor:
    """The natural logarithm of the decay of each head, fp32 ``[heads]``."""
    return -alibi_slopes(HEADS).float()


def random_tensors(tokens: int, count: int, seed: int) -> list[Tensor]:
    """fp32 ``[1, tokens, heads, d]`` each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, tokens, HEADS, WIDTH, generator=generator) for _ in range(count)]


class Pass:
    """Forward and backward of one attention, as :func:`attention_contenders.sample` times it.

    Args:
        attention: (query, key, value) to output.
        leaves: query, key and value; shared with other passes.
        out_gradient: of the output.
        keep: leave output and gradients in ``results``.
    """

    def __init__(
        self,
        attention: Attention,
        leaves: list[Tensor],
        out_gradient: Tensor,
        *,
        keep: bool = False,
    ) -> None:
        self._attention = attention
        self._leaves = leaves
        self._out_gradient = out_gradient
        self._keep = keep
        self.results: list[Tensor] = []

    def run(self) -> tuple[float, float, float]:
        """Seconds of forward and backward, and of all processors."""
        self.results = []
        processors, started = time.process_time(), time.perf_counter()
        out = self._attention(*self._leaves)
        between = time.perf_counter()
        # Not kept: where the output is 1M tokens, a training step has let go of it here too.
        kept = [out.detach()] if self._keep else []
        gradients = torch.autograd.grad(out, self._leaves, self._out_gradient)
        ended = time.perf_counter()
        if self._keep:
            self.results = [*kept, *gradients]
        return between - started, ended - between, time.process_time() - processors


def in_turn(
    passes: dict[str, Pass], rounds: int, *, warm: bool = False
) -> dict[str, list[dict[str, float]]]:
    """Samples of every pass, one after the other in each round.

    Args:
        warm: all have run once; otherwise there is a first round that is not counted.
    """
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in passes}
    for index in range(int(warm), rounds + 1):
        for name, one in passes.items():
            taken = sample(one)  # type: ignore[arg-type]
            if index:
                samples[name].append(taken)
    return samples


def counted(samples: list[dict[str, float]]) -> tuple[list[dict[str, float]], bool]:
    """The samples that count, and whether they were taken while others left the machine alone."""
    calm = quiet(samples)
    return (calm, True) if 2 * len(calm) >= len(samples) else (samples, False)


class WatchedScan(Scan):
    """A scan that keeps its handles, which know how long their callers waited."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.handles: list[ScanHandle] = []

    def start(self, *args: Any, **options: Any) -> ScanHandle:
        handle = super().start(*args, **options)
        self.handles.append(handle)
        return handle


class NoScan(Scan):
    """Hands out zero states at once: what a pass takes without communication."""

    def start(self, pairs: Any, **_options: Any) -> Any:
        return _Zeros(ScanResult(tuple(torch.zeros_like(pair.state) for pair in pairs), None))


class _Zeros:
    def __init__(self, result: ScanResult) -> None:
        self._result = result

    def wait(self) -> ScanResult:
        return self._result


def ours(
    group: dist.ProcessGroup | None,
    schedule: ScheduleName | Literal["auto"] = "auto",
    *,
    layout: Layout = "contiguous",
    kind: type[Scan] = WatchedScan,
    **options: Any,
) -> tuple[Attention, Scan]:
    """Our operator over a group, and its scan, with further options of :class:`Scan`."""
    scan = kind(group, layout=layout, schedule=schedule, check_agreement=False, **options)
    operator = LinearAttentionOperator(
        group,
        layout=layout,
        backend="torch",
        scan=scan,
        check_agreement=False,
        check_values=False,
    )
    decay = log_decay()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return operator(query, key, value, log_decay=decay)[0]

    return attention, scan


class BlockingRing(torch.autograd.Function):
    """LASP's order of operations: receive the state, then compute, then send it on."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, entering := _received(query, group, -1))
        ctx.group = group
        segments = _segments(query, key, value)
        out, after = TorchKernel().intra(segments, dtype=torch.float32, state=entering)
        _send(after, group, 1)
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, entering = ctx.saved_tensors
        leaving = _received(query, ctx.group, 1)
        result = TorchKernel().d_intra(
            _segments(query, key, value),
            out_gradient.unsqueeze(1),
            entering,
            dtype=torch.float32,
            state_gradient=leaving,
            gates=False,
        )
        _send(result.state, ctx.group, -1)
        return (*(g.flatten(1, 2) for g in (result.query, result.key, result.value)), None)


def _segments(query: Tensor, key: Tensor, value: Tensor) -> Segments:
    return Segments(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), log_decay())


def _received(like: Tensor, group: dist.ProcessGroup, offset: int) -> Tensor:
    """The state of the neighbour at ``offset``; zero where there is none."""
    state = like.new_zeros(1, 1, HEADS, WIDTH, WIDTH)
    peer = dist.get_rank() + offset
    if 0 <= peer < dist.get_world_size():
        dist.recv(state, peer, group)
    return state


def _send(state: Tensor, group: dist.ProcessGroup, offset: int) -> None:
    peer = dist.get_rank() + offset
    if 0 <= peer < dist.get_world_size():
        dist.send(state.contiguous(), peer, group)


def blocking_ring(group: dist.ProcessGroup) -> Attention:
    """LASP's order of operations over all ranks."""
    return lambda query, key, value: BlockingRing.apply(query, key, value, group)


def deepspeed_ulysses() -> Attention:
    """DeepSpeed's DistributedAttention over all ranks, around the same kernel.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    operator = LinearAttentionOperator(
        None, backend="torch", check_agreement=False, check_values=False
    )
    decay = log_decay().chunk(dist.get_world_size())[dist.get_rank()]

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return operator(q, k, v, log_decay=decay)[0].transpose(0, 1).contiguous()

    # [tokens, batch, heads, d], as DeepSpeed's own models pass it.
    module = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=0)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return module(q, k, v, 1).transpose(0, 1)

    return attention
