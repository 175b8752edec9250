"""What each rank of ``benchmarks/lasp.py`` measures: functions that a pool of ranks runs."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lasp_contenders import (
    FLAT,
    HEADS,
    WIDTH,
    NoScan,
    Pass,
    WatchedScan,
    blocking_ring,
    deepspeed_ulysses,
    in_turn,
    log_decay,
    ours,
    random_tensors,
)
from torch import Tensor

from megatron_longseq.attention_2d import TwoDAttention
from megatron_longseq.communication.scan import (
    SCAN,
    LinkCosts,
    Scan,
    scan_seconds,
    scan_steps,
    scan_traffic,
)
from megatron_longseq.lasp.segments import Segments
from megatron_longseq.lasp.torch_kernels import TorchKernel
from megatron_longseq.measurement import LimitedLinks, LiveBytes, MeasuredTransport
from megatron_longseq.token_layout import Layout

# Of a token, forward and backward: 14 products of a 64-token chunk with d or e, and 14 of the state
# with d or e; the state of each chunk is rebuilt in backward.
FLOPS_PER_TOKEN = HEADS * 14 * (64 * WIDTH + WIDTH * WIDTH)
# Of a link between processes of one machine, for predictions.
LOOPBACK = LinkCosts(latency_seconds=2e-4, seconds_per_byte=1e-9)

Row = dict[str, Any]


def measured_group(transport: MeasuredTransport) -> dist.ProcessGroup:
    """A group of all ranks whose traffic is counted."""
    return dist.new_group(list(range(dist.get_world_size())), backend=transport.register())


def processor_seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """The least of this process over some calls, the first one not counted."""
    call()
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        call()
        best = min(best, time.process_time() - started)
    return best


def product_rate() -> float:
    """FLOP/s of plain fp32 matrix products, 512 x 512."""
    a = torch.randn(512, 512)
    return 8 * 2 * 512**3 / processor_seconds(lambda: [a @ a for _ in range(8)])


def kernel_parts(tokens: int) -> dict[str, float]:
    """Processor seconds of each part of the kernel, and of the whole passes of one process."""
    query, key, value, dout = (t.unsqueeze(1) for t in random_tensors(tokens, 4, 0))
    segments, kernel = Segments(query, key, value, log_decay()), TorchKernel()
    state, dtype = torch.randn(segments.state_shape), torch.float32
    out, _ = kernel.intra(segments, dtype=dtype)
    result = kernel.d_intra(segments, dout, state, dtype=dtype, gates=False)
    calls: dict[str, Callable[[], Any]] = {
        "summary": lambda: kernel.summary(segments),
        "intra": lambda: kernel.intra(segments, dtype=dtype),
        "apply": lambda: kernel.apply(segments, out, state),
        "d_summary": lambda: kernel.d_summary(segments, dout),
        "d_intra": lambda: kernel.d_intra(segments, dout, state, dtype=dtype, gates=False),
        "d_apply": lambda: kernel.d_apply(segments, result, state, state),
        "forward": lambda: kernel.intra(segments, dtype=dtype, state=state),
        "backward": lambda: kernel.d_intra(
            segments, dout, state, dtype=dtype, state_gradient=state, gates=False
        ),
    }
    return {name: processor_seconds(call) for name, call in calls.items()}


def kernel(tokens: int) -> Row:
    """The kernel on one process: seconds by part, and FLOP/s beside a plain product's."""
    parts = kernel_parts(tokens)
    seconds = parts["forward"] + parts["backward"]
    return {
        "tokens": tokens,
        "part_seconds": parts,
        "flops": FLOPS_PER_TOKEN * tokens / seconds,
        "product_flops": product_rate(),
    }


# --- time of a token, and bytes of a layer ----------------------------------------------------


def scaling(lengths: list[int], rounds: int) -> Row:
    """Samples, and bytes sent in one forward and backward, by length of the whole sequence."""
    transport = MeasuredTransport(streams={SCAN.tag: SCAN.name})
    # One schedule at every length: auto takes another, with other bytes, where compute hides it.
    attention, _ = ours(measured_group(transport), "ring")
    longest = max(lengths) // dist.get_world_size()
    whole = random_tensors(longest, 3, dist.get_rank())
    passes, sent = {}, {}
    for length in lengths:
        rows = length // dist.get_world_size()
        leaves = [tensor[:, :rows].detach().requires_grad_() for tensor in whole]
        # The query serves as gradient of the output too: 2 GiB less at 1M tokens.
        passes[str(length)] = Pass(attention, leaves, leaves[0].detach())
        before = transport.traffic.snapshot()
        passes[str(length)].run()
        sent[length] = (transport.traffic - before).total().bytes_sent
    return {"samples": in_turn(passes, rounds, warm=True), "bytes": sent}


def traffic(tokens_per_rank: int) -> list[Row]:
    """Counted messages and bytes of this rank beside the formulas, by schedule and layout."""
    transport = MeasuredTransport(streams={SCAN.tag: SCAN.name})
    group, rows = measured_group(transport), []
    leaves = random_tensors(tokens_per_rank, 3, dist.get_rank())
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag")
    for layout in layouts:
        for schedule in FLAT:
            attention, scan = ours(group, schedule, layout=layout)
            pair = TorchKernel().summary(
                Segments(*(t[:, None, :64] for t in leaves), log_decay=log_decay())
            )[0]
            inputs = [tensor.detach().requires_grad_() for tensor in leaves]
            out = None
            for direction in ("forward", "backward"):
                before = transport.traffic.snapshot()
                if out is None:
                    out = attention(*inputs)
                else:
                    out.backward(out.detach())
                sent = (transport.traffic - before).total()
                formula = scan_traffic(
                    scan.schedule,  # type: ignore[arg-type]
                    scan.shape(pair),
                    dist.get_rank(),
                    reverse=direction == "backward",
                )
                rows.append(
                    {
                        "layout": layout,
                        "schedule": schedule,
                        "direction": direction,
                        "messages": sent.messages,
                        "bytes": sent.bytes_sent,
                        "formula_messages": formula.messages,
                        "formula_bytes": formula.bytes,
                    }
                )
    return rows


# --- Ulysses ----------------------------------------------------------------------------------


def ulysses(tokens: int, rounds: int, links: LimitedLinks | None) -> Row:
    """Samples of ours and of DeepSpeed's, and how far their results are apart."""
    if links is not None:
        os.environ.update(links.enter(int(os.environ["RANK"])))
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rate = product_rate()
    try:
        theirs = deepspeed_ulysses()
    except ImportError as error:
        return {"not_run": f"deepspeed cannot be imported ({error}); make setup-bench installs it"}
    *leaves, out_gradient = random_tensors(tokens // ranks, 4, rank)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    passes = {
        name: Pass(attention, leaves, out_gradient, keep=True)
        for name, attention in (("ours", ours(dist.group.WORLD)[0]), ("ulysses", theirs))
    }
    samples = in_turn(passes, rounds)
    return {"samples": samples, "difference": difference(passes), "product_flops": rate}


def difference(passes: dict[str, Pass]) -> float:
    """The largest of the results of passes on this rank, relative to the largest value."""
    (first, *others), worst = [one.results for one in passes.values()], 0.0
    for results in others:
        for expected, found in zip(first, results, strict=True):
            error = (expected - found).abs().max() / expected.abs().max()
            worst = max(worst, error.item())
    return worst


# --- schedules over delayed links -------------------------------------------------------------


class ScanAlone:
    """Two scans, as a forward and a backward make them, with nothing to do meanwhile."""

    def __init__(self, scan: Scan, query: Tensor) -> None:
        part = query.detach().unsqueeze(1)
        self._pairs = TorchKernel().summary(Segments(part, part, part, log_decay()))
        self._scan = scan

    def run(self) -> tuple[float, float, float]:
        """Seconds of both, and of this process."""
        processors, times = time.process_time(), [time.perf_counter()]
        for reverse in (False, True):
            self._scan.start(self._pairs, reverse=reverse).wait()
            times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], time.process_time() - processors


def schedules(tokens_per_rank: int, delays_ms: list[float], rounds: int) -> list[Row]:
    """Samples by delay, of each schedule, LASP's order, and no communication; predictions."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    *leaves, out_gradient = random_tensors(tokens_per_rank, 4, rank)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    parts: list[Any] = [kernel_parts(tokens_per_rank) if rank == 0 else None]
    dist.broadcast_object_list(parts, 0)
    rows = []
    for delay in delays_ms:
        # A gather takes its hops one after the other, as the ring does whose bytes are counted.
        transport = MeasuredTransport(latency_seconds=delay / 1e3, ring_collectives=True)
        group = measured_group(transport)
        costs = LinkCosts(max(delay / 1e3, LOOPBACK.latency_seconds), LOOPBACK.seconds_per_byte)
        passes = {
            "none": Pass(ours(group, "ring", kind=NoScan)[0], leaves, out_gradient),
            "blocking": Pass(blocking_ring(group), leaves, out_gradient, keep=True),
        }
        predicted = {"blocking": predicted_blocking(parts[0], ranks, costs)}
        alone: dict[str, Any] = {}
        steps, scans = {}, {}
        for name in FLAT:
            attention, scan = ours(group, name, costs=costs)
            passes[name] = Pass(attention, leaves, out_gradient, keep=True)
            alone[name] = ScanAlone(scan, leaves[0])
            shape = scan.shape(alone[name]._pairs[0])
            steps[name], scans[name] = scan_steps(name, shape), scan
            predicted[name] = predicted_ours(parts[0], ranks, scan_seconds(name, shape, costs))
        samples = in_turn(passes, rounds)
        for scan in scans.values():
            scan.handles.clear()  # type: ignore[attr-defined]
        waited = {}
        for name in FLAT:
            passes[name].run()
            scan = scans[name]
            assert isinstance(scan, WatchedScan)
            waited[name] = sum(handle.wait_seconds for handle in scan.handles)
            scan.handles.clear()
        samples_alone = in_turn(alone, rounds)
        rows.append(
            {
                "delay_ms": delay,
                "samples": samples,
                "alone": samples_alone,
                "predicted": predicted,
                "steps": steps,
                "waited": waited,
                "difference": difference({n: p for n, p in passes.items() if n != "none"}),
            }
        )
    return rows


def predicted_ours(parts: dict[str, float], ranks: int, scan: float) -> float:
    """Seconds of forward and backward: a scan runs beside the work on a segment's own tokens.

    Args:
        parts: seconds of each part of the kernel on a processor of its own.
        scan: seconds of a scan alone.
    """
    share = max(1.0, ranks / (os.cpu_count() or 1))
    total = 0.0
    for prefix in ("", "d_"):
        total += share * (parts[f"{prefix}summary"] + parts[f"{prefix}apply"])
        total += max(scan, share * parts[f"{prefix}intra"])
    return total


def predicted_blocking(parts: dict[str, float], ranks: int, costs: LinkCosts) -> float:
    """Seconds of LASP's order: one rank after the other, and a message between each two."""
    state = HEADS * WIDTH * WIDTH * 4
    message = costs.latency_seconds + costs.seconds_per_byte * state
    return ranks * (parts["forward"] + parts["backward"]) + 2 * (ranks - 1) * message


# --- memory -----------------------------------------------------------------------------------


def memory(lengths: list[int], which: list[str]) -> list[Row]:
    """Bytes alive on this rank by tokens per rank: at the peak of a layer, and for backward."""
    linear, _ = ours(dist.group.WORLD, "ring", carried_by="caller")
    ring = TwoDAttention(None, dist.group.WORLD)
    # The ring's tensors are [tokens, batch, heads, d].
    contenders = {
        "linear": linear,
        "ring": lambda *qkv: ring(*(t.transpose(0, 1) for t in qkv)).transpose(0, 1),
    }
    rows = []
    for name in which:
        for tokens in lengths:
            *leaves, out_gradient = random_tensors(tokens, 4, dist.get_rank())
            leaves = [leaf.requires_grad_() for leaf in leaves]
            if not rows:
                contenders[name](*leaves)  # buffers that stay
            with LiveBytes().include(leaves) as live:
                out = contenders[name](*leaves)
                node = out.grad_fn
                del out
                kept = live.current()
                del node
                live.include(out_gradient)
                live.reset_peak()
                out = contenders[name](*leaves)
                torch.autograd.grad(out, leaves, out_gradient)
                peak = live.peak()
            rows.append({"name": name, "tokens_per_rank": tokens, "kept": kept, "peak": peak})
    return rows
