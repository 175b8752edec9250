"""What a training step did on one rank, written as one JSON line while the run goes on.

Every rank writes a file of its own, so that measuring adds no communication to what is measured;
:func:`merge_steps` puts the ranks together afterwards. The counters are exact; times are not.
"""

import json
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import NodeError
from .traffic import TrafficCounter


class StepRecorder(AbstractContextManager):
    """Writes ``rank<r>.jsonl`` into a directory: one line per training step.

    A step begins with its first micro-batch and ends when the next one begins; the last one ends
    with the run and has ``complete`` false, because evaluation and checkpoints may be in it.

    Fields of a line: ``iteration``; ``loss_sum`` and ``tokens`` (of the micro-batches whose loss
    this rank computes; null elsewhere); ``seconds``; ``peak_bytes`` (live tensors on a CPU, the
    allocator's peak on a GPU); ``traffic`` (rows of bytes and messages sent).

    Args:
        directory: created if missing.
        rank: global rank of this process.

    Raises:
        NodeError: the directory cannot be made or written.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        self.path = Path(directory) / f"rank{rank}.jsonl"
        self._traffic = TrafficCounter()
        self._iteration: int | None = None
        self._started = 0.0
        self._losses: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> "StepRecorder":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w")
        except OSError as error:
            raise NodeError(
                f"--longseq-measure {self.path.parent}: {error.strerror or error}; "
                "name a directory that can be written"
            ) from error
        self._traffic.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._end_step(complete=False)
        self._traffic.__exit__(*exception)
        self._file.close()

    def begin_micro_batch(self, iteration: int) -> None:
        """Says that a micro-batch of this training step begins."""
        if iteration == self._iteration:
            return
        self._end_step(complete=True)
        self._iteration = iteration
        self._traffic.reset()
        torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def add_loss(self, loss_sum: Tensor, tokens: Tensor, *, counts_once: bool) -> None:
        """Adds a micro-batch's sum of token losses; ``counts_once`` is false on replicas."""
        if counts_once:
            # Copied, because Megatron divides the sum in place; kept as tensors, because reading
            # the numbers now would wait for the device.
            self._losses.append((loss_sum.detach().clone(), tokens.detach().clone()))

    def _end_step(self, *, complete: bool) -> None:
        if self._iteration is None:
            return
        seconds = time.perf_counter() - self._started
        record = {
            "iteration": self._iteration,
            "loss_sum": sum(float(loss) for loss, _ in self._losses) if self._losses else None,
            "tokens": sum(int(count) for _, count in self._losses) if self._losses else None,
            "seconds": seconds,
            "peak_bytes": int(torch.cuda.max_memory_allocated()),
            "traffic": self._traffic.rows(),
            "complete": complete,
        }
        self._losses.clear()
        self._iteration = None
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def read_steps(directory: str | Path) -> list[list[dict[str, Any]]]:
    """The records of every rank, by rank; raises :class:`NodeError` if a rank wrote none."""
    files = sorted(Path(directory).glob("rank*.jsonl"), key=lambda path: int(path.stem[4:]))
    records = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    if not records or not all(records):
        raise NodeError(
            f"{directory}: no steps were recorded there; the run ended before its first"
        )
    return records


def merge_steps(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One record a step over all ranks.

    ``loss`` is the mean over all tokens; ``seconds`` and ``peak_bytes`` the largest of any rank;
    ``bytes_sent`` the largest of any rank, by group.
    """
    merged = []
    for steps in zip(*ranks, strict=True):
        losses = [step for step in steps if step["loss_sum"] is not None]
        tokens = sum(step["tokens"] for step in losses)
        sent: dict[str, int] = defaultdict(int)
        for step in steps:
            own: dict[str, int] = defaultdict(int)
            for row in step["traffic"]:
                own[row["group"]] += row["bytes_sent"]
            for group, count in own.items():
                sent[group] = max(sent[group], count)
        merged.append(
            {
                "iteration": steps[0]["iteration"],
                "loss": sum(step["loss_sum"] for step in losses) / tokens,
                "tokens": tokens,
                "seconds": max(step["seconds"] for step in steps),
                "peak_bytes": max(step["peak_bytes"] for step in steps),
                "bytes_sent": dict(sent),
                "complete": all(step["complete"] for step in steps),
            }
        )
    return merged
