"""What ``benchmarks/attention.py`` times: one process, 2D attention and DeepSpeed-Ulysses, in turn.

All contenders run in the same two processes. One process with two threads is rank 0 while rank 1
waits. How much of the machine others used meanwhile is read from the kernel's own count, so that
rounds they disturbed can be told from quiet ones.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_longseq.attention_2d import TwoDAttention
from megatron_longseq.communication import BufferPool
from megatron_longseq.token_layout import ZigzagGrid

HEADS, WIDTH = 8, 64
ONE_PROCESS, ULYSSES = "one process, 2 threads", "DeepSpeed Ulysses, 2 ranks"
OURS = {"2D attention 1 x 2 (ring)": (1, 2), "2D attention 2 x 1 (heads)": (2, 1)}
# A round counts as quiet if others used no more than this share of the machine.
QUIET_SHARE = 0.05


def grid_groups(head_parallel: int, ring: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's (head group, ring group) of a head_parallel x ring grid over all ranks."""
    grid, mine = ZigzagGrid(head_parallel, ring), []
    rows = [[grid.rank(c, h) for h in range(head_parallel)] for c in range(ring)]
    columns = [[grid.rank(c, h) for c in range(ring)] for h in range(head_parallel)]
    for lists in (rows, columns):
        groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
        mine.append(next(group for ranks, group in groups if dist.get_rank() in ranks))
    return mine[0], mine[1]


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's causal attention on ``[tokens, b, heads, d]``: the same kernel as ours."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


def deepspeed_ulysses() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """DeepSpeed's DistributedAttention over both ranks around the same kernel."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return plain_attention(query, key, value).contiguous()

    module = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=0)
    return lambda query, key, value: module(query, key, value, 1)


class Contender:
    """One way to compute attention and its gradients, timed on this rank.

    Args:
        attention: (query, key, value) to output, all of this rank's tokens.
        data: query, key, value and the gradient of the output, of this rank's tokens.
        threads: PyTorch threads while it runs.
    """

    def __init__(
        self,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        data: list[Tensor],
        threads: int = 1,
    ) -> None:
        self._attention = attention
        self._leaves = [tensor.clone().requires_grad_() for tensor in data[:3]]
        self._out_gradient = data[3]
        self._threads = threads
        self.results: list[Tensor] = []

    def run(self) -> tuple[float, float, float]:
        """Seconds of one forward and one backward, and of all processors; keeps the results."""
        torch.set_num_threads(self._threads)
        for leaf in self._leaves:
            leaf.grad = None
        self.results = []
        processors = time.process_time()
        started = time.perf_counter()
        out = self._attention(*self._leaves)
        between = time.perf_counter()
        out.backward(self._out_gradient)
        ended = time.perf_counter()
        processors = time.process_time() - processors
        torch.set_num_threads(1)
        gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        self.results = [out.detach(), *gradients]
        return between - started, ended - between, processors


def busy_processor_seconds() -> float:
    """Seconds the processors of this machine have been busy since it started; 0 if not known."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, interrupts, soft, steal = map(int, fields[:8])
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def sample(contender: Contender | None) -> dict[str, float]:
    """Runs a contender on the ranks that have it; the same on every rank.

    Returns:
        Seconds of forward, backward and both on the slowest rank, of all processors together, and
        the share of the machine that others used meanwhile.
    """
    dist.barrier()
    busy, started = busy_processor_seconds(), time.perf_counter()
    own = contender.run() if contender is not None else (0.0, 0.0, 0.0)
    dist.barrier()
    wall, busy = time.perf_counter() - started, busy_processor_seconds() - busy
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (*own, wall, busy))
    forward, backward, processors, walls, busies = zip(*everyone, strict=True)
    others = busies[0] - sum(processors)
    return {
        "forward": max(forward),
        "backward": max(backward),
        "seconds": max(map(sum, zip(forward, backward, strict=True))),
        "processors": sum(processors),
        "others_share": max(0.0, others) / (walls[0] * (os.cpu_count() or 1)),
    }


def timings(tokens: int, rounds: int, most_rounds: int) -> dict[str, Any]:
    """Samples by contender, why one did not run, and differences of results. Two ranks.

    Goes on until every contender has ``rounds`` quiet samples, or ``most_rounds`` are over.
    """
    rank, pool = dist.get_rank(), BufferPool()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(tokens, 1, HEADS, WIDTH, generator=generator) for _ in range(4)]
    parts: dict[str, Callable[[Tensor], Tensor]] = {ONE_PROCESS: lambda tensor: tensor}
    contenders: dict[str, Contender] = {}
    if rank == 0:
        contenders[ONE_PROCESS] = Contender(plain_attention, whole, threads=2)
    for name, grid in OURS.items():
        parts[name] = partial(ZigzagGrid(*grid).split, rank=rank)
        operator = TwoDAttention(*grid_groups(*grid), buffers=pool)
        contenders[name] = Contender(operator, [parts[name](tensor) for tensor in whole])
    not_run = {}
    try:
        parts[ULYSSES] = lambda tensor: tensor.chunk(2)[rank].clone()
        contenders[ULYSSES] = Contender(
            deepspeed_ulysses(), [parts[ULYSSES](tensor) for tensor in whole]
        )
    except ImportError as error:
        not_run[ULYSSES] = f"deepspeed cannot be imported ({error}); make setup-bench installs it"
    names = [ONE_PROCESS, *OURS, *([] if not_run else [ULYSSES])]
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for index in range(most_rounds + 1):
        for name in names:
            one = sample(contenders.get(name))
            if index:  # the first round connects, allocates and faults pages in
                samples[name].append(one)
        if min(len(quiet(own)) for own in samples.values()) >= rounds:
            break
    return {
        "samples": samples,
        "not_run": not_run,
        "differences": differences(contenders, parts, whole, names),
    }


def quiet(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """The samples during which others left the machine alone."""
    return [one for one in samples if one["others_share"] <= QUIET_SHARE]


def differences(
    contenders: dict[str, Contender],
    parts: dict[str, Callable[[Tensor], Tensor]],
    whole: list[Tensor],
    names: list[str],
) -> dict[str, float]:
    """Largest difference of this rank's results from those of one process, relative."""
    expected = contenders[ONE_PROCESS].results if dist.get_rank() == 0 else whole
    worst = dict.fromkeys(names, 0.0)
    for index, reference in enumerate(expected):
        reference = reference.contiguous().clone()
        dist.broadcast(reference, 0)
        for name in names[1:]:
            ours, mine = contenders[name].results[index], parts[name](reference)
            error = ((ours - mine).abs().max() / mine.abs().max()).item()
            worst[name] = max(worst[name], error)
    return worst
