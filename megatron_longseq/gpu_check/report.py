"""The result for a reader: lines on the terminal, a Markdown page, JSON."""

import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .rows import BAD, OK, Row

SCHEMA = 1
OPTIONAL = ("triton", "flash-attn")


def describe_device(device: str) -> dict[str, Any]:
    """Versions and the device; run in a process of its own, as it makes a CUDA context."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": platform.processor() or platform.machine(),
    }
    for name in OPTIONAL:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def terminal_lines(rows: Sequence[Row], seconds: float) -> list[str]:
    """One line for a check in which all is well, one more for each row that says something."""
    if not rows:
        return []
    bad = [row for row in rows if row.status in BAD]
    told = [row for row in rows if row.status != OK]
    count = sum(row.status == OK for row in rows)
    how = f"{count} cases equal" if count else ("measured" if not bad else "nothing equal")
    lines = [f"{'WRONG' if bad else 'ok':6}{rows[0].check}: {how} ({seconds:.0f} s)"]
    lines += [f"      {row.status:8}{row.case}: {row.detail}" for row in told]
    return lines


def verdict(rows: Sequence[Row]) -> str:
    """One sentence."""
    bad = [row for row in rows if row.status in BAD]
    if not bad:
        return f"everything agrees: {sum(row.status == OK for row in rows)} cases"
    checks = list(dict.fromkeys(row.check for row in bad))
    return f"{len(bad)} of {len(rows)} cases are off, in: {'; '.join(checks)}"


def as_json(rows: Sequence[Row], facts: Mapping[str, Any], seconds: float) -> str:
    """Everything, as one JSON object."""
    document = {
        "schema": SCHEMA,
        "passed": not any(row.status in BAD for row in rows),
        "verdict": verdict(rows),
        "seconds": round(seconds, 1),
        "date": datetime.date.today().isoformat(),
        "environment": dict(facts),
        "rows": [vars(row) for row in rows],
    }
    return json.dumps(document, indent=2) + "\n"


def as_markdown(rows: Sequence[Row], facts: Mapping[str, Any], seconds: float) -> str:
    """The page kept in docs."""
    shown = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    lines = [
        "# What was checked on a GPU" if facts.get("compute_capability") else "# Checked on a CPU",
        "",
        f"Written by `scripts/gpu_check.sh` on {datetime.date.today().isoformat()}, "
        f"in {seconds:.0f} s: {verdict(rows)}. Run it again with the same command, which needs one "
        "GPU and PyTorch; the numbers are also in the JSON file beside this page.",
        "",
        f"Where: {shown}.",
        "",
        "Errors are the largest difference to attention in fp64, over the largest expected value. "
        "`note` is a fact that nothing relies on; times are medians.",
        "",
        "| check | case | | result |",
        "|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.check, row.case, row.status, row.detail)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(path: Path, text: str) -> None:
    """Writes a file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
