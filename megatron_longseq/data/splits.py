"""How Megatron divides a corpus into train, valid and test: by whole sequences, not by tokens."""

import re
from itertools import pairwise

import numpy as np

from megatron_longseq.errors import UserError

SPLIT_NAMES = ("train", "valid", "test")
SUGGESTED_SPLITS = ("98,1,1", "95,3,2", "90,5,5", "80,10,10", "60,20,20", "34,33,33")
TRAIN_ONLY = "100,0,0"


def split_bounds(split: str, sequences: int) -> list[tuple[int, int] | None]:
    """Returns which sequences Megatron puts in train, valid and test.

    Args:
        split: The value of ``--split``: up to three weights.
        sequences: Number of sequences in the corpus.

    Returns:
        First sequence and the one after the last, of each part; None for a part of weight 0.

    Raises:
        UserError: ``split`` is not up to three weights, or all are 0.
    """
    try:
        weights = [float(number) for number in re.findall(r"[.0-9]+", split)]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or sum(weights) <= 0:
        raise UserError(f"--split {split}: must be up to three weights, such as 98,1,1")
    shares = np.array(weights + [0.0] * (3 - len(weights)))
    shares /= shares.sum()
    # Megatron adds the shares up one by one and rounds half to even; so does this.
    ends = [0.0]
    for share in shares.tolist():
        ends.append(ends[-1] + share)
    return [
        (round(first * sequences), round(last * sequences)) if last > first else None
        for first, last in pairwise(ends)
    ]


def smallest_part(split: str, lengths: np.ndarray) -> int:
    """Returns the tokens of the smallest part that ``split`` makes of ``lengths`` [sequences]."""
    bounds = split_bounds(split, lengths.size)
    return min(int(lengths[part[0] : part[1]].sum(dtype=np.int64)) for part in bounds if part)


def suggested_split(lengths: np.ndarray, tokens_per_part: int) -> str | None:
    """Returns a value of ``--split`` that gives each part ``tokens_per_part`` tokens, or None.

    Parts are made of whole documents, so a split by percent may leave a part empty. Tries
    splits with small parts for validation and test first, and to go without them last.
    """
    for split in (*SUGGESTED_SPLITS, TRAIN_ONLY):
        if smallest_part(split, lengths) >= tokens_per_part:
            return split
    return None
