"""What a caller of 2D attention says about the mask, checked and put into one object."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..document_boundaries import boundaries_of
from ..errors import UserError
from ..softmax.mask_plan import Mask, PackedDocuments

Boundaries = Tensor | Sequence[int]


def requested_mask(
    *,
    causal: bool,
    window: int | None,
    prefix: int,
    cu_seqlens: Boundaries | None,
    cu_seqlens_padded: Boundaries | None,
    total: int,
    batch: int,
    ranks: int,
) -> Mask:
    """The mask of :func:`.attention.two_d_attention`'s arguments.

    Args:
        total: tokens of the whole row, over all ranks.
        batch: rows.
        ranks: that share a row.

    Raises:
        UserError: naming the argument, the value and the rule.
    """
    if window is not None and window < 0:
        raise UserError(
            f"window={window}: a token sees itself and as many tokens before it; at least 0, or "
            "None for all of them"
        )
    if prefix < 0:
        raise UserError(f"prefix={prefix}: a number of tokens, at least 0")
    if not causal and window is not None:
        raise UserError(
            f"window={window} with causal=False: a window is of the tokens before; use causal=True"
        )
    if not causal and prefix:
        raise UserError(
            f"prefix={prefix} with causal=False, where everything is seen; leave it out"
        )
    documents = _documents(cu_seqlens, cu_seqlens_padded, total, batch, ranks)
    if window is not None and window >= total - 1:
        window = None
    return Mask(causal, window, prefix, documents)


def _documents(
    cu_seqlens: Boundaries | None,
    cu_seqlens_padded: Boundaries | None,
    total: int,
    batch: int,
    ranks: int,
) -> PackedDocuments | None:
    if cu_seqlens is None:
        if cu_seqlens_padded is not None:
            raise UserError("cu_seqlens_padded without cu_seqlens, the lengths of the documents")
        return None
    if batch != 1:
        raise UserError(
            f"cu_seqlens with a micro-batch of {batch}: packed documents need 1; call once per row"
        )
    if cu_seqlens_padded is None:
        documents = PackedDocuments.whole_row(boundaries_of(cu_seqlens, total))
        return documents if len(documents.lengths) > 1 else None
    padded = boundaries_of(cu_seqlens_padded, total, name="cu_seqlens_padded")
    real = boundaries_of(cu_seqlens, None)
    if len(real) != len(padded):
        raise UserError(
            f"cu_seqlens has {len(real)} entries and cu_seqlens_padded {len(padded)}; they must "
            "have as many"
        )
    lengths = [high - low for low, high in pairwise(real)]
    for index, ((low, high), length) in enumerate(zip(pairwise(padded), lengths, strict=True)):
        if ranks > 1 and (high - low) % (2 * ranks):
            raise UserError(
                f"document {index} has {high - low} tokens with padding: cu_seqlens_padded means "
                f"that each document is a zigzag over {ranks} ranks by itself, so it must have a "
                f"multiple of 2 x {ranks} = {2 * ranks}; leave out cu_seqlens_padded where the "
                "whole row is one"
            )
        if length > high - low:
            raise UserError(
                f"document {index} has {length} tokens in cu_seqlens and {high - low} with padding "
                "in cu_seqlens_padded, which cannot be less"
            )
    return PackedDocuments(tuple(padded), tuple(lengths), zigzag=ranks > 1)
