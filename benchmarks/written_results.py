"""The file that every benchmark leaves: what it ran on, its figures, and the rows behind them."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch


def write_results(path: Path, figures: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes JSON, one row a line, and says where."""
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = f'"machine": {json.dumps(machine)},\n "figures": {json.dumps(figures, indent=2)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{{head} "rows": [\n  {lines}\n ]}}\n')
    print(f"\nwritten: {path}")
