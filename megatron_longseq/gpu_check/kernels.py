"""One block kernel, against attention in fp64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..softmax.block_kernels import BlockKernel, choose_kernel
from ..softmax.online_softmax import merge_
from .dense import dense_with_gradients, lower_triangle, random_tensors, relative_error
from .rows import NOTE, OK, SKIPPED, WRONG, Row

# Largest relative error allowed, of values and gradients: a few roundings of the dtype. The
# log-sum-exp comes in fp32 from exact products of rounded inputs, and is held to that.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
LSE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
BATCH = 2


@dataclass(frozen=True)
class Case:
    """A rectangle of attention: lengths as parts of ``rows``, heads, widths, and the mask."""

    name: str
    queries: float = 1.0
    keys: float = 1.0
    heads: int = 4
    groups: int = 4
    width: int = 64
    value_width: int = 64
    mask: str = "full"


CASES = (
    Case("full"),
    Case("causal", mask="causal"),
    Case("late half of the queries", queries=0.5),
    Case("early half of the keys", keys=0.5),
    Case("grouped heads", heads=6, groups=2, mask="causal"),
    Case("one key head", heads=4, groups=1),
    Case("V narrower than K", value_width=32, mask="causal"),
    Case("V wider than K", width=32),
    Case("width 128", width=128, value_width=128, mask="causal"),
    Case("width 20, no multiple of 8", width=20, value_width=20),
    Case("mask with rows that see nothing", mask="empty rows"),
)


def check_kernel(name: str, dtypes: Sequence[str], device_name: str, rows: int) -> list[Row]:
    """All cases of one kernel in each dtype, and its conventions."""
    device, found = torch.device(device_name), []
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        kernel = choose_kernel(name, dtype, device)
        of_dtype = [_compare(kernel, case, dtype, device, rows) for case in CASES]
        of_dtype.append(_check_final_lse(kernel, dtype, device, rows))
        of_dtype.append(_note_alignment(kernel, dtype, device, rows))
        of_dtype.append(_note_reruns(kernel, dtype, device, rows))
        of_dtype.append(_note_operators(kernel, dtype, device, rows))
        for row in of_dtype:
            row.case = f"{dtype_name}, {row.case}"
        found += of_dtype
    return found


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, rows: int) -> list[Tensor]:
    """query, key, value and the output's gradient."""
    queries, keys = round(rows * case.queries), round(rows * case.keys)
    shapes = (
        (queries, BATCH, case.heads, case.width),
        (keys, BATCH, case.groups, case.width),
        (keys, BATCH, case.groups, case.value_width),
        (queries, BATCH, case.heads, case.value_width),
    )
    return random_tensors(shapes, dtype, device, seed=len(case.name))


def _compare(
    kernel: BlockKernel, case: Case, dtype: torch.dtype, device: torch.device, rows: int
) -> Row:
    q, k, v, dout = _inputs(case, dtype, device, rows)
    scale = float(case.width**-0.5)
    causal = case.mask == "causal"
    visible = None
    if case.mask == "empty rows":
        visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=device).tril(-3)
    try:
        out, lse = kernel.forward(q, k, v, causal=causal, scale=scale, visible=visible)
        gradients = kernel.backward(
            dout, q, k, v, out.to(dtype), lse, causal=causal, scale=scale, visible=visible
        )
    except NotImplementedError as error:
        return Row(case.name, SKIPPED, str(error))
    if causal:
        visible = lower_triangle(q.shape[0], k.shape[0], device, bottom_right=False)
    expected = dense_with_gradients(q, k, v, dout, visible, scale)
    actual = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return _row(case.name, actual, expected, dtype)


def _row(
    name: str, actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> Row:
    dtype_name = str(dtype).removeprefix("torch.")
    errors, wrong = {}, []
    for part, tensor in actual.items():
        allowed = (LSE_TOLERANCE if part == "lse" else TOLERANCE)[dtype_name]
        if tensor.shape != expected[part].shape:
            wrong.append(f"{part} has shape {tuple(tensor.shape)}")
            continue
        errors[part] = relative_error(tensor, expected[part])
        # Not >: an error that is no number is wrong too.
        if not errors[part] <= allowed:
            wrong.append(
                f"{part} {errors[part]:.1e} > {allowed:.0e}{_log_2(part, tensor, expected)}"
            )
    shown = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
    return Row(name, WRONG if wrong else OK, "; ".join(wrong) or shown, errors)


def _log_2(part: str, tensor: Tensor, expected: dict[str, Tensor]) -> str:
    """Says so if a log-sum-exp is to base 2, the one other convention that kernels use."""
    if part != "lse":
        return ""
    natural = tensor.double() * torch.log(torch.tensor(2.0)).item()
    return " (it is to base 2)" if relative_error(natural, expected["lse"]) < 1e-3 else ""


def _check_final_lse(
    kernel: BlockKernel, dtype: torch.dtype, device: torch.device, rows: int
) -> Row:
    """Blocks with the final output and log-sum-exp must add up to the whole gradient."""
    case = Case("two blocks, with the final out and lse", heads=4, groups=2)
    q, k, v, dout = _inputs(case, dtype, device, rows)
    scale, cut = float(case.width**-0.5), rows // 3
    blocks = (slice(0, cut), slice(cut, rows))
    wide = torch.promote_types(dtype, torch.float32)
    out: Tensor | None = None
    for block in blocks:
        part, part_lse = kernel.forward(q, k[block], v[block], causal=False, scale=scale)
        if out is None:
            out, lse = part.to(wide).contiguous(), part_lse.to(wide).contiguous()
        else:
            merge_(out, lse, part, part_lse)
    assert out is not None
    terms = [
        kernel.backward(dout, q, k[b], v[b], out.to(dtype), lse, causal=False, scale=scale)
        for b in blocks
    ]
    actual = {
        "out": out,
        "lse": lse,
        "dq": sum((term[0].to(wide) for term in terms), torch.zeros_like(q, dtype=wide)),
        "dk": torch.cat([term[1].to(wide) for term in terms]),
        "dv": torch.cat([term[2].to(wide) for term in terms]),
    }
    return _row(case.name, actual, dense_with_gradients(q, k, v, dout, None, scale), dtype)


def _note_alignment(
    kernel: BlockKernel, dtype: torch.dtype, device: torch.device, rows: int
) -> Row:
    """Where a causal mask of unequal lengths begins. Nothing here relies on it."""
    name = "causal with fewer queries than keys"
    q, k, v, dout = _inputs(Case(name, queries=0.5), dtype, device, rows)
    dtype_name = str(dtype).removeprefix("torch.")
    try:
        out, _ = kernel.forward(q, k, v, causal=True, scale=0.125)
    except (RuntimeError, NotImplementedError) as error:
        return Row(name, NOTE, f"refused: {(str(error).splitlines() or [''])[0]}")
    for label, bottom_right in (("top-left", False), ("bottom-right", True)):
        visible = lower_triangle(q.shape[0], k.shape[0], device, bottom_right=bottom_right)
        expected = dense_with_gradients(q, k, v, dout, visible, 0.125)["out"]
        if relative_error(out, expected) <= TOLERANCE[dtype_name]:
            return Row(name, NOTE, f"aligned {label}", {"alignment": label})
    return Row(name, NOTE, "aligned neither top-left nor bottom-right")


def _note_reruns(kernel: BlockKernel, dtype: torch.dtype, device: torch.device, rows: int) -> Row:
    """Whether the same call gives the same bits."""
    q, k, v, dout = _inputs(Case("reruns", mask="causal"), dtype, device, rows)
    runs = []
    for _ in range(3):
        out, lse = kernel.forward(q, k, v, causal=True, scale=0.125)
        gradients = kernel.backward(dout, q, k, v, out.to(dtype), lse, causal=True, scale=0.125)
        runs.append((out, lse, *gradients))
    parts = ("out", "lse", "dq", "dk", "dv")
    apart = [
        part
        for index, part in enumerate(parts)
        if not all(torch.equal(run[index], runs[0][index]) for run in runs)
    ]
    detail = f"differ in {', '.join(apart)}" if apart else "the same bits three times"
    return Row("reruns", NOTE, detail, {"differ": apart})


def _note_operators(
    kernel: BlockKernel, dtype: torch.dtype, device: torch.device, rows: int
) -> Row:
    """Which fused operators of PyTorch did the work; without and with a mask they may differ."""
    q, k, v, dout = _inputs(Case("operators"), dtype, device, rows)
    visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=device).tril()
    with _OperatorNames() as seen:
        for mask in (None, visible):
            try:
                out, lse = kernel.forward(q, k, v, causal=False, scale=0.125, visible=mask)
            except NotImplementedError:
                continue
            out = out.to(dtype)
            kernel.backward(dout, q, k, v, out, lse, causal=False, scale=0.125, visible=mask)
    names = list(dict.fromkeys(seen.names))
    return Row("operators", NOTE, ", ".join(names) or "none of PyTorch's fused ones", {"of": names})


class _OperatorNames(TorchDispatchMode):
    """Notes the names of the fused attention operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name.startswith("_scaled_dot_product"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
