"""States of a segment, chunk by chunk: what each chunk writes, and the decayed sum of it."""

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
)


@triton.jit
def written_states_kernel(
    keys, keys_b, keys_n, keys_h, keys_r,
    values, values_b, values_n, values_h, values_r,
    gates, gates_b, gates_n, gates_h, gates_r,
    documents,
    out,
    tokens, heads, chunks,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TILE_D: tl.constexpr, TILE_E: tl.constexpr,
    SCALE: tl.constexpr, TO_START: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of ``SCALE (weight * keys)^T values`` of one chunk, ``out`` [B, H, chunks, d, e].

    The weight carries a row to the chunk's last token, exp(b_C - b), or, ``TO_START``, from the
    state before the chunk, exp(b): X of keys and values; Y of queries and output gradients.
    """
    batch, head, chunk = place(tl.program_id(0), chunks, heads)
    rows = chunk * C + tl.arange(0, C)
    exists = rows < tokens
    tiles_e: tl.constexpr = (E + TILE_E - 1) // TILE_E
    d = (tl.program_id(1) // tiles_e) * TILE_D + tl.arange(0, TILE_D)
    e = (tl.program_id(1) % tiles_e) * TILE_E + tl.arange(0, TILE_E)

    keys = part_of(keys, batch, head, keys_b, keys_h, keys_r)
    values = part_of(values, batch, head, values_b, values_h, values_r)
    gates = part_of(gates, batch, head, gates_b, gates_h, gates_r)
    if HAS_DOCUMENTS:
        documents += batch * (tokens + 1)
    k = load_tile(keys, keys_n, rows, exists, d, D, ACC) * SCALE
    v = load_tile(values, values_n, rows, exists, e, E, ACC)
    b, b_last = log_decay(gates, gates_n, rows, exists, d, D, ACC, DECAY_PER_CHANNEL)
    row_documents = load_documents(documents, rows, exists, HAS_DOCUMENTS)
    if TO_START:
        weight = in_document(tl.exp(b), row_documents, documents, chunk * C, HAS_DOCUMENTS)
    else:
        last = tl.minimum(chunk * C + C, tokens)
        weight = in_document(tl.exp(b_last - b), row_documents, documents, last, HAS_DOCUMENTS)
    x = dot(tl.trans(weight * k), v, ACC, OPERAND, PRECISION)
    out += tl.program_id(0).to(tl.int64) * D * E
    store_tile(out, E, d, d < D, e, E, x)


@triton.jit
def carry_states_kernel(
    states, transitions, initial, final, chunks,
    D: tl.constexpr, E: tl.constexpr, TILE_D: tl.constexpr, TILE_E: tl.constexpr,
    REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, DECAY_PER_CHANNEL: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Turns what each chunk writes into the state before it, one tile of one head, in place.

    S_{n+1} = A_n S_n + X_n from ``initial`` [B, H, d, e] (0 if there is none): ``states``
    [B, H, chunks, d, e] holds X on entry and S on return; ``final`` [B, H, d, e] is the state
    after the last chunk. ``REVERSE`` runs from the last chunk to the first: gradients of states.
    ``transitions`` is A, [B, H, chunks] or [B, H, chunks, d].
    """
    bh = tl.program_id(0).to(tl.int64)
    tiles_e: tl.constexpr = (E + TILE_E - 1) // TILE_E
    d = (tl.program_id(1) // tiles_e) * TILE_D + tl.arange(0, TILE_D)
    e = (tl.program_id(1) % tiles_e) * TILE_E + tl.arange(0, TILE_E)
    if HAS_INITIAL:
        state = load_tile(initial + bh * D * E, E, d, d < D, e, E, ACC)
    else:
        state = tl.zeros([TILE_D, TILE_E], dtype=ACC)
    for step in range(0, chunks):
        chunk = bh * chunks + (chunks - 1 - step if REVERSE else step)
        x = load_tile(states + chunk * D * E, E, d, d < D, e, E, ACC)
        store_tile(states + chunk * D * E, E, d, d < D, e, E, state)
        if DECAY_PER_CHANNEL:
            a = tl.load(transitions + chunk * D + d, mask=d < D, other=0.0).to(ACC)
            state = a[:, None] * state + x
        else:
            state = tl.load(transitions + chunk).to(ACC) * state + x
    store_tile(final + bh * D * E, E, d, d < D, e, E, state)


@triton.jit
def add_product_kernel(
    inputs, inputs_b, inputs_n, inputs_h, inputs_r,
    matrix, matrix_row, matrix_column,
    gates, gates_b, gates_n, gates_h, gates_r,
    offsets, documents,
    out, out_b, out_n, out_h,
    other, other_b, other_n, other_h, other_r,
    reached,
    tokens, heads, chunks,
    C: tl.constexpr, D: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TILE_IN: tl.constexpr, TILE_OUT: tl.constexpr,
    SCALE: tl.constexpr, TO_START: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, HAS_OTHER: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out += SCALE (weight * inputs) @ matrix``, or of ``weight * (inputs @ matrix)``; one chunk.

    The terms by which a segment's incoming state, and the gradient of its outgoing one, reach its
    tokens. ``matrix`` [B, H, d, e] is given with its strides, so that it may be read transposed;
    the weight belongs to the side that is d wide. It carries a token to the segment's first
    (``TO_START``) or last one: exp(offset + b) or exp(offset + b_C - b), ``offsets`` [B, H, chunks]
    or [B, H, chunks, d] being the log decay between the chunk and that end.
    With ``HAS_OTHER``: ``reached`` [B, tokens, H] or [B, tokens, H, d] is what was added
    times ``other``, summed over d in the first form.
    """
    batch, head, chunk = place(tl.program_id(0), chunks, heads)
    rows = chunk * C + tl.arange(0, C)
    exists = rows < tokens
    inputs = part_of(inputs, batch, head, inputs_b, inputs_h, inputs_r)
    gates = part_of(gates, batch, head, gates_b, gates_h, gates_r)
    out = part_of(out, batch, head, out_b, out_h, 1)
    state = batch * (heads // gates_r) + head // gates_r
    matrix += state * IN * OUT
    offsets += (state * chunks + chunk) * (D if DECAY_PER_CHANNEL else 1)
    if HAS_DOCUMENTS:
        documents += batch * (tokens + 1)
    row_documents = load_documents(documents, rows, exists, HAS_DOCUMENTS)
    reached_rows = tl.zeros([C], dtype=ACC)

    for o in range(0, OUT, TILE_OUT):
        columns = o + tl.arange(0, TILE_OUT)
        total = tl.zeros([C, TILE_OUT], dtype=ACC)
        for i in range(0, IN, TILE_IN):
            inner = i + tl.arange(0, TILE_IN)
            x = load_tile(inputs, inputs_n, rows, exists, inner, IN, ACC)
            if WEIGHT_ON_INPUT:
                weight = segment_weight(
                    gates, gates_n, offsets, documents, row_documents, rows, exists, inner,
                    tokens, D, TO_START, DECAY_PER_CHANNEL, HAS_DOCUMENTS, ACC,
                )  # fmt: skip
                x = weight * x
            mask = (inner < IN)[:, None] & (columns < OUT)[None, :]
            places = inner.to(tl.int64)[:, None] * matrix_row + columns[None, :] * matrix_column
            m = tl.load(matrix + places, mask=mask, other=0.0).to(ACC)
            total += dot(x, m, ACC, OPERAND, PRECISION) * SCALE
        if not WEIGHT_ON_INPUT:
            weight = segment_weight(
                gates, gates_n, offsets, documents, row_documents, rows, exists, columns,
                tokens, D, TO_START, DECAY_PER_CHANNEL, HAS_DOCUMENTS, ACC,
            )  # fmt: skip
            total = weight * total
        if HAS_OTHER:
            base = part_of(other, batch, head, other_b, other_h, other_r)
            change = total * load_tile(base, other_n, rows, exists, columns, OUT, ACC)
            if DECAY_PER_CHANNEL:
                base = reached + (batch * tokens * heads + head) * D
                store_tile(base, heads * D, rows, exists, columns, D, change)
            else:
                reached_rows += tl.sum(change, 1)
        total += load_tile(out, out_n, rows, exists, columns, OUT, ACC)
        store_tile(out, out_n, rows, exists, columns, OUT, total)
    if HAS_OTHER and not DECAY_PER_CHANNEL:
        tl.store(reached + (batch * tokens + rows) * heads + head, reached_rows, mask=exists)


@triton.jit
def segment_weight(
    gates, gates_n, offsets, documents, row_documents, rows, exists, columns,
    tokens,
    D: tl.constexpr, TO_START: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Decay between each row and the segment's first or last token; 0 in other documents."""
    b, b_last = log_decay(gates, gates_n, rows, exists, columns, D, ACC, DECAY_PER_CHANNEL)
    if DECAY_PER_CHANNEL:
        offset = tl.load(offsets + columns, mask=columns < D, other=0.0).to(ACC)[None, :]
    else:
        offset = tl.load(offsets).to(ACC)
    if TO_START:
        weight = in_document(tl.exp(offset + b), row_documents, documents, 0, HAS_DOCUMENTS)
    else:
        weight = tl.exp(offset + b_last - b)
        weight = in_document(weight, row_documents, documents, tokens, HAS_DOCUMENTS)
    return weight
