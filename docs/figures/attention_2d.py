"""Draws docs/img/attention-2d.png: who holds and who sends what in 2D attention.

    python docs/figures/attention_2d.py

Everything drawn is asked of the layout, the schedule and the traffic formulas; nothing is drawn by
hand, so the picture changes with the code.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from megatron_longseq.attention_2d import attention_traffic
from megatron_longseq.communication import SingleRing
from megatron_longseq.token_layout import Rectangle as MaskRectangle
from megatron_longseq.token_layout import ZigzagGrid

OUTPUT = Path(__file__).parents[1] / "img" / "attention-2d.png"
GRID = ZigzagGrid(head_parallel=2, ring=3)
PIECES = 2 * GRID.ranks
# One colour per ring position, the lighter one for the second place of its head group.
COLOURS = (("#1f5f99", "#8fbbe0"), ("#a85a00", "#f0bd7c"), ("#2c7a3f", "#98d1a4"))
INK, FAINT = "#222222", "#e9e9e9"


def holder(piece: int) -> tuple[int, int]:
    """(ring position, place) of the rank that holds a piece before the exchange."""
    for rank in range(GRID.ranks):
        if piece in GRID.pieces(rank):
            return divmod(rank, GRID.head_parallel)
    raise AssertionError(f"no rank holds piece {piece}")


def colour(piece: int) -> str:
    position, place = holder(piece)
    return COLOURS[position][place]


def strip(axes: Axes, row: int, pieces: list[int], heights: tuple[float, float]) -> None:
    """The pieces a rank holds, at their place in the sequence; heights: share of the heads."""
    axes.add_patch(Rectangle((0, row), PIECES, 0.86, facecolor=FAINT, edgecolor="none"))
    low, high = heights
    for piece in pieces:
        axes.add_patch(
            Rectangle(
                (piece, row + 0.86 * low),
                1,
                0.86 * (high - low),
                facecolor=colour(piece),
                edgecolor="white",
            )
        )
        axes.text(
            piece + 0.5,
            row + 0.86 * (low + high) / 2,
            str(piece),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if holder(piece)[1] == 0 else INK,
        )


def draw_holdings(axes: Axes, exchanged: bool) -> None:
    """Each rank's pieces, before or after the exchange of tokens for heads."""
    tokens = list(range(PIECES))
    for rank in range(GRID.ranks):
        position, place = divmod(rank, GRID.head_parallel)
        if exchanged:
            share = (1 - (place + 1) / GRID.head_parallel, 1 - place / GRID.head_parallel)
            strip(axes, rank, GRID.block_tokens(position, PIECES).tolist(), share)
        else:
            strip(axes, rank, [tokens[i] for i in GRID.tokens(rank, PIECES).tolist()], (0, 1))
    labels = [
        f"rank {rank}\nposition {rank // GRID.head_parallel}, place {rank % GRID.head_parallel}"
        for rank in range(GRID.ranks)
    ]
    axes.set_yticks([rank + 0.43 for rank in range(GRID.ranks)], labels, fontsize=8)
    axes.set_xlim(0, PIECES)
    axes.set_ylim(GRID.ranks, -0.1)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_xlabel("place in the sequence; height of a box: share of the heads", fontsize=9)
    axes.set_title(
        "2  After the exchange in the head group: the ring's zigzag,\n"
        "two chunks of the sequence, half of the heads"
        if exchanged
        else f"1  Before: Megatron's zigzag, rank i holds pieces i and {PIECES - 1} - i, all heads",
        fontsize=10,
        loc="left",
    )


def draw_ring(outer: Axes) -> None:
    """What each position sees at each step, and where blocks and gradients go."""
    outer.set_axis_off()
    outer.set_title(
        "3  The ring: queries (rows) stay, K and V (columns) pass; numbers are chunks.\n"
        "A block is sent on before it is used, its gradient after, one hop behind",
        fontsize=10,
        loc="left",
    )
    rows, count = 4, GRID.ring
    for position in range(count):
        for index, step in enumerate(SingleRing().steps(position, count)):
            left, bottom = 0.08 + index * 0.32, 0.70 - position * 0.345
            axes = outer.inset_axes((left, bottom, 0.2, 0.23))
            axes.add_patch(Rectangle((0, 0), rows, rows, facecolor=FAINT, edgecolor="none"))
            for part in GRID.block_mask(position, step.owner, rows):
                paint(axes, part, COLOURS[step.owner][0])
            axes.plot((2, 2), (0, 4), color="white", lw=1)
            axes.plot((0, 4), (2, 2), color="white", lw=1)
            axes.set_xlim(0, rows)
            axes.set_ylim(rows, 0)
            axes.set_xticks((1, 3), [str(c) for c in GRID.chunks(step.owner)], fontsize=8)
            axes.set_yticks((1, 3), [str(c) for c in GRID.chunks(position)], fontsize=8)
            axes.tick_params(length=0, pad=1)
            for spine in axes.spines.values():
                spine.set_visible(False)
            axes.set_title(f"step {index + 1}: K, V of position {step.owner}", fontsize=8, pad=3)
            words = [f"K, V to {hop.send_to}" for hop in step.hops]
            if step.gradient_hop is not None:
                words.append(f"dK, dV to {step.gradient_hop.send_to}")
            outer.text(left + 0.1, bottom - 0.055, "; ".join(words), fontsize=8, ha="center")
        outer.text(
            0.0,
            0.815 - position * 0.345,
            f"position {position}",
            fontsize=8,
            rotation=90,
            va="center",
        )


def paint(axes: Axes, part: MaskRectangle, shade: str) -> None:
    """One rectangle of a mask plan: rows are queries, columns keys."""
    queries, keys = part.queries, part.keys
    if part.causal:
        corners = [
            (keys.start, queries.start),
            (keys.start, queries.stop),
            (keys.stop, queries.stop),
        ]
        axes.add_patch(Polygon(corners, facecolor=shade, edgecolor="none"))
        return
    axes.add_patch(
        Rectangle(
            (keys.start, queries.start),
            keys.stop - keys.start,
            queries.stop - queries.start,
            facecolor=shade,
            edgecolor="none",
        )
    )


def draw_traffic(axes: Axes) -> None:
    """What every rank sends to every other in one forward and backward, in multiples of its Q."""
    query = 1.0
    costs = [
        attention_traffic(
            tokens=2,
            batch=1,
            query_heads=6,
            key_heads=6,
            width=1,
            value_width=1,
            head_parallel=GRID.head_parallel,
            ring=GRID.ring,
            element_bytes=1,
            gradient_bytes=2,
            backward=backward,
            moves="keys",
        )
        for backward in (False, True)
    ]
    unit = 2 * 6 * query
    peers = GRID.head_parallel - 1
    exchange = sum(cost.head_exchange.bytes for cost in costs) / unit / peers
    blocks = sum(cost.ring_blocks.bytes for cost in costs) / unit
    gradients = sum(cost.ring_gradients.bytes for cost in costs) / unit
    for sender in range(GRID.ranks):
        position, place = divmod(sender, GRID.head_parallel)
        hop = SingleRing().steps(position, GRID.ring)[0].hops[0]
        after = GRID.rank(hop.send_to, place)
        for receiver in range(GRID.ranks):
            shade = FAINT
            text = ""
            if receiver != sender and receiver // GRID.head_parallel == position:
                shade, text = "#d9c7ea", f"heads\n{exchange:g}"
            if receiver == after:
                shade = COLOURS[position][1]
                text = f"K, V  {blocks:g}\ndK, dV  {gradients:g}"
            axes.add_patch(
                Rectangle((receiver, sender), 0.94, 0.9, facecolor=shade, edgecolor="none")
            )
            axes.text(receiver + 0.47, sender + 0.45, text, ha="center", va="center", fontsize=7)
    names = [str(rank) for rank in range(GRID.ranks)]
    places = [rank + 0.47 for rank in range(GRID.ranks)]
    axes.set_xticks(places, names, fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlim(0, GRID.ranks)
    axes.set_ylim(GRID.ranks, -0.05)
    axes.set_xlabel("receiving rank", fontsize=9)
    axes.set_ylabel("sending rank", fontsize=9)
    axes.set_title(
        "4  Sent per forward and backward, in bytes of a rank's Q\n"
        "(as many K/V heads as query heads, 16-bit, dK and dV in fp32)",
        fontsize=10,
        loc="left",
    )


def main() -> None:
    """Draws the figure."""
    figure, axes = plt.subplots(2, 2, figsize=(14, 10.5), gridspec_kw={"height_ratios": (1, 1.5)})
    draw_holdings(axes[0, 0], exchanged=False)
    draw_holdings(axes[0, 1], exchanged=True)
    draw_ring(axes[1, 0])
    draw_traffic(axes[1, 1])
    for row in axes:
        for panel in row:
            for spine in panel.spines.values():
                spine.set_visible(False)
    figure.suptitle(
        f"2D attention on {GRID.ranks} ranks: head groups of {GRID.head_parallel}, "
        f"rings of {GRID.ring}",
        fontsize=13,
        x=0.02,
        ha="left",
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97), h_pad=2.5, w_pad=2.5)
    OUTPUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUTPUT, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
