"""What 2D attention sends, exactly: the formulas the counters are compared with.

Per rank, with n tokens, micro-batch b, a query heads, g key/value heads of which ``m = lcm(g, hp)``
count, widths d and dv, and e bytes per element (e' per element of dK and dV on the wire):

    head exchange, each way     n b (a + m) (d + dv) e (hp - 1) / hp       8 (hp - 1) messages
    K and V, each pass          (ring - 1) S                               2 (ring - 1) messages
    dK and dV                   ring S e' / e                              2 ring messages

    S = n b m (d + dv) e        the K and V of a ring position on one rank

Under a window or with packed documents, of which ranks see little of one another's blocks, K and V
take the rows that are seen instead of blocks, and dK and dV as many (``MaskPlan.rows_used``).

The head exchange moves q, k, v and out forward, and dO, dQ, dK and dV backward: the same bytes.
"""

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one pass of one stream."""

    messages: int
    bytes: int


@dataclass(frozen=True)
class AttentionTraffic:
    """What one rank sends in one forward or one backward."""

    head_exchange: Traffic
    ring_blocks: Traffic
    ring_gradients: Traffic


def attention_traffic(
    *,
    tokens: int,
    batch: int,
    query_heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    head_parallel: int,
    ring: int,
    element_bytes: int,
    gradient_bytes: int,
    backward: bool,
) -> AttentionTraffic:
    """What one rank sends in one forward, or one backward, of 2D attention.

    Args:
        tokens: on this rank.
        width, value_width: of keys and queries, and of values.
        element_bytes, gradient_bytes: per element of the inputs, and of dK and dV on their way.
    """
    counted_heads = lcm(key_heads, head_parallel)
    per_head = tokens * batch * (width + value_width)
    exchanged = per_head * (query_heads + counted_heads) * (head_parallel - 1) // head_parallel
    block = per_head * counted_heads
    nothing = Traffic(0, 0)
    return AttentionTraffic(
        head_exchange=Traffic(8 * (head_parallel - 1), exchanged * element_bytes),
        ring_blocks=Traffic(2 * (ring - 1), (ring - 1) * block * element_bytes),
        ring_gradients=Traffic(2 * ring, ring * block * gradient_bytes)
        if backward and ring > 1
        else nothing,
    )
