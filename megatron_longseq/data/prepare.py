"""Inputs to a corpus: checks what can be checked first, then reads, tokenises and writes."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_longseq.data.corpus import NOT_LOCAL
from megatron_longseq.data.documents import (
    Document,
    Input,
    JsonLines,
    NotTextError,
    Survey,
)
from megatron_longseq.data.pool import tokenize_in_order
from megatron_longseq.data.sidecar import FORMAT, Sidecar, read_sidecar, sha256_of
from megatron_longseq.data.standard_library import standard_library
from megatron_longseq.data.tokenizer import CorpusTokenizer
from megatron_longseq.data.writer import ENDINGS, CorpusWriter, stale_caches
from megatron_longseq.errors import UserError


@dataclass(frozen=True)
class Plan:
    """What will be read and where it will go; nothing is read or written yet."""

    inputs: Sequence[Input]
    prefix: str
    key: str
    survey: Survey

    @property
    def size(self) -> int:
        """Bytes of all inputs."""
        return sum(source.size for item in self.inputs for source in item.sources)


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus that was written."""

    prefix: str
    sidecar: Sidecar
    longest_name: str
    """Name of the longest document."""
    lengths: np.ndarray
    """Tokens of each document, its end included, [documents], int64."""
    idx_bytes: int
    skipped: Counter[str]
    """What was left out of the inputs, by reason."""


def plan_corpus(
    inputs: Sequence[str], prefix: str, *, key: str | None = None, overwrite: bool = False
) -> Plan:
    """Checks inputs and output as far as it goes without reading or writing; takes no Megatron.

    Args:
        inputs: Files and folders; none means the standard library of the running Python.
        prefix: Path of the corpus without ``.bin``, ``.idx``, ``.json``.
        key: Key of the document in JSON lines; None means ``text``.
        overwrite: Whether a corpus that is there may be replaced.

    Raises:
        UserError: An input or the output can't be used.
    """
    check_output(prefix, overwrite=overwrite)
    folders = {path.parent for path in stale_caches(prefix)}
    own = [Path(f"{prefix}{ending}") for ending in ENDINGS]
    survey = Survey(excluded=[*own, *(path for folder in folders for path in folder.iterdir())])
    found = survey.inputs([Path(name) for name in inputs]) if inputs else [standard_library()]
    if key is not None and not any(_has_json_lines(item) for item in found):
        raise UserError(f"--key {key}: no input is .jsonl or .jsonl.gz; leave it out")
    return Plan(found, prefix, key or "text", survey)


def _has_json_lines(item: Input) -> bool:
    return any(isinstance(source, JsonLines) for source in item.sources)


def check_output(prefix: str, *, overwrite: bool) -> None:
    """Raises :class:`UserError` when a corpus can't be written at ``prefix``."""
    where = f"--output {prefix}"
    if prefix.startswith(NOT_LOCAL):
        raise UserError(f"{where}: must be on a local or mounted disk; copy the files afterwards")
    if prefix.endswith(ENDINGS):
        raise UserError(
            f"{where}: must be without an ending: {os.path.splitext(prefix)[0]} gives .bin, .idx "
            "and .json"
        )
    if os.path.basename(prefix) in ("", ".", ".."):
        example = os.path.join(prefix, "corpus")
        raise UserError(f"{where}: must be the start of file names, not a folder: {example}")
    try:
        _check_places(where, prefix, overwrite)
    except OSError as error:  # a name that is too long, a folder above that can't be entered
        raise UserError(f"{where}: {error.strerror}; choose another prefix") from error


def _check_places(where: str, prefix: str, overwrite: bool) -> None:
    folder = Path(prefix).parent
    if not folder.is_dir():
        raise UserError(f"{where}: there is no folder {folder}; make it first: mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{where}: no permission to write in the folder {folder}")
    existing = [path for path in (Path(prefix + ending) for ending in ENDINGS) if path.exists()]
    for path in existing:
        if not path.is_file():
            raise UserError(f"{where}: {path} is there, and is not a file; choose another prefix")
    if existing and not overwrite:
        names = ", ".join(str(path) for path in existing)
        raise UserError(f"{where}: {names} exists; choose another prefix or give --overwrite")
    foreign = Path(f"{prefix}.json")
    if foreign in existing and not _is_sidecar(foreign):
        raise UserError(
            f"{where}: {foreign} is there and belongs to no corpus; not overwritten, choose "
            "another prefix"
        )


def _is_sidecar(path: Path) -> bool:
    try:
        return read_sidecar(path) is not None
    except UserError:  # damaged or of another version, and the corpus is to be replaced
        return FORMAT.encode() in path.read_bytes()


def write_corpus(
    plan: Plan,
    tokenizer: CorpusTokenizer,
    *,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> PreparedCorpus:
    """Reads, tokenises and writes what ``plan`` says; imports Megatron (seconds).

    Args:
        plan: From :func:`plan_corpus`.
        tokenizer: Gives the ids.
        workers: Processes that tokenise; a tokenizer whose text can stream uses none but this one.
            The corpus is the same for any number.
        progress: Called with the bytes of input done since the last call.

    Raises:
        UserError: An input is damaged or has no text, or the disk is full; nothing is left behind.
    """
    writer = CorpusWriter(plan.prefix, tokenizer.vocab_size, tokenizer.eod)
    try:
        writer.open()
        _write_documents(plan, tokenizer, workers, progress or (lambda size: None), writer)
        sidecar = Sidecar(
            tokenizer_type=tokenizer.tokenizer_type,
            training_flags=list(tokenizer.training_flags),
            tokenizer_sha256={flag: sha256_of(path) for flag, path in tokenizer.files.items()},
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            largest_token=writer.largest,
            documents=len(writer.lengths),
            tokens=writer.tokens,
            longest_document=writer.longest,
            bin_bytes=writer.tokens * writer.itemsize,
            source=[item.name for item in plan.inputs],
        )
        idx_bytes = writer.commit(sidecar)
    except BaseException as error:
        writer.discard()
        if isinstance(error, OSError):  # of writing: of reading, they are UserErrors by now
            raise _write_error(plan, tokenizer, writer, error) from error
        raise
    return PreparedCorpus(
        prefix=plan.prefix,
        sidecar=sidecar,
        longest_name=writer.longest_name,
        lengths=np.array(writer.lengths, dtype=np.int64),
        idx_bytes=idx_bytes,
        skipped=plan.survey.skipped,
    )


def _write_documents(
    plan: Plan,
    tokenizer: CorpusTokenizer,
    workers: int,
    progress: Callable[[int], None],
    writer: CorpusWriter,
) -> None:
    skipped = plan.survey.skipped
    written: Counter[int] = Counter()
    if tokenizer.joins:
        for number, document in _documents(plan):
            try:
                written[number] += writer.add(document.name, map(tokenizer.encode, document.read()))
            except NotTextError as error:
                skipped[error.kind] += 1
            progress(document.size)
    else:
        whole = _whole_texts(plan, progress)
        named = tokenize_in_order(whole, tokenizer.encode, workers, lambda tag: tag[1].name)
        for (number, document), ids in named:
            written[number] += writer.add(document.name, (ids,))
            progress(document.size)
    for number, item in enumerate(plan.inputs):
        if written[number] == 0:
            found = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()))
            raise UserError(
                f"{item.name}: no text in it" + (f" (skipped: {found})" if found else "")
            )


def _documents(plan: Plan) -> Iterator[tuple[int, Document]]:
    for number, item in enumerate(plan.inputs):
        for source in item.sources:
            for document in source.documents(plan.key, plan.survey.skipped):
                yield number, document


def _whole_texts(
    plan: Plan, progress: Callable[[int], None]
) -> Iterator[tuple[tuple[int, Document], bytes]]:
    for number, document in _documents(plan):
        try:
            text = b"".join(document.read())
        except NotTextError as error:
            plan.survey.skipped[error.kind] += 1
            progress(document.size)
            continue
        yield (number, document), text


def _write_error(
    plan: Plan, tokenizer: CorpusTokenizer, writer: CorpusWriter, error: OSError
) -> UserError:
    where = f"--output {plan.prefix}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"{where}: cannot write: {error.strerror or error}; nothing was written")
    needed = writer.tokens * writer.itemsize
    if tokenizer.joins:  # one token per byte; compressed input takes more
        needed = max(needed, plan.size * writer.itemsize)
    free = shutil.disk_usage(Path(plan.prefix).parent).free
    return UserError(
        f"{where}: {error.strerror}: the corpus needs at least {format_bytes(needed)} and "
        f"{Path(plan.prefix).parent} has {format_bytes(free)} free; nothing was written"
    )


def format_bytes(size: int) -> str:
    """Returns ``size`` in bytes as a short text with a decimal unit, such as ``20.5 MB``."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
