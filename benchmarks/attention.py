"""2D attention against one process, DeepSpeed-Ulysses, and a ring that keeps everything.

    make bench-attention              the full run: 16K tokens, 8 heads of 64, fp32, causal
    python benchmarks/attention.py --tokens 4096 --rounds 3

Prints a table and writes ``benchmarks/results/attention.json``: ``rows`` (raw times, counted bytes,
shapes) and ``figures``. What is compared runs in the same two processes, one after the other in
every round, so that whatever else the machine does hits all of them; figures are ratios of medians.
A row that could not be run says why and has no figure.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first dispatch mode imports it: here, once for all forked ranks
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_longseq.attention_2d import TwoDAttention, attention_traffic
from megatron_longseq.communication import BufferPool, Ring
from megatron_longseq.communication.transport import HEAD_EXCHANGE, RING_BLOCKS, RING_GRADIENTS
from megatron_longseq.launch import RankPool
from megatron_longseq.measurement import LiveBytes, TrafficCounter
from megatron_longseq.softmax import AtenKernel, OnlineSoftmax
from megatron_longseq.token_layout import ZigzagGrid

RESULTS = Path(__file__).parent / "results" / "attention.json"
HEADS, WIDTH = 8, 64
STREAMS = (HEAD_EXCHANGE, RING_BLOCKS, RING_GRADIENTS)
ONE_PROCESS, ULYSSES = "one process, 2 threads", "DeepSpeed Ulysses, 2 ranks"
OURS = {"2D attention 1 x 2 (ring)": (1, 2), "2D attention 2 x 1 (heads)": (2, 1)}
# A contender whose output or gradients differ by more from one process in fp32 is void.
AGREEMENT = 1e-4


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
        self.results = [
            out.detach(),
            *(leaf.grad for leaf in self._leaves if leaf.grad is not None),
        ]
        return between - started, ended - between, processors


def timings(tokens: int, rounds: int) -> dict[str, Any]:
    """Times of this rank by contender, and why one did not run. Two ranks."""
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
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for index in range(rounds + 1):
        for name in names:
            dist.barrier()
            if name in contenders:
                seconds = contenders[name].run()
                if index:  # the first round connects, allocates and faults pages in
                    times[name].append(seconds)
    dist.barrier()
    return {
        "times": times,
        "not_run": not_run,
        "differences": differences(contenders, parts, whole, names),
    }


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


def keep_everything(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """A ring forward that keeps every received block and every partial output until the end.

    An emulation, in our engine, of how TransformerEngine's p2p forward holds memory.
    """
    layout, kernel, rows = ZigzagGrid(1, ring.size), AtenKernel(), query.shape[0]
    kept, partials = [], []
    for owner, (k, v) in ring.circulate(key, value):
        kept.append((k.clone(), v.clone()) if owner != ring.position else (k, v))
        for part in layout.block_mask(ring.position, owner, rows):
            block = kernel.forward(
                query[part.queries],
                kept[-1][0][part.keys],
                kept[-1][1][part.keys],
                causal=part.causal,
                scale=WIDTH**-0.5,
            )
            partials.append((*block, part.queries))
    softmax = OnlineSoftmax(
        rows, query.shape[1], HEADS, WIDTH, dtype=torch.float32, device=query.device
    )
    for out, lse, queries in partials:
        softmax.merge(out.clone(), lse.clone(), queries)
    return softmax.result()[0]


def memory(tokens_per_rank: int) -> dict[str, int]:
    """Peak live bytes of this rank beyond inputs and outputs, on a ring of all ranks."""
    shape = (tokens_per_rank, 1, HEADS, WIDTH)
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    out_gradient = torch.randn(shape)
    operator = TwoDAttention(None, dist.group.WORLD)
    with LiveBytes().include(leaves, out_gradient) as live:
        given = live.current()
        out = operator(*leaves)
        forward = live.peak() - given - out.nbytes
        live.reset_peak()
        out.backward(out_gradient)
        gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
        backward = live.peak() - given - out.nbytes - gradients
    ring = Ring(dist.group.WORLD, BufferPool())
    query, key, value = inputs = [leaf.detach() for leaf in leaves]
    with LiveBytes().include(inputs) as live:
        given = live.current()
        out = keep_everything(query, key, value, ring)
        emulated = live.peak() - given - out.nbytes
    return {"forward": forward, "backward": backward, "emulated_forward": emulated}


def traffic(grids: list[tuple[int, int]], tokens_per_rank: int) -> list[dict[str, Any]]:
    """Counted messages and bytes of this rank beside the formulas, for MHA, GQA and MQA."""
    rows = []
    for head_parallel, ring in grids:
        operator = TwoDAttention(*grid_groups(head_parallel, ring))
        for groups in (HEADS, 2, 1):
            leaves = [
                torch.randn(tokens_per_rank, 1, heads, WIDTH, requires_grad=True)
                for heads in (HEADS, groups, groups)
            ]
            with TrafficCounter({stream.tag: stream.name for stream in STREAMS}) as counter:
                out = operator(*leaves)
                for direction in ("forward", "backward"):
                    if direction == "backward":
                        counter.reset()
                        out.backward(torch.ones_like(out))
                    formula = attention_traffic(
                        tokens=tokens_per_rank,
                        batch=1,
                        query_heads=HEADS,
                        key_heads=groups,
                        width=WIDTH,
                        value_width=WIDTH,
                        head_parallel=head_parallel,
                        ring=ring,
                        element_bytes=4,
                        gradient_bytes=4,
                        backward=direction == "backward",
                    )
                    expected = (
                        formula.head_exchange,
                        formula.ring_blocks,
                        formula.ring_gradients,
                    )
                    for stream, count in zip(STREAMS, expected, strict=True):
                        sent = counter.traffic.total(stream=stream.name, operation="send")
                        rows.append(
                            {
                                "grid": f"{head_parallel} x {ring}",
                                "key_heads": groups,
                                "direction": direction,
                                "stream": stream.name,
                                "messages": sent.messages,
                                "bytes": sent.bytes_sent,
                                "formula_messages": count.messages,
                                "formula_bytes": count.bytes,
                            }
                        )
    return rows


def timing_rows(per_rank: list[dict[str, Any]], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One row per contender; a round takes as long as its slowest rank."""
    rows = []
    for name in (ONE_PROCESS, *OURS, ULYSSES):
        row: dict[str, Any] = {"kind": "time", "name": name, "tokens": tokens}
        row |= {"heads": HEADS, "width": WIDTH, "dtype": "float32", "causal": True}
        if name in per_rank[0]["not_run"]:
            rows.append(row | {"not_run": per_rank[0]["not_run"][name]})
            continue
        times = [rank["times"][name] for rank in per_rank if rank["times"][name]]
        for index, phase in enumerate(("forward", "backward")):
            row[f"{phase}_seconds"] = [
                max(own[step][index] for own in times) for step in range(rounds)
            ]
        row["seconds"] = [max(sum(own[step][:2]) for own in times) for step in range(rounds)]
        row["processor_seconds"] = [sum(own[step][2] for own in times) for step in range(rounds)]
        row["median_seconds"] = statistics.median(row["seconds"])
        row["difference"] = max(rank["differences"][name] for rank in per_rank)
        if row["difference"] > AGREEMENT:
            row["not_run"] = f"void: results differ from one process by {row['difference']:.1e}"
        rows.append(row)
    return rows


def make_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, from the rows that have been run."""
    medians = {
        row["name"]: row["median_seconds"]
        for row in rows
        if row["kind"] == "time" and "not_run" not in row
    }
    figures: dict[str, Any] = {}
    ours = [medians[name] for name in OURS if name in medians]
    if len(ours) == len(OURS):
        figures["over_one_process_min"] = medians[ONE_PROCESS] / max(ours)
        if ULYSSES in medians:
            figures["over_deepspeed_ulysses_min"] = medians[ULYSSES] / max(ours)
            figures["over_deepspeed_ulysses_best"] = medians[ULYSSES] / min(ours)
    held = {row["ring"]: row for row in rows if row["kind"] == "memory"}
    for phase in ("forward", "backward", "emulated_forward"):
        figures[f"{phase}_bytes_ring8_over_ring2"] = held[8][phase] / held[2][phase]
    counts = [row for row in rows if row["kind"] == "traffic"]
    figures["traffic_equals_formula"] = all(
        (row["messages"], row["bytes"]) == (row["formula_messages"], row["formula_bytes"])
        for row in counts
    )
    return figures


def print_table(rows: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """The rows a person reads, then the figures."""
    print(
        f"\n{'':30} {'forward':>9} {'backward':>9} {'together':>9} {'processors':>11}   difference"
    )
    for row in (row for row in rows if row["kind"] == "time"):
        if "seconds" not in row:
            print(f"{row['name']:30} not run: {row['not_run']}")
            continue
        forward, backward = (
            statistics.median(row[f"{p}_seconds"]) for p in ("forward", "backward")
        )
        void = f"  {row['not_run']}" if "not_run" in row else ""
        print(
            f"{row['name']:30} {forward:8.3f}s {backward:8.3f}s {row['median_seconds']:8.3f}s"
            f" {statistics.median(row['processor_seconds']):10.3f}s   {row['difference']:.1e}{void}"
        )
    print(
        f"\n{'peak MB beyond inputs, outputs':30} {'forward':>9} {'backward':>9}   keep everything"
    )
    for row in (row for row in rows if row["kind"] == "memory"):
        print(
            f"{'ring of ' + str(row['ring']):30} {row['forward'] / 1e6:9.2f} "
            f"{row['backward'] / 1e6:9.2f} {row['emulated_forward'] / 1e6:9.2f} (emulation)"
        )
    print()
    for name, value in figures.items():
        print(f"{name:42} {value if isinstance(value, bool) else format(value, '.3f')}")


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of the whole sequence")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one to warm up")
    parser.add_argument("--memory-tokens", type=int, default=512, help="per rank")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with RankPool() as pool:

        def run(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
            return pool.run(
                function, world_size=ranks, args=args, backend="gloo", timeout_seconds=3600
            )

        per_rank = run(timings, 2, options.tokens, options.rounds)
        rows = timing_rows(per_rank, options.tokens, options.rounds)
        for ring in (2, 4, 8):
            peaks = run(memory, ring, options.memory_tokens)
            worst = {key: max(peak[key] for peak in peaks) for key in peaks[0]}
            rows.append(
                {"kind": "memory", "ring": ring, "tokens_per_rank": options.memory_tokens} | worst
            )
        for grids in ([(1, 2), (2, 1)], [(1, 4), (2, 2), (4, 1)], [(1, 8), (2, 4), (8, 1)]):
            counted = run(traffic, grids[0][0] * grids[0][1], grids, 64)
            rows += [
                {"kind": "traffic", "rank": rank} | row
                for rank, own in enumerate(counted)
                for row in own
            ]
    figures = make_figures(rows)
    print_table(rows, figures)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "figures": figures, "rows": rows}, indent=1)
    options.output.write_text(text + "\n")
    print(f"\nwritten: {options.output}")


if __name__ == "__main__":
    main()
