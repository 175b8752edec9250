"""What the Triton kernels share: masked tiles, log decays of a chunk, products.

Every kernel works on one chunk of C tokens of one head and batch entry per program. Letters in
the kernels: q, k ``[C, d]``; v ``[C, e]``; g the log decay of a token, one number or d of them; b
the running sum of g from the chunk's first token; S a state ``[d, e]``. ``DECAY_PER_CHANNEL`` tells
the two forms of g apart at compile time; one number is a single column, so that the formulas are
written once. Each tensor comes with its strides of batch, token and head, ``_b``, ``_n``, ``_h``,
and with ``_r``, how many heads of the output one of its heads serves.

Offsets are 64-bit: batch x tokens x heads x width passes 2^31 in ordinary long-context runs.
"""

import torch
import triton
import triton.language as tl

from ..segments import LEAST_LOG_DECAY

LEAST_FP32 = tl.constexpr(LEAST_LOG_DECAY[torch.float32])
LEAST_FP64 = tl.constexpr(LEAST_LOG_DECAY[torch.float64])


@triton.jit
def place(program, chunks, heads):
    """Batch entry, head and chunk of a program, in 64 bits."""
    program = program.to(tl.int64)
    chunk = program % chunks
    head = (program // chunks) % heads
    return program // chunks // heads, head, chunk


@triton.jit
def part_of(pointer, batch, head, stride_b, stride_h, repeats):
    """Where a tensor's batch entry and head begin; one of its heads serves ``repeats`` in a row."""
    return pointer + batch * stride_b + head // repeats * stride_h


@triton.jit
def load_tile(pointer, stride, rows, row_exists, columns, width, ACC: tl.constexpr):
    """``[rows, columns]`` of a matrix whose columns are adjacent; zeros outside of it."""
    mask = row_exists[:, None] & (columns < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(ACC)


@triton.jit
def store_tile(pointer, stride, rows, row_exists, columns, width, value):
    """Writes ``[rows, columns]``, in the dtype of the buffer."""
    mask = row_exists[:, None] & (columns < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, ACC: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b``, read in ``OPERAND`` and added up in ``ACC``."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def bounded(g, ACC: tl.constexpr):
    """Log decays, none so far below underflow that it would drown what is added to it."""
    if ACC == tl.float64:  # noqa: SIM300
        return tl.where(g < LEAST_FP64, LEAST_FP64, g)
    else:
        return tl.where(g < LEAST_FP32, LEAST_FP32, g)


@triton.jit
def log_decay(
    gates,
    stride,
    rows,
    row_exists,
    columns,
    width,
    ACC: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr,
):
    """b up to and including each row, ``[C, columns]`` or ``[C, 1]``, and its last value.

    Rows that do not exist have g = 0: b of a short last chunk stays at its last token's value.
    """
    if DECAY_PER_CHANNEL:
        g = load_tile(gates, stride, rows, row_exists, columns, width, ACC)
    else:
        g = tl.load(gates + rows.to(tl.int64) * stride, mask=row_exists, other=0.0).to(ACC)
        g = g[:, None]
    g = bounded(g, ACC)
    return tl.cumsum(g, 0), tl.sum(g, 0, keep_dims=True)


@triton.jit
def load_documents(documents, rows, row_exists, HAS_DOCUMENTS: tl.constexpr):
    """Document of each row; a row that does not exist has none. The list starts one token early."""
    if HAS_DOCUMENTS:
        return tl.load(documents + 1 + rows, mask=row_exists, other=-1)
    else:
        return rows


@triton.jit
def in_document(weights, row_documents, documents, token, HAS_DOCUMENTS: tl.constexpr):
    """``weights`` [rows, columns] where the row is of the document of ``token``; else 0.

    ``token`` is counted from the one before the segment: that one is 0, the first is 1.
    """
    if HAS_DOCUMENTS:
        same = row_documents == tl.load(documents + token)
        weights = tl.where(same[:, None], weights, 0.0)
    return weights


@triton.jit
def visible(rows, row_documents, HAS_DOCUMENTS: tl.constexpr):
    """``[C, C]``: token i reads what token j wrote: j is not later, and of the same document."""
    mask = rows[:, None] >= rows[None, :]
    if HAS_DOCUMENTS:
        mask = mask & (row_documents[:, None] == row_documents[None, :])
    return mask
