"""Where the documents of a packed row begin and end: the list ``cu_seqlens``, checked."""

from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

from torch import Tensor

from .errors import UserError


def boundaries_of(
    cu_seqlens: Tensor | Sequence[int], total: int | None, *, name: str = "cu_seqlens"
) -> list[int]:
    """The list of boundaries, checked.

    Args:
        cu_seqlens: where each document starts and the last one ends; integers. A tensor on a GPU
            costs a synchronisation.
        total: tokens of the whole sequence, over all ranks; ``None`` where the list may end
            anywhere.
        name: of the argument, in messages.

    Raises:
        UserError: it is not a non-decreasing list of integers from 0 to ``total``.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise UserError(
                f"{name} of shape {tuple(cu_seqlens.shape)} and {cu_seqlens.dtype}: expected "
                "one dimension of integers"
            )
        cu_seqlens = cu_seqlens.tolist()
    boundaries = [int(boundary) for boundary in cu_seqlens]
    if (
        len(boundaries) < 2
        or boundaries[0] != 0
        or boundaries[-1] != (boundaries[-1] if total is None else total)
    ):
        ends = f"{boundaries[:1]} to {boundaries[-1:]}" if boundaries else "an empty list"
        raise UserError(
            f"{name} from {ends}: it must begin with 0"
            + (f" and end with {total}, the tokens of all ranks together" if total else "")
            + " (it is the same list on every rank)"
        )
    for index, (low, high) in enumerate(pairwise(boundaries)):
        if high < low:
            raise UserError(
                f"{name}[{index + 1}] = {high} is less than {name}[{index}] = {low}: the "
                "list must not decrease (equal neighbours are an empty document)"
            )
    return boundaries


def describe_boundaries(boundaries: Sequence[int] | None) -> str:
    """The list in a form that tells different ones apart and fits in a message."""
    if boundaries is None:
        return "none"
    text = ", ".join(map(str, boundaries))
    return (
        f"[{text}]"
        if len(text) < 400
        else f"[{text[:200]} ... {text[-200:]}] crc {crc32(text.encode()):08x}"
    )
