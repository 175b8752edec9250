"""Rows as a table for the terminal, a picture, and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from .rows import RowResult, by_model

# Less than this is a count or a norm on its way; the JSON has it.
SHOWN_BYTES = 1024


def summary_table(rows: Sequence[RowResult]) -> Table:
    """One line a layout: loss, difference to the model's first row, speed, memory, traffic."""
    table = Table(title="Layouts, those of a model from the same weights, all on the same data")
    table.add_column("layout")
    table.add_column("ranks", justify="right")
    table.add_column("loss, first → last step")
    table.add_column("largest difference to\nthe model's first row", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("peak bytes of live\ntensors per rank", justify="right")
    table.add_column("bytes sent per step\nby the busiest rank")
    first = {own[0].model: own[0] for own in by_model(rows)}
    for row in rows:
        base = first[row.model]
        speed = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-"
        sent = "\n".join(
            f"{group_name(group)}: {size(count)}"
            for group, count in row.bytes_sent.items()
            if count >= SHOWN_BYTES
        )
        table.add_row(
            row.label,
            str(row.processes),
            f"{row.losses[0]:.5f} → {row.losses[-1]:.5f}",
            f"{row.difference_to(base):.1e}" if row is not base else "",
            speed,
            size(row.peak_bytes),
            sent or "nothing",
        )
    return table


def loss_table(rows: Sequence[RowResult]) -> Table:
    """The loss of each step, one column a layout; of one model's rows."""
    name = rows[0].model
    table = Table(title=f"Loss per step, {name}" if name else "Loss per step")
    table.add_column("step", justify="right")
    for row in rows:
        table.add_column(row.label, justify="right")
    for step, losses in enumerate(zip(*(row.losses for row in rows), strict=True), start=1):
        table.add_row(str(step), *(f"{loss:.6f}" for loss in losses))
    return table


def save_picture(rows: Sequence[RowResult], path: Path) -> None:
    """Draws the loss curves: wide to narrow, so that equal curves show all their colours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, row in enumerate(rows):
        steps = range(1, len(row.losses) + 1)
        width = 2.0 + 2.5 * (len(rows) - 1 - index)
        axes.plot(steps, row.losses, label=row.label, linewidth=width, solid_capstyle="round")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token (nats)")
    axes.set_title("Loss in different layouts, of a model from the same weights and data")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save_json(rows: Sequence[RowResult], path: Path) -> None:
    """Writes the rows with every loss and count."""
    path.write_text(json.dumps({"rows": [row.as_dict() for row in rows]}, indent=2) + "\n")


# Groups whose descriptions say less than what they carry.
_GROUP_NAMES = {
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0": "head exchange",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1": "ring",
    "LONGSEQ_RING_GRADIENTS_GROUP": "ring gradients",
    "DATA_PARALLEL_GROUP_WITH_CP": "data x context",
}


def group_name(description: str) -> str:
    """Megatron's name of a process group for people: ``TENSOR_MODEL_PARALLEL_GROUP``: tensor."""
    if description in _GROUP_NAMES:
        return _GROUP_NAMES[description]
    words = description.lower().split("_")
    return " ".join(word for word in words if word not in ("group", "model", "parallel"))


def size(count: int) -> str:
    """Bytes for people: ``1,234 B``, ``5.6 MiB``."""
    if count < 10_000:
        return f"{count:,} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:,.1f} {unit}"
