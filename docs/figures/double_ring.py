"""Draws docs/img/double-ring.png: who holds which block at which step, and both placements.

    python docs/figures/double_ring.py

Owners, hops and ranks are asked of the schedule and of the placement the package itself uses, so
the picture changes with the code.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from megatron_longseq.communication import DoubleRing
from megatron_longseq.placement import Grid

OUTPUT = Path(__file__).parents[1] / "img" / "double-ring.png"
RING, WINDOW, NODE = 8, 4, 4
COLOURS = plt.get_cmap("tab20").colors
INK = "#222222"
GRID = Grid(tensor=1, head=2, ring=4)


def draw_steps(axes: Axes) -> None:
    """The block each rank computes with, and where the block goes next."""
    schedule = DoubleRing(WINDOW)
    axes.set_xlim(-1.6, RING + 0.1)
    axes.set_ylim(RING + 0.6, -0.9)
    axes.axis("off")
    axes.set_title(
        "A double ring of 8, windows of 4: blocks of K and V", fontsize=10, loc="left", color=INK
    )
    for step in range(RING):
        axes.text(step + 0.46, -0.2, f"step {step + 1}", ha="center", fontsize=8, color=INK)
    for rank in range(RING):
        y = rank + (0.4 if rank >= NODE else 0)
        axes.text(-0.1, y + 0.4, f"rank {rank}", ha="right", va="center", fontsize=8, color=INK)
        for index, step in enumerate(schedule.steps(rank, RING)):
            colour = COLOURS[2 * step.owner % 20 + step.owner // 10]
            axes.add_patch(Rectangle((index, y), 0.92, 0.8, facecolor=colour, edgecolor="none"))
            goes = " and ".join(f"{hop.lane} to {hop.send_to}" for hop in step.hops)
            axes.text(
                index + 0.46,
                y + 0.4,
                f"KV {step.owner}\n{goes.replace(' and ', chr(10))}",
                ha="center",
                va="center",
                fontsize=6,
                color="white",
            )
    for node in range(RING // NODE):
        top = node * NODE + (0.4 if node else 0)
        axes.text(-1.5, top + NODE / 2, f"node {node}", rotation=90, va="center", fontsize=9)


def draw_placement(axes: Axes, *, context_first: bool) -> None:
    """The physical ranks of two nodes, coloured by head group, numbered by logical place."""
    name = (
        "context-first: a ring on a node" if context_first else "head-first: head groups on a node"
    )
    axes.set_title(name, fontsize=10, loc="left", color=INK)
    axes.set_xlim(-0.2, NODE + 0.1)
    axes.set_ylim(2.4, -0.4)
    axes.axis("off")
    for physical in range(RING):
        logical = GRID.logical(physical) if context_first else physical
        ring_position, place = divmod(logical, GRID.head)
        node, slot = divmod(physical, NODE)
        colour = COLOURS[2 * ring_position]
        axes.add_patch(Rectangle((slot, node * 1.1), 0.92, 0.9, facecolor=colour, edgecolor="none"))
        axes.text(
            slot + 0.46,
            node * 1.1 + 0.45,
            f"head group {ring_position}\nplace {place}\n(rank {logical})",
            ha="center",
            va="center",
            fontsize=7,
            color="white",
        )
    for node in range(RING // NODE):
        axes.text(-0.15, node * 1.1 + 0.45, f"node {node}", rotation=90, va="center", fontsize=8)


def main() -> None:
    """Draws and writes the picture."""
    figure = plt.figure(figsize=(15, 5))
    grid = figure.add_gridspec(2, 2, width_ratios=[1.7, 1])
    draw_steps(figure.add_subplot(grid[:, 0]))
    draw_placement(figure.add_subplot(grid[0, 1]), context_first=False)
    draw_placement(figure.add_subplot(grid[1, 1]), context_first=True)
    figure.tight_layout()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT, dpi=110)
    print(f"written: {OUTPUT}")


if __name__ == "__main__":
    main()
