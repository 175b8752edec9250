"""Draws docs/img/metp.png: one rotation of METP's MLP, one pass of its attention, what is saved.

    python docs/figures/metp.py

Steps and owners are asked of the ring's schedule; nothing of them is drawn by hand, so the picture
changes with the code.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from megatron_longseq.communication import SingleRing

OUTPUT = Path(__file__).parents[1] / "img" / "metp.png"
RANKS = 4
COLOURS = ("#1f5f99", "#a85a00", "#2c7a3f", "#8a3a86")
INK, FAINT = "#222222", "#e9e9e9"
# Saved for backward, in sbh/p bytes of 16-bit activations: content and bytes, per method.
SAVED = {
    "TP + SP": (
        ("norm inputs", 4),
        ("norm outputs", 4),
        ("q, k, v", 6),
        ("attention", 2),
        ("f", 16),
    ),
    "METP": (("norm inputs", 4), ("norm outputs", 4), ("attention", 2)),
    "METP,\nnorm recompute": (("norm inputs", 4), ("attention", 2)),
}
CONTENT_COLOURS = {
    "norm inputs": "#1f5f99",
    "norm outputs": "#8fbbe0",
    "q, k, v": "#a85a00",
    "attention": "#2c7a3f",
    "f": "#bdbdbd",
}


def cell(axes: Axes, x: float, y: float, owner: int, label: str, width: float = 0.92) -> None:
    axes.add_patch(Rectangle((x, y), width, 0.8, facecolor=COLOURS[owner], edgecolor="none"))
    axes.text(x + width / 2, y + 0.4, label, ha="center", va="center", fontsize=8, color="white")


def frame(axes: Axes, columns: float, title: str, bottom: float = 0.0) -> None:
    axes.set_xlim(-1.25, columns)
    axes.set_ylim(RANKS + 0.1, bottom - 0.75)
    axes.axis("off")
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    for rank in range(RANKS):
        axes.text(-0.15, rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=8, color=INK)


def draw_mlp(axes: Axes) -> None:
    """The weight shard each rank works with at each step, and the gradient that follows."""
    frame(axes, RANKS + 1.1, "MLP: a weight shard passes every rank; its gradient follows")
    for step in range(RANKS):
        axes.text(step + 0.46, -0.25, f"step {step + 1}", ha="center", fontsize=8, color=INK)
        for rank in range(RANKS):
            owner = SingleRing().steps(rank, RANKS)[step].owner
            # How many ranks have added their part when this one has: those since the owner.
            parts = (rank - owner) % RANKS + 1
            cell(axes, step, rank, owner, f"W{owner}\ndW{owner}: {parts} of {RANKS}")
    axes.text(RANKS + 0.5, -0.25, "home", ha="center", fontsize=8, color=INK)
    for rank in range(RANKS):
        last = SingleRing().steps(rank, RANKS)[-1]
        home = SingleRing().steps(last.gradient_hop.receive_from, RANKS)[-1].owner
        cell(axes, RANKS + 0.05, rank, home, f"dW{home}")


def draw_attention(axes: Axes) -> None:
    """Outer steps in lock-step, the inner ring of K/V inside each."""
    frame(axes, 2 * RANKS + 1.2, "Attention: one head group on all ranks, its K/V pass every rank")
    for group in range(2):
        left = group * (RANKS + 0.5)
        axes.text(
            left + RANKS / 2,
            -0.3,
            f"head group {group}: weights of rank {group}",
            ha="center",
            fontsize=8,
            color=COLOURS[group],
        )
        for step in range(RANKS):
            for rank in range(RANKS):
                owner = SingleRing().steps(rank, RANKS)[step].owner
                cell(axes, left + step, rank, owner, f"K{owner} V{owner}", 0.9)
    axes.text(2 * RANKS + 0.75, RANKS / 2, "..", fontsize=14, color=INK)


def draw_saved(axes: Axes) -> None:
    """Bytes saved for backward by one layer."""
    for place, content in enumerate(SAVED.values()):
        bottom = 0
        for name, size in content:
            axes.bar(place, size, 0.62, bottom=bottom, color=CONTENT_COLOURS[name], edgecolor="w")
            bottom += size
        axes.text(place, bottom + 0.5, f"{bottom} sbh/p", ha="center", fontsize=8, color=INK)
    for name, colour in CONTENT_COLOURS.items():
        label = "MLP, before and after f" if name == "f" else name
        axes.bar(0, 0, color=colour, label=label)
    axes.set_xticks(range(len(SAVED)), SAVED, fontsize=8)
    axes.set_ylim(0, 36)
    axes.set_yticks([])
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    axes.set_title("Saved for backward, per layer and rank", fontsize=10, loc="left", color=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draws and writes the picture."""
    figure, axes = plt.subplots(
        1, 3, figsize=(17, 3.4), gridspec_kw={"width_ratios": [1.15, 1.75, 0.9]}
    )
    draw_mlp(axes[0])
    draw_attention(axes[1])
    draw_saved(axes[2])
    figure.tight_layout()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT, dpi=110)
    print(f"written: {OUTPUT}")


if __name__ == "__main__":
    main()
