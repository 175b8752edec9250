"""Runs of models in several layouts, of each from one set of weights, and on the same data."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import UserError
from ..launch import RankPool
from ..launch.training import run_training
from ..measurement.step_records import merge_steps, read_steps
from ..run_config import Value, command_line, known_arguments, load_run

# The first step pays for what is done once (buffers, caches); the last one for the end of the run.
UNTIMED_FIRST_STEPS = 1


class RowFile(BaseModel):
    """One layout in a file of rows, of the run's own model or of one that the file names."""

    model_config = ConfigDict(extra="forbid")

    label: str
    model: str | None = None
    processes: int = Field(ge=1)
    arguments: dict[str, Value] = Field(default_factory=dict)


class RowsFile(BaseModel):
    """A file of rows, such as ``configs/demo.yaml``."""

    model_config = ConfigDict(extra="forbid")

    models: dict[str, dict[str, Value]] = Field(default_factory=dict)
    rows: list[RowFile] = Field(min_length=1)

    @model_validator(mode="after")
    def _knows_its_models(self) -> "RowsFile":
        for row in self.rows:
            if row.model is not None and row.model not in self.models:
                raise ValueError(
                    f"row {row.label!r}: there is no model {row.model!r}; there are: "
                    f"{', '.join(self.models) or 'none'}"
                )
        return self

    def arguments_of(self, row: RowFile) -> dict[str, Value]:
        """A row's arguments, those of its model included."""
        return {**(self.models[row.model] if row.model else {}), **row.arguments}


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
        model: name of the model in the file of rows; empty for the run's own.
    """

    label: str
    processes: int
    losses: list[float]
    tokens_per_second: float | None
    peak_bytes: int
    bytes_sent: dict[str, int]
    model: str = ""

    def difference_to(self, other: "RowResult") -> float:
        """Largest difference of the loss to another layout's at the same step."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def by_model(results: Sequence[RowResult]) -> list[list[RowResult]]:
    """The rows of each model, in the order in which the models come."""
    models = dict.fromkeys(result.model for result in results)
    return [[result for result in results if result.model == model] for model in models]


def read_rows(path: str | Path) -> RowsFile:
    """Reads a file of rows; raises :class:`UserError` saying what is wrong with it."""
    try:
        return RowsFile.model_validate(yaml.safe_load(Path(path).read_text()))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise UserError(f"{path}: {error}") from error


class Comparison:
    """Runs rows of one config on forked ranks; rows of a model start from the same checkpoint.

    Args:
        pool: ranks prepared for Megatron.
        config: the run file that all rows share.
        rows: the file of rows.
        directory: measurements, logs and the common checkpoint go below it.
        flags: further flags of all rows.
    """

    def __init__(
        self,
        pool: RankPool,
        config: str,
        rows: RowsFile,
        directory: Path,
        flags: Sequence[str] = (),
    ) -> None:
        self._pool = pool
        self._config = config
        self._rows = rows
        self._flags = list(flags)
        self._directory = directory
        self._checkpoint = directory / "weights"

    def make_weights(self, model: str | None = None) -> None:
        """Trains one step in one process and saves: the weights that a model's rows start from."""
        argv = [
            *self._command_line(self._rows.models[model] if model else {}),
            *("--train-iters", "1", "--save", str(self._weights(model)), "--save-interval", "1"),
            *("--no-save-optim", "--no-save-rng"),
        ]
        run_training(
            self._pool,
            argv,
            processes=1,
            foreground=(),
            log_directory=self._directory / "logs" / f"weights-{model or 'of-the-run'}",
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
            *self._command_line(self._rows.arguments_of(row)),
            *("--load", str(self._weights(row.model)), "--finetune"),
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

    def _weights(self, model: str | None) -> Path:
        return self._checkpoint / (model or "of-the-run")

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
        model=row.model or "",
    )


def _resolve(config: str, arguments: dict[str, Value]) -> list[str]:
    parser = known_arguments()
    return load_run(config, parser, command_line(arguments, parser, "row")).argv
