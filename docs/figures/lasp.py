"""Draws docs/img/lasp.png: how states travel along the chain of segments in linear attention.

    python docs/figures/lasp.py

Who holds what is asked of the layout, steps and bytes of the formulas of the scan, and the maps of
packed documents of the kernel itself, so the picture changes with the code.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from megatron_longseq.communication.scan import ScanShape, ScheduleName, scan_steps, scan_traffic
from megatron_longseq.lasp.documents import Documents
from megatron_longseq.token_layout import SegmentChain

OUTPUT = Path(__file__).parents[1] / "img" / "lasp.png"
RANKS, BLOCKS = 4, 4
COLOURS = ("#1f5f99", "#a85a00", "#2c7a3f", "#7b3f8c")
INK, FAINT, STATE = "#222222", "#e9e9e9", "#b3202c"
DOCUMENTS, TOKENS = (0, 3, 13, 26, 32), 32


def box(axes: Axes, x: float, y: float, width: float, height: float, shade: str, text: str) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=shade, edgecolor="white", lw=1.5))
    colour = INK if shade == FAINT else "white"
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color=colour, fontsize=8
    )


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            color=STATE,
            lw=1.2,
            shrinkA=0,
            shrinkB=0,
            connectionstyle=f"arc3,rad={bend}",
        )
    )


def draw_chain(axes: Axes) -> None:
    """Segments in order of time, one row per rank, and the states between them."""
    chain = SegmentChain(RANKS, "zigzag")
    for position in range(chain.length):
        rank, _ = chain.holder(position)
        box(axes, position, rank + 0.15, 0.9, 0.6, COLOURS[rank], str(position))
        if position:
            before, _ = chain.holder(position - 1)
            arrow(axes, (position - 0.1, before + 0.45), (position, rank + 0.45))
    axes.set_yticks([r + 0.45 for r in range(RANKS)], [f"rank {r}" for r in range(RANKS)])
    axes.set_xlim(-0.1, chain.length)
    axes.set_ylim(RANKS, 0)
    axes.set_xticks([])
    axes.set_xlabel("place in the sequence")
    axes.set_title(
        f"1  The chain on zigzag: {chain.length} segments, two on each rank.\n"
        "A state (arrow) crosses each boundary; in backward its gradient, the other way",
        loc="left",
        fontsize=10,
    )


def draw_documents(axes: Axes) -> None:
    """What of a state reaches which tokens if documents are packed."""
    chain = SegmentChain(RANKS, "contiguous")
    for rank in range(RANKS):
        (segment,) = chain.ranges(rank, TOKENS)
        starts = Documents.of(DOCUMENTS, chain, rank, TOKENS, torch.device("cpu")).starts
        marks = [] if starts is None else starts[0].nonzero().flatten().tolist()
        head = marks[0] if marks else len(segment)
        tail = marks[-1] if marks else 0
        axes.add_patch(Rectangle((segment.start, 0), len(segment), 1, facecolor=FAINT, lw=0))
        axes.add_patch(
            Rectangle((segment.start, 0.5), head, 0.5, facecolor=COLOURS[rank], alpha=0.8, lw=0)
        )
        axes.add_patch(
            Rectangle(
                (segment.start + tail, 0),
                len(segment) - tail,
                0.5,
                facecolor=COLOURS[rank],
                alpha=0.45,
                lw=0,
            )
        )
        axes.text(
            segment.start + 4, 1.12, f"rank {rank}" + (", A = 0" if marks else ""), ha="center"
        )
        if rank:
            arrow(axes, (segment.start - 0.8, 0.25), (segment.start + 0.8, 0.75), 0.2)
        axes.axvline(segment.start, color="white", lw=3)
    for start in DOCUMENTS[:-1]:
        axes.plot((start, start), (-0.12, 1.0), color=INK, lw=1.5)
        axes.text(start + 0.2, -0.28, f"from {start}", fontsize=8)
    axes.set_xlim(0, TOKENS)
    axes.set_ylim(-0.4, 1.3)
    axes.set_axis_off()
    axes.set_title(
        "2  Packed documents: the head (above, dark) reads the incoming state, the tail (below,\n"
        "pale) is in the outgoing one; a segment in which one starts passes nothing through",
        loc="left",
        fontsize=10,
    )


def draw_schedule(axes: Axes, name: ScheduleName, title: str) -> None:
    """Messages of a scan over contiguous segments, step by step."""
    shape = ScanShape(RANKS, "contiguous", 1, 0, True, blocks=BLOCKS if name == "all_scan" else 1)
    steps = scan_steps(name, shape)
    for rank in range(RANKS):
        axes.plot((0, steps), (rank, rank), color=COLOURS[rank], lw=3, solid_capstyle="butt")
    for step in range(steps):
        for rank in range(RANKS):
            for target in targets(name, step, rank):
                arrow(axes, (step + 0.08, rank), (step + 0.92, target))
    sent = sum(scan_traffic(name, shape, rank).messages for rank in range(RANKS))
    axes.set_title(f"{title}\n{steps} step{'s' * (steps > 1)}, {sent} messages", fontsize=9)
    axes.set_ylim(RANKS - 0.6, -0.4)
    axes.set_yticks(range(RANKS), [str(rank) for rank in range(RANKS)])
    axes.set_xticks([step + 0.5 for step in range(steps)], [str(s + 1) for s in range(steps)])
    axes.tick_params(length=0, labelsize=8)


def targets(name: ScheduleName, step: int, rank: int) -> list[int]:
    """Ranks to which ``rank`` sends in a step of a scan of contiguous segments."""
    if name == "all_gather":
        return [target for target in range(RANKS) if target != rank]
    if name == "log_scan":
        after = rank + (1 << step)
    else:
        after = rank + 1 if 0 <= step - rank < (BLOCKS if name == "all_scan" else 1) else RANKS
    return [after] if after < RANKS else []


def draw_traffic(axes: Axes) -> None:
    """MiB a rank sends per layer and pass; 16 heads of 128, batch 1, 8K tokens per rank."""
    sizes = [2, 4, 8, 16, 32, 64, 128]
    heads, width, tokens, mib = 16, 128, 8192, 2**20
    state = 4 * heads * width * width
    for name, style in (("ring", "o-"), ("log_scan", "s-"), ("all_gather", "^-")):
        worst = [
            max(
                scan_traffic(name, ScanShape(size, "contiguous", state, 4 * heads, True), r).bytes
                for r in range(size)
            )
            for size in sizes
        ]
        label = {"ring": "ring, blocks"}.get(name, name.replace("_", " "))
        axes.plot(sizes, [b / mib for b in worst], style, label=f"states: {label}", ms=4)
    activations = 2 * tokens * heads * width
    exchange = [4 * activations * (p - 1) / p / mib for p in sizes]
    gathered = [2 * activations * (p - 1) / mib for p in sizes]
    axes.plot(sizes, exchange, "--", color="#777777", label="all-to-all of q, k, v, o (bf16)")
    axes.plot(sizes, gathered, ":", color="#777777", label="ring or gather of k, v (bf16)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("ranks")
    axes.set_ylabel("MiB per rank, layer and pass")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(
        "4  Sent by the busiest rank: 16 heads of 128, 8K tokens per rank,\n"
        "constant decay. Only states do not grow with the tokens",
        loc="left",
        fontsize=10,
    )


def main() -> None:
    """Draws the figure."""
    figure, axes = plt.subplots(2, 2, figsize=(14, 9), gridspec_kw={"height_ratios": (1, 1.25)})
    draw_chain(axes[0, 0])
    draw_documents(axes[0, 1])
    outer = axes[1, 0]
    outer.set_axis_off()
    outer.set_title(
        "3  Schedules of the scan (contiguous segments; lines are ranks, arrows messages)",
        loc="left",
        fontsize=10,
    )
    for index, (name, title) in enumerate(
        (
            ("ring", "ring: a state"),
            ("all_scan", f"all_scan: {BLOCKS} blocks of a state"),
            ("log_scan", "log_scan: pairs (A, X)"),
            ("all_gather", "all_gather: pairs (A, X)"),
        )
    ):
        panel = outer.inset_axes((0.04 + index % 2 * 0.5, 0.55 - index // 2 * 0.55, 0.42, 0.32))
        draw_schedule(panel, name, title)
        for spine in panel.spines.values():
            spine.set_visible(False)
    draw_traffic(axes[1, 1])
    for panel in axes.flat[:3]:
        for spine in panel.spines.values():
            spine.set_visible(False)
    figure.suptitle(
        f"Linear attention on {RANKS} ranks: what moves is a state of d x e per head",
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
