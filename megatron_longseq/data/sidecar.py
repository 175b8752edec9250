"""``PREFIX.json``: what a corpus holds and which tokenizer made it.

Megatron's own files say neither. With the sidecar, a training run can refuse tokenizer flags that
do not fit the corpus instead of learning from ids that mean something else.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_longseq.errors import UserError

FORMAT = "megatron_longseq corpus"
VERSION = 1


@dataclass(frozen=True)
class Sidecar:
    """The facts in ``PREFIX.json``."""

    tokenizer_type: str
    """Value of Megatron's ``--tokenizer-type``."""
    training_flags: Sequence[str]
    """Megatron's flags that build the tokenizer of the corpus, as given when it was made."""
    tokenizer_sha256: Mapping[str, str]
    """SHA-256 of each file that defines the tokenizer, by its flag."""
    vocab_size: int
    """Number of ids, before padding."""
    eod: int
    """Id at the end of each document."""
    largest_token: int
    """Largest id in the corpus."""
    documents: int
    tokens: int
    """All tokens, one end of document per document included."""
    longest_document: int
    """Tokens of the longest document, its end included."""
    bin_bytes: int
    """Size of ``PREFIX.bin``."""
    source: Sequence[str]
    """The inputs."""


def write_sidecar(path: Path, sidecar: Sidecar) -> None:
    """Writes ``sidecar`` to ``path``."""
    content = {"format": FORMAT, "version": VERSION, **asdict(sidecar)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_sidecar(path: Path) -> Sidecar | None:
    """Returns the sidecar at ``path``, or None where there is none: no file, or another's JSON.

    Raises:
        UserError: The file is damaged, or of a newer version than this package reads.
    """
    remedy = "prepare the corpus again, or delete the file to train without this check"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise UserError(
            f"{path}: version {content.get('version')!r} of the format, and this package reads "
            f"version {VERSION}; {remedy}"
        )
    missing = [item.name for item in fields(Sidecar) if item.name not in content]
    if missing:
        raise UserError(f"{path}: damaged, without {', '.join(missing)}; {remedy}")
    values: dict[str, Any] = {item.name: content[item.name] for item in fields(Sidecar)}
    for item in fields(Sidecar):
        if item.type is int and type(values[item.name]) is not int:
            raise UserError(
                f"{path}: damaged, {item.name} is {values[item.name]!r} and not a whole number; "
                f"{remedy}"
            )
    return Sidecar(**values)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of the file at ``path``, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
