"""An encoder of linear attention learns to label every byte of Python source with its token class.

    make example-encoder
    python scripts/label_text.py --ranks 4 --seq-length 16384 --steps 200

Sequence labelling on long real text: the input is raw bytes, thousands at a time, of files of
Python's standard library; the label of a byte is the class of the token it belongs to, by the
``tokenize`` module. Whether a word is code or stands in a docstring depends on quotes far away,
before and behind it, so every layer looks both ways (retention, whose RoPE tells before from
behind) over a sequence that is split over the ranks.

What the ranks run is in ``label_text_training.py``.
"""

import argparse
import io
import json
import keyword
import random
import tempfile
import threading
import time
import tokenize
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from megatron_longseq.data.standard_library import standard_library
from megatron_longseq.launch import RankPool
from megatron_longseq.launch.training import PRELOAD

CLASSES = ("other", "comment", "string", "keyword", "name", "number", "operator")
_OF_TYPE = {
    tokenize.COMMENT: "comment",
    tokenize.STRING: "string",
    tokenize.FSTRING_START: "string",
    tokenize.FSTRING_MIDDLE: "string",
    tokenize.FSTRING_END: "string",
    tokenize.NAME: "name",
    tokenize.NUMBER: "number",
    tokenize.OP: "operator",
}
MODEL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    # So that most frequencies tell neighbours apart: a token class is decided within a word or two.
    "--rotary-base 20 "
    "--longseq-linear-attention retention --untie-embeddings-and-output-weights "
    "--init-method-std 0.12 --tokenizer-type NullTokenizer --vocab-size 256 "
    "--make-vocab-size-divisible-by 8"
)
RUN = (
    "--mock-data --lr 0.005 --min-lr 0.0005 --lr-decay-style cosine --clip-grad 1.0 "
    "--eval-iters 0 --eval-interval 100000 --log-interval 100000 --seed 3"
)


# --- data ---------------------------------------------------------------------------------------


def byte_classes(source: str) -> np.ndarray:
    """The class of every byte of UTF-8 encoded Python source: numbers of :data:`CLASSES`, uint8.

    Raises:
        SyntaxError, tokenize.TokenError: it is not Python.
    """
    lines = source.splitlines(keepends=True)
    starts = np.cumsum([0] + [len(line.encode()) for line in lines])
    found = np.zeros(int(starts[-1]), dtype=np.uint8)

    def place(row: int, column: int) -> int:
        return int(starts[row - 1]) + len(lines[row - 1][:column].encode())

    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = _OF_TYPE.get(token.type)
        if name is None:
            continue
        if name == "name" and keyword.iskeyword(token.string):
            name = "keyword"
        found[place(*token.start) : place(*token.end)] = CLASSES.index(name)
    return found


def labelled_text(paths: Iterable[Path], least: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of these files one after the other, and their classes; stops after ``least`` bytes.

    Files that ``tokenize`` does not accept, or whose lines end otherwise than with a line feed, are
    left out.
    """
    texts: list[np.ndarray] = []
    classes: list[np.ndarray] = []
    count = 0
    for path in paths:
        if count >= least:
            break
        raw = path.read_bytes()
        try:
            source = raw.decode()
            # Of these, Python's lines and those of str.splitlines are not the same.
            if set(source) & set("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"):
                continue
            found = byte_classes(source)
        except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
            continue
        texts.append(np.frombuffer(raw, dtype=np.uint8))
        classes.append(found)
        count += len(raw)
    if count < least:
        raise SystemExit(f"the files hold {count} bytes, and {least} are needed: fewer steps")
    return np.concatenate(texts), np.concatenate(classes)


# --- training -----------------------------------------------------------------------------------


def on_rank(argv: list[str], folder: Path, progress: Path) -> list[dict[str, float]]:
    """See :func:`label_text_training.train_encoder`, whose module needs Megatron."""
    from label_text_training import train_encoder

    return train_encoder(argv, folder, len(CLASSES), progress)


def train(
    pool: RankPool,
    text: np.ndarray,
    classes: np.ndarray,
    *,
    ranks: int,
    seq_length: int,
    batch: int,
    steps: int,
    every: int = 0,
) -> list[dict[str, float]]:
    """Trains an encoder on labelled text; loss and accuracy of each step, of text not seen before.

    Args:
        ranks: that share every sequence.
        seq_length: bytes of a sequence.
        batch: sequences of a step.
        every: so many steps a line is printed; 0 for none.
    """
    flags = (
        f"{MODEL} {RUN} --context-parallel-size {ranks} --seq-length {seq_length} "
        f"--max-position-embeddings {seq_length} --micro-batch-size {batch} "
        f"--global-batch-size {batch} --train-iters {steps}"
    )
    with tempfile.TemporaryDirectory(prefix="longseq-label-text-") as name:
        folder = Path(name)
        np.save(folder / "text.npy", text)
        np.save(folder / "classes.npy", classes)
        progress = folder / "steps.jsonl"
        with StepPrinter(progress, every) if every else nullcontext():
            return pool.run(
                on_rank,
                world_size=ranks,
                args=(flags.split(), folder, progress),
                timeout_seconds=3600.0,
            )[0]


class StepPrinter:
    """While active, prints a line for every so many steps that rank 0 has written to a file.

    A rank's own output is Megatron's log, hundreds of lines long.
    """

    def __init__(self, path: Path, every: int) -> None:
        self._path = path
        self._every = every
        self._printed = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "StepPrinter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._print_new()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            self._print_new()

    def _print_new(self) -> None:
        text = self._path.read_text() if self._path.exists() else ""
        steps = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        while self._printed + self._every <= len(steps):
            last = steps[self._printed : self._printed + self._every]
            self._printed += self._every
            print(f"step {self._printed:4}: {summary(last)}", flush=True)


def summary(steps: list[dict[str, float]]) -> str:
    """Mean loss and accuracy of some steps, in words."""
    loss, accuracy = (sum(step[key] for step in steps) / len(steps) for key in ("loss", "accuracy"))
    return f"loss {loss:.3f}, {accuracy:.1%} of all bytes right"


def majority(classes: np.ndarray) -> tuple[str, float]:
    """The most frequent class and its share: what a model could say without reading."""
    counts = np.bincount(classes, minlength=len(CLASSES))
    return CLASSES[counts.argmax()], float(counts.max() / counts.sum())


def main() -> None:
    """Labels the standard library, trains, and compares with saying the majority class."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="that share every sequence")
    parser.add_argument("--seq-length", type=int, default=8192, help="bytes of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=15, help="steps from line to line")
    options = parser.parse_args()
    started = time.perf_counter()
    paths = [path for source in standard_library().sources for path in source.paths]
    random.Random(1).shuffle(paths)
    text, classes = labelled_text(paths, options.steps * options.batch * options.seq_length)
    name, share = majority(classes)
    print(
        f"{len(text):,} bytes of Python's standard library, labelled in "
        f"{time.perf_counter() - started:.1f} s; {name!r} is the class of {share:.1%} of them\n"
        f"sequences of {options.seq_length} bytes over {options.ranks} ranks",
        flush=True,
    )
    with RankPool(PRELOAD) as pool:
        steps = train(
            pool,
            text,
            classes,
            ranks=options.ranks,
            seq_length=options.seq_length,
            batch=options.batch,
            steps=options.steps,
            every=options.every,
        )
    print(
        f"in the end: {summary(steps[-options.every :])}; always {name!r}: {share:.1%}; "
        f"{time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
