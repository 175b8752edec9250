"""One kernel of linear attention, against that of plain torch in fp64; and its speed beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..lasp.chunk_kernels import ChunkKernel, kernels
from ..lasp.segments import Segments
from ..lasp.torch_kernels import TorchKernel
from .dense import random_tensors, relative_error
from .kernels import TOLERANCE
from .rows import NOTE, OK, SKIPPED, WRONG, Row, Sizes
from .speed import timed

# Each gate's gradient is a sum over the tokens after it, of terms of both signs.
GATE_FACTOR = 10
SEGMENTS = 2


@dataclass(frozen=True)
class Case:
    """Decay, heads of query, key and value, widths of key and value, and whether it is packed."""

    name: str
    decay: str
    heads: tuple[int, int, int] = (2, 2, 2)
    widths: tuple[int, int] = (64, 64)
    documents: bool = False


CASES = (
    Case("no decay", "none"),
    Case("decay per head", "constant", widths=(128, 128)),
    Case("decay per token", "scalar", widths=(128, 64)),
    Case("decay per token, documents", "scalar", documents=True),
    Case("decay per token, grouped queries", "scalar", heads=(4, 2, 2)),
    Case("decay per token, grouped values", "scalar", heads=(1, 1, 3), widths=(20, 72)),
    Case("decay per channel", "channel", widths=(128, 128)),
    Case("decay per channel, documents", "channel", documents=True, heads=(2, 1, 2)),
)


def check_linear_kernel(
    name: str, dtypes: Sequence[str], device_name: str, tokens: int
) -> list[Row]:
    """All cases of one kernel in each dtype; why not, where it cannot be used."""
    device, rows = torch.device(device_name), []
    for dtype_name in dtypes:
        kernel, dtype = kernels()[name], getattr(torch, dtype_name)
        for case in CASES:
            segments, _ = make_inputs(case, dtype, device, tokens)
            reason = kernel.unusable(segments)
            if reason is not None:
                rows.append(Row(f"{dtype_name}, every case", SKIPPED, reason))
                break
            row = compare(kernel, case, dtype, device, tokens)
            row.case = f"{dtype_name}, {row.case}"
            rows.append(row)
    return rows


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device, tokens: int
) -> tuple[Segments, list[Tensor]]:
    """Two segments; output gradient, incoming state, and gradient of the outgoing state."""
    query_heads, key_heads, value_heads = case.heads
    states, (d, e) = max(key_heads, value_heads), case.widths
    shape = 1, SEGMENTS, tokens
    log_shape = {
        "none": (),
        "constant": (states,),
        "scalar": (*shape, states),
        "channel": (*shape, states, d),
    }[case.decay]
    q, k, v, dout, log_decay, state, dstate = random_tensors(
        (
            (*shape, query_heads, d),
            (*shape, key_heads, d),
            (*shape, value_heads, e),
            (*shape, max(query_heads, value_heads), e),
            log_shape,
            (1, SEGMENTS, states, d, e),
            (1, SEGMENTS, states, d, e),
        ),
        dtype,
        device,
        seed=len(case.name),
    )
    starts = None
    if case.documents:
        starts = torch.zeros(SEGMENTS, tokens, dtype=torch.bool, device=device)
        starts[0, [0, 3, 4, tokens // 2]] = True
        starts[1, tokens // 3 :: tokens // 3] = True
    log_decay = -log_decay.abs() / 4
    segments = Segments(
        *(q, k, v, log_decay if log_shape else None), starts=starts, scale=float(d**-0.5)
    )
    return segments, [dout, state.to(segments.state_dtype), dstate.to(segments.state_dtype)]


def compare(
    kernel: ChunkKernel, case: Case, dtype: torch.dtype, device: torch.device, tokens: int
) -> Row:
    """The largest relative error of each part of a kernel's results."""
    segments, given = make_inputs(case, dtype, device, tokens)
    log_decay = segments.log_decay
    exact = Segments(
        segments.query.double(),
        segments.key.double(),
        segments.value.double(),
        None if log_decay is None else log_decay.double(),
        starts=segments.starts,
        scale=segments.scale,
    )
    actual = results(kernel, segments, given)
    expected = results(TorchKernel(), exact, [tensor.double() for tensor in given])
    allowed = TOLERANCE[str(dtype).removeprefix("torch.")]
    errors = {part: relative_error(tensor, expected[part]) for part, tensor in actual.items()}
    wrong = [
        f"{part} {error:.1e}"
        for part, error in errors.items()
        # Not >: an error that is no number is wrong too.
        if not error <= allowed * (GATE_FACTOR if part == "dg" else 1)
    ]
    shown = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
    detail = f"{', '.join(wrong)} > {allowed:.0e}" if wrong else shown
    return Row(case.name, WRONG if wrong else OK, detail, dict(errors))


def results(kernel: ChunkKernel, segments: Segments, given: list[Tensor]) -> dict[str, Tensor]:
    """Output, states, all gradients, in the two phases in which a scan is waited for."""
    dout, state, dstate = given
    dtype = segments.state_dtype
    found = {"X": torch.stack([pair.state for pair in kernel.summary(segments)])}
    found["out"], _ = kernel.intra(segments, dtype=dtype)
    kernel.apply(segments, found["out"], state)
    found["Y"] = torch.stack([pair.state for pair in kernel.d_summary(segments, dout)])
    gradients = kernel.d_intra(segments, dout, state, dtype=dtype)
    kernel.d_apply(segments, gradients, state, dstate)
    found |= {"dq": gradients.query, "dk": gradients.key, "dv": gradients.value}
    if gradients.log_decay is not None:
        found["dg"] = gradients.log_decay
    return found | {"dS": gradients.state}


def measure_linear_speed(
    name: str, dtypes: Sequence[str], device_name: str, sizes: Sizes
) -> list[Row]:
    """One rank's forward and backward beside those of plain torch; the median of several calls."""
    device, rows = torch.device(device_name), []
    heads, width = sizes.speed_heads, sizes.width
    for dtype_name in dtypes:
        for decay in ("scalar", "channel"):
            case = Case(decay, decay, (heads,) * 3, (width, width))
            dtype, tokens = getattr(torch, dtype_name), sizes.speed_tokens // SEGMENTS
            segments, given = make_inputs(case, dtype, device, tokens)
            title = f"{dtype_name}, {decay} decay, {sizes.speed_tokens} tokens, {heads} heads"
            reason = kernels()[name].unusable(segments)
            if reason is not None:
                rows.append(Row(title, SKIPPED, reason))
                continue
            seconds, theirs = (
                _seconds(kernel, segments, given, sizes.repeats)
                for kernel in (kernels()[name], TorchKernel())
            )
            shown = f"{seconds * 1e3:.3f} ms, {seconds / theirs:.2f} times torch's"
            numbers = {"seconds": seconds, "torch_seconds": theirs, "ratio": seconds / theirs}
            rows.append(Row(f"{title} of {width}", NOTE, f"{shown} {theirs * 1e3:.3f} ms", numbers))
    return rows


def _seconds(kernel: ChunkKernel, segments: Segments, given: list[Tensor], repeats: int) -> float:
    def both() -> None:
        results(kernel, segments, given)

    return timed(both, segments.query.device, repeats)
