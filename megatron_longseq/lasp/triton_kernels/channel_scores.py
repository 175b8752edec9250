"""The triangle inside a chunk when each channel has a decay of its own.

    P_ij = sum_m q_im k_jm exp(b_im - b_jm),   i >= j

One factor per side would need exp(-b), which overflows over a long run of strong decay. So a chunk
is cut into blocks of ``BLOCK`` tokens. Between a block of queries and an earlier block of keys
stands a token r, the last one before the queries: (q exp(b_i - b_r)) . (k exp(b_r - b_j)), both
factors at most 1. Inside one block it is done element by element, a column at a time.
"""

import triton
import triton.language as tl

from .tiles import (
    bounded,
    dot,
    load_documents,
    load_tile,
    log_decay,
    part_of,
    place,
    store_tile,
    visible,
)


@triton.jit
def block_rows(chunk, block, tokens, C: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a block of a chunk, and which of them exist."""
    rows = chunk * C + block * BLOCK + tl.arange(0, BLOCK)
    return rows, rows < tokens


@triton.jit
def one_row(tile, row, BLOCK: tl.constexpr):
    """Row ``row`` of a tile, ``[1, columns]``."""
    return tl.sum(tl.where((tl.arange(0, BLOCK) == row)[:, None], tile, 0.0), 0, keep_dims=True)


@triton.jit
def scores_kernel(
    queries, queries_b, queries_n, queries_h, queries_r,
    keys, keys_b, keys_n, keys_h, keys_r,
    gates, gates_b, gates_n, gates_h, gates_r,
    scores,
    tokens, heads, chunks,
    C: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr, BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One [BLOCK, BLOCK] block of P, ``scores`` [B, H, chunks, C, C]; zeros above the diagonal.

    Documents are not looked at: P is at most |q||k| across them too, and whoever reads it masks it.
    """
    batch, head, chunk = place(tl.program_id(0), chunks, heads)
    blocks: tl.constexpr = C // BLOCK
    query_block = tl.program_id(1) // blocks
    key_block = tl.program_id(1) % blocks
    queries = part_of(queries, batch, head, queries_b, queries_h, queries_r)
    keys = part_of(keys, batch, head, keys_b, keys_h, keys_r)
    gates = part_of(gates, batch, head, gates_b, gates_h, gates_r)
    span = tl.arange(0, BLOCK)
    rows, exists = block_rows(chunk, query_block, tokens, C, BLOCK)
    key_rows, key_exists = block_rows(chunk, key_block, tokens, C, BLOCK)

    p = tl.zeros([BLOCK, BLOCK], dtype=ACC)
    if key_block <= query_block:
        for i in range(0, D, TILE_D):
            d = i + tl.arange(0, TILE_D)
            q = load_tile(queries, queries_n, rows, exists, d, D, ACC) * SCALE
            k = load_tile(keys, keys_n, key_rows, key_exists, d, D, ACC)
            b, _ = log_decay(gates, gates_n, rows, exists, d, D, ACC, True)
            if key_block < query_block:
                kb, kb_last = log_decay(gates, gates_n, key_rows, key_exists, d, D, ACC, True)
                between = tl.zeros([1, TILE_D], dtype=ACC)
                for block in range(key_block + 1, query_block):
                    mid_rows, mid_exists = block_rows(chunk, block, tokens, C, BLOCK)
                    g = load_tile(gates, gates_n, mid_rows, mid_exists, d, D, ACC)
                    between += tl.sum(bounded(g, ACC), 0, keep_dims=True)
                k *= tl.exp(kb_last - kb + between)
                p += dot(q * tl.exp(b), tl.trans(k), ACC, OPERAND, PRECISION)
            else:
                for j in range(0, BLOCK):
                    # Rows before j are masked; the minimum keeps them from overflowing until then.
                    decay = tl.exp(tl.minimum(b - one_row(b, j, BLOCK), 0.0))
                    column = tl.sum(q * one_row(k, j, BLOCK) * decay, 1)
                    column = tl.where(span >= j, column, 0.0)
                    p += tl.where((span == j)[None, :], column[:, None], 0.0)
    scores += tl.program_id(0).to(tl.int64) * C * C + query_block * BLOCK * C
    columns = key_block * BLOCK + span
    store_tile(scores, C, span, span < BLOCK, columns, C, p)


@triton.jit
def score_gradients_kernel(
    out_gradient, out_gradient_b, out_gradient_n, out_gradient_h, out_gradient_r,
    values, values_b, values_n, values_h, values_r,
    documents, score_gradients,
    tokens, heads, chunks,
    C: tl.constexpr, E: tl.constexpr, TILE_E: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dP = dO V^T where token i reads token j, else 0: [B, H, chunks, C, C]."""
    batch, head, chunk = place(tl.program_id(0), chunks, heads)
    span = tl.arange(0, C)
    rows = chunk * C + span
    exists = rows < tokens
    out_gradient = part_of(
        out_gradient, batch, head, out_gradient_b, out_gradient_h, out_gradient_r
    )
    values = part_of(values, batch, head, values_b, values_h, values_r)
    dp = tl.zeros([C, C], dtype=ACC)
    for j in range(0, E, TILE_E):
        e = j + tl.arange(0, TILE_E)
        do = load_tile(out_gradient, out_gradient_n, rows, exists, e, E, ACC)
        v = load_tile(values, values_n, rows, exists, e, E, ACC)
        dp += dot(do, tl.trans(v), ACC, OPERAND, PRECISION)
    if HAS_DOCUMENTS:
        documents += batch * (tokens + 1)
    row_documents = load_documents(documents, rows, exists, HAS_DOCUMENTS)
    dp = tl.where(visible(rows, row_documents, HAS_DOCUMENTS), dp, 0.0)
    store_tile(
        score_gradients + tl.program_id(0).to(tl.int64) * C * C, C, span, span < C, span, C, dp
    )


@triton.jit
def scores_backward_kernel(
    queries, queries_b, queries_n, queries_h, queries_r,
    keys, keys_b, keys_n, keys_h, keys_r,
    gates, gates_b, gates_n, gates_h, gates_r,
    score_gradients, query_terms, key_terms,
    tokens, heads, chunks,
    C: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr, BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What reaches ``SCALE q`` and k of one block through P: [B, tokens, H, d], one tile of d."""
    batch, head, chunk = place(tl.program_id(0), chunks, heads)
    blocks: tl.constexpr = C // BLOCK
    own = tl.program_id(1) % blocks
    d = (tl.program_id(1) // blocks) * TILE_D + tl.arange(0, TILE_D)
    queries = part_of(queries, batch, head, queries_b, queries_h, queries_r)
    keys = part_of(keys, batch, head, keys_b, keys_h, keys_r)
    gates = part_of(gates, batch, head, gates_b, gates_h, gates_r)
    score_gradients += tl.program_id(0).to(tl.int64) * C * C
    span = tl.arange(0, BLOCK)
    rows, exists = block_rows(chunk, own, tokens, C, BLOCK)
    own_span = own * BLOCK + span
    b, b_last = log_decay(gates, gates_n, rows, exists, d, D, ACC, True)

    # Queries of this block, keys of earlier ones, from the nearest to the first.
    dq = tl.zeros([BLOCK, TILE_D], dtype=ACC)
    between = tl.zeros([1, TILE_D], dtype=ACC)
    for step in range(0, own):
        block = own - 1 - step
        key_rows, key_exists = block_rows(chunk, block, tokens, C, BLOCK)
        k = load_tile(keys, keys_n, key_rows, key_exists, d, D, ACC)
        kb, kb_last = log_decay(gates, gates_n, key_rows, key_exists, d, D, ACC, True)
        dp = load_tile(score_gradients, C, own_span, own_span < C, block * BLOCK + span, C, ACC)
        dq += dot(dp, k * tl.exp(kb_last - kb + between), ACC, OPERAND, PRECISION)
        between += kb_last
    dq *= tl.exp(b)

    # Keys of this block, queries of later ones.
    dk = tl.zeros([BLOCK, TILE_D], dtype=ACC)
    between = tl.zeros([1, TILE_D], dtype=ACC)
    for block in range(own + 1, blocks):
        query_rows, query_exists = block_rows(chunk, block, tokens, C, BLOCK)
        q = load_tile(queries, queries_n, query_rows, query_exists, d, D, ACC) * SCALE
        qb, qb_last = log_decay(gates, gates_n, query_rows, query_exists, d, D, ACC, True)
        block_span = block * BLOCK + span
        dp = load_tile(score_gradients, C, block_span, block_span < C, own_span, C, ACC)
        dk += dot(tl.trans(dp), q * tl.exp(qb + between), ACC, OPERAND, PRECISION)
        between += qb_last
    dk *= tl.exp(b_last - b)

    # Both in this block: dP is 0 above the diagonal, where the minimum keeps exp finite.
    q = load_tile(queries, queries_n, rows, exists, d, D, ACC) * SCALE
    k = load_tile(keys, keys_n, rows, exists, d, D, ACC)
    dp = load_tile(score_gradients, C, own_span, own_span < C, own_span, C, ACC)
    for j in range(0, BLOCK):
        b_j = one_row(b, j, BLOCK)
        column = tl.sum(tl.where((span == j)[None, :], dp, 0.0), 1, keep_dims=True)
        dq += column * one_row(k, j, BLOCK) * tl.exp(tl.minimum(b - b_j, 0.0))
        row = tl.trans(one_row(dp, j, BLOCK))
        dk += row * one_row(q, j, BLOCK) * tl.exp(tl.minimum(b_j - b, 0.0))

    first = (batch * tokens * heads + head) * D
    store_tile(query_terms + first, heads * D, rows, exists, d, D, dq)
    store_tile(key_terms + first, heads * D, rows, exists, d, D, dk)
