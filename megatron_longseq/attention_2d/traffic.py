"""What 2D attention sends, exactly: the formulas the counters are compared with.

A rank has n tokens, micro-batch b, widths d (queries, keys) and dv (values), e bytes per element,
e' per element of gradients on their way in the ring, and f per number of a row. It works on a'
query heads and g' key/value heads of a group's a and g: a / hp and g / hp where hp divides both.

    head exchange    n b (a + g) (d + dv) e (hp - 1) / hp           8 (hp - 1) messages, each way
    K and V          (ring - 1) S,       S = n hp b g' (d + dv) e   2 (ring - 1) messages
    dK and dV        ring S e' / e                                  2 ring messages

    where queries circulate in the backward
    Q, dO, two numbers per row    (ring - 1) n hp b a' ((d + dv) e + 2 f)    4 (ring - 1) messages
    dQ                            ring n hp b a' d e'                        ring messages

Where hp does not divide a and g, a rank sends to each other rank the heads of that rank's share on
the way to heads, and those of its own share on the way to tokens.

Under a window or with packed documents, of which ranks see little of one another's blocks, K and V
take the rows that are seen instead of blocks, and dK and dV as many (``MaskPlan.rows_used``).

The head exchange moves q, k, v and out forward, and dO, dQ, dK and dV backward.
"""

from dataclasses import dataclass
from typing import Literal

from ..communication.all_to_all import even_shares, serving_shares
from ..softmax.ring_attention import backward_bytes


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
    moves: Literal["auto", "keys", "queries"] = "auto",
    place: int = 0,
) -> AttentionTraffic:
    """What one rank sends in one forward, or one backward, of 2D attention.

    Args:
        tokens: on this rank.
        width, value_width: of keys and queries, and of values.
        element_bytes, gradient_bytes: per element of the inputs, and of gradients in the ring.
        moves: what circulates in the backward.
        place: of the rank in its head group.
    """
    queries = even_shares(query_heads, head_parallel)
    keys = serving_shares(queries, query_heads, key_heads)
    both = width + value_width

    def to_heads(query_width: int, key_width: int) -> int:
        others = [other for other in range(head_parallel) if other != place]
        return sum(len(queries[o]) * query_width + len(keys[o]) * key_width for o in others)

    def to_tokens(query_width: int, key_width: int) -> int:
        own = len(queries[place]) * query_width + len(keys[place]) * key_width
        return (head_parallel - 1) * own

    if backward:
        exchanged = to_heads(value_width, 0) + to_tokens(width, both)
    else:
        exchanged = to_heads(width, both) + to_tokens(value_width, 0)
    rows = tokens * head_parallel * batch
    rows_of_queries, rows_of_keys = rows * len(queries[place]), rows * len(keys[place])
    hops, row_bytes = ring - 1, 8 if element_bytes == 8 else 4
    of_keys, of_queries = backward_bytes(
        ring,
        queries=rows_of_queries,
        keys=rows_of_keys,
        width=width,
        value_width=value_width,
        element_bytes=element_bytes,
        row_bytes=row_bytes,
        gradient_bytes=gradient_bytes,
    )
    blocks = Traffic(2 * hops, hops * rows_of_keys * both * element_bytes)
    gradients = Traffic(0, 0)
    if backward and ring > 1:
        if moves == "queries" or (moves == "auto" and of_queries < of_keys):
            blocks = Traffic(
                4 * hops, hops * rows_of_queries * (both * element_bytes + 2 * row_bytes)
            )
            gradients = Traffic(ring, ring * rows_of_queries * width * gradient_bytes)
        else:
            gradients = Traffic(2 * ring, ring * rows_of_keys * both * gradient_bytes)
    return AttentionTraffic(
        head_exchange=Traffic(8 * (head_parallel - 1), tokens * batch * exchanged * element_bytes),
        ring_blocks=blocks,
        ring_gradients=gradients,
    )
