"""Compares what two runs recorded: largest relative differences, and where they begin."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .capture import Capture, OutputPiece
from .pieces import Piece, assemble

OUTPUT_MODULE = "output_layer"


@dataclass(frozen=True)
class Difference:
    """A largest relative difference: max |a - b| / max |b|, b the reference."""

    relative: float
    where: str


@dataclass
class Verdict:
    """The result of a comparison.

    Attributes:
        output, loss, gradient, parameter: the largest relative difference of each.
        tolerances: what each of them may be.
        first_module: the first module, in the order of execution, whose output differs by more
            than the tolerance.
        steps: optimizer steps before the parameters were compared.
        compared: how many modules, parameters and tokens took part.
    """

    output: Difference
    loss: Difference
    gradient: Difference
    parameter: Difference
    tolerances: dict[str, float]
    first_module: str | None
    steps: int
    compared: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every difference is within its tolerance, modules included; NaN never is."""
        return self.first_module is None and all(
            getattr(self, name).relative <= tolerance for name, tolerance in self.tolerances.items()
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"passed": self.passed}


def compare(
    reference: list[Capture],
    candidate: list[Capture],
    tolerances: dict[str, float],
    rounding: float,
) -> Verdict:
    """Compares every rank's record of ``candidate`` with the whole of ``reference``.

    Args:
        tolerances: of output, loss, gradient and parameter.
        rounding: relative rounding of the precision. A gradient that is zero but for rounding is
            compared on the scale of the largest gradient: below ``rounding / tolerance`` of it,
            nothing but noise is left.
    """
    modules = _module_differences(reference, candidate)
    gradient = _piece_difference(
        [p for c in reference for p in c.gradients],
        [p for c in candidate for p in c.gradients],
        floor=min(0.01, rounding / tolerances["gradient"]),
    )
    parameter = _piece_difference(
        [p for c in reference for p in c.parameters],
        [p for c in candidate for p in c.parameters],
        floor=0.0,
    )
    expected = {step: loss for (step, _), loss in _losses(reference).items()}
    found = _losses(candidate)
    loss = max(
        (
            Difference(_relative(value, expected[step]), f"step {step + 1}")
            for (step, _), value in found.items()
        ),
        key=_size,
        default=Difference(torch.nan, "no step"),
    )
    if {step for step, _ in found} != set(expected):
        loss = Difference(torch.nan, "a step is missing")
    limit = tolerances["output"]
    first = next((name for name, d in modules.items() if not d.relative <= limit), None)
    last = OUTPUT_MODULE if OUTPUT_MODULE in modules else list(modules)[-1]
    return Verdict(
        output=Difference(modules[last].relative, last),
        loss=loss,
        gradient=gradient,
        parameter=parameter,
        tolerances=tolerances,
        first_module=first,
        steps=len(expected),
        compared={
            "modules": len(modules),
            "parameters": len({p.key for c in reference for p in c.parameters}),
            "parameter pieces": sum(len(c.parameters) for c in candidate),
        },
    )


def _piece_difference(
    reference: list[Piece], candidate: list[Piece], *, floor: float
) -> Difference:
    """Every piece of every rank against the assembled reference: replicas must agree too.

    A difference is relative to the largest entry of its tensor, or to ``floor`` times the largest
    of all tensors if that is more.
    """
    wholes = assemble(reference)
    least = floor * max(float(whole.abs().max()) for whole in wholes.values())
    found: dict[str, float] = {}
    for piece in candidate:
        whole = wholes.get(piece.key)
        if whole is None or tuple(whole.shape) != piece.global_shape:
            found[piece.key] = torch.nan
            continue
        scale = max(float(whole.abs().max()), least)
        difference = float((piece.data - piece.slice_of(whole)).abs().max())
        relative = difference / scale if scale > 0 else difference
        found[piece.key] = max(found.get(piece.key, 0.0), relative, key=_number)
    for key in wholes.keys() - found.keys():
        found[key] = torch.nan  # no rank of the candidate has it
    return max((Difference(value, key) for key, value in found.items()), key=_size)


def _module_differences(
    reference: list[Capture], candidate: list[Capture]
) -> dict[str, Difference]:
    """Largest relative difference of each module's output, in the reference's order."""
    expected = _assemble_outputs([p for c in reference for p in c.outputs])
    order = {p.module: p.order for c in reference for p in c.outputs}
    worst: dict[str, float] = defaultdict(float)
    covered: dict[tuple[str, int], int] = defaultdict(int)
    for piece in (p for c in candidate for p in c.outputs):
        whole = expected.get((piece.module, piece.sample))
        if whole is None:
            worst[piece.module] = torch.nan
            continue
        part = whole[piece.positions, piece.column : piece.column + piece.data.shape[1]]
        scale = float(whole.abs().max())
        relative = float((piece.data - part).abs().max()) / (scale or 1.0)
        worst[piece.module] = max(worst[piece.module], relative, key=_number)
        covered[piece.module, piece.sample] += piece.data.numel()
    for key, whole in expected.items():
        if covered[key] < whole.numel():
            worst[key[0]] = torch.nan  # the candidate computed none of it, or only a part
    # A module whose output the layout splits in a way of its own is compared through the next one.
    recorded = {piece.module for capture in candidate for piece in capture.outputs}
    names = sorted(recorded & order.keys(), key=lambda name: order[name])
    return {name: Difference(worst[name], name) for name in names}


def _assemble_outputs(pieces: list[OutputPiece]) -> dict[tuple[str, int], Tensor]:
    shapes: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for piece in pieces:
        shape = shapes[piece.module, piece.sample]
        shape[0] = max(shape[0], int(piece.positions.max()) + 1)
        shape[1] = max(shape[1], piece.column + piece.data.shape[1])
    wholes = {
        key: torch.full(shape, torch.nan, dtype=torch.float64) for key, shape in shapes.items()
    }
    for piece in pieces:
        whole = wholes[piece.module, piece.sample]
        whole[piece.positions, piece.column : piece.column + piece.data.shape[1]] = piece.data
    return wholes


def _losses(captures: list[Capture]) -> dict[tuple[int, int], float]:
    """Mean loss per token of each step and tensor-parallel rank, over all others."""
    sums: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for capture in captures:
        for step, rank, loss, tokens in capture.losses:
            sums[step, rank][0] += loss
            sums[step, rank][1] += tokens
    return {key: loss / tokens for key, (loss, tokens) in sorted(sums.items())}


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def _number(value: float) -> float:
    return value if value == value else float("inf")


def _size(difference: Difference) -> float:
    return _number(difference.relative)
