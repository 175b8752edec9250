"""2D attention in several processes: on one GPU through host-staged messages, or a GPU each.

NCCL refuses two ranks on one GPU; gloo does not, and the transport stages CUDA tensors through
pinned host memory. Forced on a CPU, the same path runs with ordinary memory.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention_2d import TwoDAttention
from ..token_layout import ZigzagGrid
from .dense import dense_with_gradients, lower_triangle, random_tensors, relative_error
from .kernels import TOLERANCE
from .rows import OK, SKIPPED, WRONG, Row
from .speed import synchronize

HEADS, GROUPS, WIDTH, VALUE_WIDTH, BATCH = 8, 2, 64, 32, 1
# Calls before memory is watched: buffers, workspaces and caches are made then.
WARM_UP_CALLS = 3


class Bench:
    """This rank's part of a random sequence, and the operator on it.

    Args:
        device_name: ``"cpu"``, or ``"cuda"``: the one GPU over gloo, a GPU per rank over NCCL.
    """

    def __init__(
        self, device_name: str, dtype: torch.dtype, head_parallel: int, tokens: int
    ) -> None:
        ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = torch.device(device_name)
        if device_name == "cuda":
            self.device = torch.device("cuda", self.rank if dist.get_backend() == "nccl" else 0)
            torch.cuda.set_device(self.device)
        self.grid = ZigzagGrid(head_parallel, ranks // head_parallel)
        shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUE_WIDTH), (HEADS, VALUE_WIDTH))
        self.whole = random_tensors(
            tuple((tokens, BATCH, *shape) for shape in shapes), dtype, self.device, seed=1
        )
        self.part = [self.grid.split(tensor, self.rank).contiguous() for tensor in self.whole]
        self.operator = TwoDAttention(
            *grid_groups(self.grid),
            timeout_seconds=60.0,
            staging="always" if self.device.type == "cpu" else "auto",
        )

    def __call__(self, *, causal: bool = True, kernel: str = "auto") -> dict[str, Tensor]:
        """Forward and backward of this rank's part."""
        leaves = [tensor.detach().requires_grad_() for tensor in self.part[:3]]
        out = self.operator(*leaves, causal=causal, kernel=kernel)
        gradients = torch.autograd.grad(out, leaves, self.part[3])
        return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    def expected(self, causal: bool) -> dict[str, Tensor]:
        """The same from dense attention over the whole sequence, in fp64."""
        tokens = self.whole[0].shape[0]
        visible = None
        if causal:
            visible = lower_triangle(tokens, tokens, self.device, bottom_right=False)
        query, key, value, out_gradient = self.whole
        whole = dense_with_gradients(query, key, value, out_gradient, visible, float(WIDTH**-0.5))
        del whole["lse"]
        return {name: self.grid.split(tensor, self.rank) for name, tensor in whole.items()}


def grid_groups(grid: ZigzagGrid) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's head group and ring; ``None`` for one of one rank."""
    here, mine = dist.get_rank(), []
    rows = [[grid.rank(c, h) for h in range(grid.head_parallel)] for c in range(grid.ring)]
    columns = [[grid.rank(c, h) for c in range(grid.ring)] for h in range(grid.head_parallel)]
    for lists in (rows, columns):
        groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
        mine.append(
            next(group if len(ranks) > 1 else None for ranks, group in groups if here in ranks)
        )
    return mine[0], mine[1]


def compare_with_dense(device_name: str, dtypes: Sequence[str], tokens: int) -> list[Row]:
    """Every factorisation of the ranks, causal and not: outputs and gradients of this rank."""
    return [row for dtype in dtypes for row in _compare(device_name, dtype, tokens)]


def _compare(device_name: str, dtype_name: str, tokens: int) -> list[Row]:
    dtype, ranks = getattr(torch, dtype_name), dist.get_world_size()
    rows = []
    for head_parallel in (n for n in (1, 2, 4) if ranks % n == 0):
        bench = Bench(device_name, dtype, head_parallel, tokens)
        for causal in (True, False):
            actual, expected = bench(causal=causal), bench.expected(causal)
            errors = {name: relative_error(actual[name], expected[name]) for name in actual}
            right = all(error <= TOLERANCE[dtype_name] for error in errors.values())
            shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            mask = "causal" if causal else "full"
            grid = f"{head_parallel} head-parallel x {ranks // head_parallel} ring"
            case = f"{dtype_name}, {grid}, {mask}"
            rows.append(Row(case, OK if right else WRONG, shown, errors))
        if bench.operator.buffers.leased_bytes:
            held = bench.operator.buffers.leased_bytes
            case = f"{dtype_name}, {head_parallel} head-parallel, buffers given back"
            rows.append(Row(case, WRONG, f"{held} bytes are still on lease"))
    return rows


def digests(device_name: str, dtype_name: str, tokens: int) -> dict[str, str]:
    """Hashes of this rank's results: on the usual stream, and on a stream of its own.

    With the reference kernel, whose sums have a fixed order: results that differ are a transfer
    that was read too early or overwritten too soon.
    """
    bench = Bench(device_name, getattr(torch, dtype_name), 1, tokens)
    results = {"usual stream": _digest(bench(kernel="reference"))}
    results["again"] = _digest(bench(kernel="reference"))
    side = torch.cuda.Stream(bench.device) if bench.device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(bench.device))
    with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
        # Work in front of it, so that a copy that does not wait for its stream reads old numbers.
        busy = torch.ones(1024 if side is None else 8192, 64, device=bench.device)
        for _ in range(20):
            busy = busy @ (busy.T @ busy) * 1e-6
        on_side = bench(kernel="reference")
        synchronize(bench.device)
    results["stream of its own"] = _digest(on_side)
    return results


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of the bits. Without NumPy, which may not be there."""
    combined = hashlib.sha256()
    for name in sorted(tensors):
        raw = tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        combined.update(bytes(raw.tolist()))
    return combined.hexdigest()[:16]


def watch_memory(device_name: str, dtype_name: str, tokens: int, calls: int) -> list[Row]:
    """Bytes held after each of several calls: the same after the first few."""
    bench = Bench(device_name, getattr(torch, dtype_name), 1, tokens)
    held: list[int] = []
    pool: list[int] = []
    with _byte_counter(bench.device) as count:
        for _ in range(WARM_UP_CALLS + calls):
            bench()
            synchronize(bench.device)
            held.append(count())
            pool.append(bench.operator.buffers.held_bytes)
    rows = []
    for case, values in (("tensors", held), ("buffers of the pool", pool)):
        steady = values[WARM_UP_CALLS:]
        # Not equality: a thread of gloo may hold a tensor for a moment longer than its work.
        half = len(steady) // 2
        flat = min(steady[half:]) <= max(steady[:half])
        detail = f"{steady[-1]:,} bytes after each of {calls} calls"
        if not flat:
            detail = f"from {steady[0]:,} to {steady[-1]:,} bytes over {calls} calls"
        rows.append(Row(case, OK if flat else WRONG, detail, {"bytes": values}))
    rows.append(_check_pinned(bench))
    return rows


def _check_pinned(bench: Bench) -> Row:
    """Whether the memory that messages of CUDA tensors are staged in is page-locked."""
    name = "host buffers are page-locked"
    if bench.device.type != "cuda":
        return Row(name, SKIPPED, "on a CPU they are ordinary memory")
    buffer = bench.operator.buffers.lease((16,), torch.float32, torch.device("cpu"), pinned=True)
    pinned = buffer.tensor.is_pinned()
    buffer.give_back()
    return Row(name, OK if pinned else WRONG, "" if pinned else "the buffer is not pinned")


@contextlib.contextmanager
def _byte_counter(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yields what counts the bytes of live tensors on the device."""
    if device.type == "cuda":
        yield lambda: torch.cuda.memory_allocated(device)
        return
    from ..measurement.live_bytes import LiveBytes

    with LiveBytes() as live:
        yield live.current
