"""The documents of a micro-batch on their way through Megatron's model.

Megatron hands ``packed_seq_params`` from its model to every layer. Its own ``"thd"`` format lays
all rows one behind the other, and its rotary embedding and token order then expect each document to
be a zigzag over the ranks by itself. :class:`PackedRows` keeps rows as rows, ``"sbhd"``, split as
without documents; documents may be cut anywhere. Only layers of this package know it.

Rotary embeddings are by the place in the row: scores depend on distances alone, so inside a
document they are those of places counted from its start. ``position_ids``, which learned position
embeddings read, come from the data set and begin anew with each document.
"""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from .document_boundaries import boundaries_of


@dataclass
class PackedRows(PackedSeqParams):
    """Where the documents of each row begin and end.

    Attributes:
        boundaries: of each row of the micro-batch, from 0 to the row's length, ascending.
    """

    boundaries: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, cu_seqlens: Tensor, length: int) -> "PackedRows":
        """From a batch's ``cu_seqlens``, which is copied to the host once for all layers.

        Args:
            cu_seqlens: integers ``[b, k]``; each row begins with 0 and is filled up with ``length``
                behind the end of its last document, as Megatron's data sets do.
            length: tokens of a row, over all ranks.

        Raises:
            UserError: a row is not ascending from 0 to ``length``.
        """
        rows = (boundaries_of(row, length) for row in cu_seqlens.tolist())
        return cls(
            qkv_format="sbhd",
            # Megatron makes as many rotary angles.
            max_seqlen_q=length,
            max_seqlen_kv=length,
            boundaries=tuple(tuple(sorted(set(row))) for row in rows),
        )
