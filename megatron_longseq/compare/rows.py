"""Runs of one model in several layouts, from one set of weights and on the same data."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import UserError
from ..launch import RankPool
from ..launch.training import run_training
from ..measurement.step_records import merge_steps, read_steps
from ..run_config import Value, command_line, known_arguments, load_run

# The first step pays for what is done once (buffers, caches); the last one for the end of the run.
UNTIMED_FIRST_STEPS = 1


class RowFile(BaseModel):
    """One layout in a file of rows."""

    model_config = ConfigDict(extra="forbid")

    label: str
    processes: int = Field(ge=1)
    arguments: dict[str, Value] = Field(default_factory=dict)


class RowsFile(BaseModel):
    """A file of rows, such as ``configs/demo.yaml``."""

    model_config = ConfigDict(extra="forbid")

    rows: list[RowFile] = Field(min_length=1)


@dataclass(frozen=True)
class RowResult:
    """What one layout did.

    Attributes:
        label: the layout, in words.
        processes: ranks.
        losses: mean loss per token of each step.
        tokens_per_second: over the timed steps, by the median step; None if none was timed.
        peak_bytes: largest peak of live tensors of any rank and step.
        bytes_sent: most bytes any rank sent in a step, by group.
    """

    label: str
    processes: int
    losses: list[float]
    tokens_per_second: float | None
    peak_bytes: int
    bytes_sent: dict[str, int]

    def difference_to(self, other: "RowResult") -> float:
        """Largest difference of the loss to another layout's at the same step."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_rows(path: str | Path) -> list[RowFile]:
    """Reads a file of rows; raises :class:`UserError` saying what is wrong with it."""
    try:
        return RowsFile.model_validate(yaml.safe_load(Path(path).read_text())).rows
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise UserError(f"{path}: {error}") from error


class Comparison:
    """Runs rows of one config on forked ranks; every row starts from the same checkpoint.

    Args:
        pool: ranks prepared for Megatron.
        config: the run file that all rows share.
        directory: measurements, logs and the common checkpoint go below it.
        flags: further flags of all rows.
    """

    def __init__(
        self, pool: RankPool, config: str, directory: Path, flags: Sequence[str] = ()
    ) -> None:
        self._pool = pool
        self._config = config
        self._flags = list(flags)
        self._directory = directory
        self._checkpoint = directory / "weights"

    def make_weights(self) -> None:
        """Trains one step in one process and saves: the weights that all rows start from."""
        argv = [
            *self._command_line({}),
            *("--train-iters", "1", "--save", str(self._checkpoint), "--save-interval", "1"),
            *("--no-save-optim", "--no-save-rng"),
        ]
        run_training(
            self._pool,
            argv,
            processes=1,
            foreground=(),
            log_directory=self._directory / "logs" / "weights",
        )

    def run_row(self, row: RowFile, on_start: Callable[[Path], None] | None = None) -> RowResult:
        """Trains one layout and returns what it did.

        Args:
            row: the layout.
            on_start: called with the directory in which rank 0 writes ``rank0.jsonl``, a line a
                step, so that a caller can show progress.
        """
        name = "".join(c if c.isalnum() else "-" for c in row.label.lower())
        steps = self._directory / "steps" / name
        if on_start is not None:
            on_start(steps)
        argv = [
            *self._command_line(row.arguments),
            *("--load", str(self._checkpoint), "--finetune"),
            *("--no-load-optim", "--no-load-rng", "--exit-on-missing-checkpoint"),
            *("--longseq-measure", str(steps)),
        ]
        run_training(
            self._pool,
            argv,
            processes=row.processes,
            foreground=(),
            log_directory=self._directory / "logs" / name,
        )
        return summarise(row, merge_steps(read_steps(steps)))

    def _command_line(self, arguments: dict[str, Value]) -> list[str]:
        given = self._pool.run(_resolve, world_size=1, args=(self._config, arguments))[0]
        return given + self._flags


def summarise(row: RowFile, steps: Sequence[dict[str, Any]]) -> RowResult:
    """From the merged steps of a run to its row."""
    timed = [step for step in steps if step["complete"]][UNTIMED_FIRST_STEPS:]
    speed = statistics.median(s["tokens"] / s["seconds"] for s in timed) if timed else None
    sent: dict[str, int] = {}
    for step in timed:
        for group, count in step["bytes_sent"].items():
            sent[group] = max(sent.get(group, 0), count)
    return RowResult(
        label=row.label,
        processes=row.processes,
        losses=[step["loss"] for step in steps],
        tokens_per_second=speed,
        peak_bytes=max(step["peak_bytes"] for step in steps),
        bytes_sent={group: count for group, count in sorted(sent.items()) if count},
    )


def _resolve(config: str, arguments: dict[str, Value]) -> list[str]:
    parser = known_arguments()
    return load_run(config, parser, command_line(arguments, parser, "row")).argv
