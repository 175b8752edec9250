"""Outputs of a segment from a zero start, and their gradients: one program per chunk and head.

    O = P V + exp(b) * Q S,   P = (Q K^T) o exp(b_i - b_j) for i >= j

S being the state before the chunk, of :mod:`.states`. With a decay per channel P does not factor
into two matrices; it and the gradients through it come from :mod:`.channel_scores`.
"""

import triton
import triton.language as tl

from .tiles import (
    dot,
    in_document,
    load_documents,
    load_tile,
    log_decay,
    part_of,
    place,
    store_tile,
    visible,
)


@triton.jit
def masked_decay(b, rows, row_documents, HAS_DOCUMENTS: tl.constexpr):
    """``[C, C]`` exp(b_i - b_j) where token i reads token j, else 0; b is ``[C, 1]``."""
    mask = visible(rows, row_documents, HAS_DOCUMENTS)
    # Masked before the exponential: above the diagonal it may overflow.
    return tl.where(mask, tl.exp(tl.where(mask, b - tl.trans(b), 0.0)), 0.0)


@triton.jit
def intra_kernel(
    queries, queries_b, queries_n, queries_h, queries_r,
    keys, keys_b, keys_n, keys_h, keys_r,
    values, values_b, values_n, values_h, values_r,
    gates, gates_b, gates_n, gates_h, gates_r,
    scores, states, documents,
    out,
    tokens, heads, chunks,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TILE_D: tl.constexpr, TILE_E: tl.constexpr, SCALE: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out`` [B, tokens, heads, e] of the given states [B, heads / gates_r, chunks, d, e]."""
    batch, head, chunk = place(tl.program_id(0), chunks, heads)
    program = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, C)
    rows = chunk * C + span
    exists = rows < tokens
    queries = part_of(queries, batch, head, queries_b, queries_h, queries_r)
    keys = part_of(keys, batch, head, keys_b, keys_h, keys_r)
    values = part_of(values, batch, head, values_b, values_h, values_r)
    gates = part_of(gates, batch, head, gates_b, gates_h, gates_r)
    states += ((batch * heads + head) // gates_r * chunks + chunk) * D * E
    if HAS_DOCUMENTS:
        documents += batch * (tokens + 1)
    out += (batch * tokens * heads + head) * E
    row_documents = load_documents(documents, rows, exists, HAS_DOCUMENTS)

    if DECAY_PER_CHANNEL:
        p = load_tile(scores + program * C * C, C, span, span < C, span, C, ACC)
        p = tl.where(visible(rows, row_documents, HAS_DOCUMENTS), p, 0.0)
    else:
        p = tl.zeros([C, C], dtype=ACC)
        for i in range(0, D, TILE_D):
            d = i + tl.arange(0, TILE_D)
            q = load_tile(queries, queries_n, rows, exists, d, D, ACC) * SCALE
            k = load_tile(keys, keys_n, rows, exists, d, D, ACC)
            p += dot(q, tl.trans(k), ACC, OPERAND, PRECISION)
        b, _ = log_decay(gates, gates_n, rows, exists, span, D, ACC, False)
        p *= masked_decay(b, rows, row_documents, HAS_DOCUMENTS)

    for j in range(0, E, TILE_E):
        e = j + tl.arange(0, TILE_E)
        v = load_tile(values, values_n, rows, exists, e, E, ACC)
        o = dot(p, v, ACC, OPERAND, PRECISION)
        for i in range(0, D, TILE_D):
            d = i + tl.arange(0, TILE_D)
            b, _ = log_decay(gates, gates_n, rows, exists, d, D, ACC, DECAY_PER_CHANNEL)
            read = in_document(tl.exp(b), row_documents, documents, chunk * C, HAS_DOCUMENTS)
            q = load_tile(queries, queries_n, rows, exists, d, D, ACC) * SCALE
            s = load_tile(states, E, d, d < D, e, E, ACC)
            o += dot(read * q, s, ACC, OPERAND, PRECISION)
        store_tile(out, heads * E, rows, exists, e, E, o)


@triton.jit
def intra_backward_kernel(
    queries, queries_b, queries_n, queries_h, queries_r,
    keys, keys_b, keys_n, keys_h, keys_r,
    values, values_b, values_n, values_h, values_r,
    gates, gates_b, gates_n, gates_h, gates_r,
    out_gradient, out_gradient_b, out_gradient_n, out_gradient_h, out_gradient_r,
    scores, query_terms, key_terms, states, state_gradients, documents,
    query_gradient, key_gradient, value_gradient, decay_gradient,
    tokens, heads, chunks,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TILE_D: tl.constexpr, TILE_E: tl.constexpr, SCALE: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, v, and ``decay_gradient``, that of b (without the boundary term).

    ``states`` are those before each chunk, ``state_gradients`` the gradients of those after it,
    both [B, heads / gates_r, chunks, d, e]; gradients are per head of the output. With a decay per
    channel ``scores`` is P, [B, heads, chunks, C, C], and ``query_terms``, ``key_terms``
    [B, tokens, heads, d] are what reaches q and k through it.
    """
    batch, head, chunk = place(tl.program_id(0), chunks, heads)
    program = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, C)
    rows = chunk * C + span
    exists = rows < tokens
    queries = part_of(queries, batch, head, queries_b, queries_h, queries_r)
    keys = part_of(keys, batch, head, keys_b, keys_h, keys_r)
    values = part_of(values, batch, head, values_b, values_h, values_r)
    gates = part_of(gates, batch, head, gates_b, gates_h, gates_r)
    out_gradient = part_of(
        out_gradient, batch, head, out_gradient_b, out_gradient_h, out_gradient_r
    )
    state = (batch * heads + head) // gates_r * chunks + chunk
    states += state * D * E
    state_gradients += state * D * E
    if HAS_DOCUMENTS:
        documents += batch * (tokens + 1)
    first = batch * tokens * heads + head
    row_documents = load_documents(documents, rows, exists, HAS_DOCUMENTS)
    last = tl.minimum(chunk * C + C, tokens)

    p = tl.zeros([C, C], dtype=ACC)
    dp = tl.zeros([C, C], dtype=ACC)
    if DECAY_PER_CHANNEL:
        p = load_tile(scores + program * C * C, C, span, span < C, span, C, ACC)
        p = tl.where(visible(rows, row_documents, HAS_DOCUMENTS), p, 0.0)
    else:
        for i in range(0, D, TILE_D):
            d = i + tl.arange(0, TILE_D)
            q = load_tile(queries, queries_n, rows, exists, d, D, ACC) * SCALE
            k = load_tile(keys, keys_n, rows, exists, d, D, ACC)
            p += dot(q, tl.trans(k), ACC, OPERAND, PRECISION)
        for j in range(0, E, TILE_E):
            e = j + tl.arange(0, TILE_E)
            do = load_tile(out_gradient, out_gradient_n, rows, exists, e, E, ACC)
            v = load_tile(values, values_n, rows, exists, e, E, ACC)
            dp += dot(do, tl.trans(v), ACC, OPERAND, PRECISION)
        b, _ = log_decay(gates, gates_n, rows, exists, span, D, ACC, False)
        decay = masked_decay(b, rows, row_documents, HAS_DOCUMENTS)
        p *= decay
        dp *= decay

    db = tl.zeros([C], dtype=ACC)
    for i in range(0, D, TILE_D):
        d = i + tl.arange(0, TILE_D)
        q = load_tile(queries, queries_n, rows, exists, d, D, ACC) * SCALE
        k = load_tile(keys, keys_n, rows, exists, d, D, ACC)
        b, b_last = log_decay(gates, gates_n, rows, exists, d, D, ACC, DECAY_PER_CHANNEL)
        read = in_document(tl.exp(b), row_documents, documents, chunk * C, HAS_DOCUMENTS)
        write = in_document(tl.exp(b_last - b), row_documents, documents, last, HAS_DOCUMENTS)
        dq = tl.zeros([C, TILE_D], dtype=ACC)
        dk = tl.zeros([C, TILE_D], dtype=ACC)
        for j in range(0, E, TILE_E):
            e = j + tl.arange(0, TILE_E)
            do = load_tile(out_gradient, out_gradient_n, rows, exists, e, E, ACC)
            v = load_tile(values, values_n, rows, exists, e, E, ACC)
            s = load_tile(states, E, d, d < D, e, E, ACC)
            ds = load_tile(state_gradients, E, d, d < D, e, E, ACC)
            dq += dot(do, tl.trans(s), ACC, OPERAND, PRECISION)
            dk += dot(v, tl.trans(ds), ACC, OPERAND, PRECISION)
        dq *= read
        # Added up over the heads that share a state; each of them brings its part.
        dk *= write / gates_r
        if DECAY_PER_CHANNEL:
            dq += load_tile(query_terms + first * D, heads * D, rows, exists, d, D, ACC)
            dk += load_tile(key_terms + first * D, heads * D, rows, exists, d, D, ACC)
            change = q * dq - k * dk
            store_tile(decay_gradient + first * D, heads * D, rows, exists, d, D, change)
        else:
            dq += dot(dp, k, ACC, OPERAND, PRECISION)
            dk += dot(tl.trans(dp), q, ACC, OPERAND, PRECISION)
            db += tl.sum(q * dq - k * dk, 1)
        store_tile(query_gradient + first * D, heads * D, rows, exists, d, D, dq * SCALE)
        store_tile(key_gradient + first * D, heads * D, rows, exists, d, D, dk)
    if not DECAY_PER_CHANNEL:
        tl.store(decay_gradient + first + rows * heads, db, mask=exists)

    for j in range(0, E, TILE_E):
        e = j + tl.arange(0, TILE_E)
        do = load_tile(out_gradient, out_gradient_n, rows, exists, e, E, ACC)
        dv = dot(tl.trans(p), do, ACC, OPERAND, PRECISION)
        for i in range(0, D, TILE_D):
            d = i + tl.arange(0, TILE_D)
            k = load_tile(keys, keys_n, rows, exists, d, D, ACC)
            b, b_last = log_decay(gates, gates_n, rows, exists, d, D, ACC, DECAY_PER_CHANNEL)
            write = in_document(tl.exp(b_last - b), row_documents, documents, last, HAS_DOCUMENTS)
            ds = load_tile(state_gradients, E, d, d < D, e, E, ACC)
            dv += dot(write * k / gates_r, ds, ACC, OPERAND, PRECISION)
        store_tile(value_gradient + first * E, heads * E, rows, exists, e, E, dv)
