"""Reads a corpus back as Megatron does."""

import os
from pathlib import Path

import numpy as np

from megatron_longseq.data.tokenizer import quiet_import


def documents_of(prefix: str | Path) -> list[np.ndarray]:
    """Returns the token ids of each document as Megatron's own reader gives them."""
    with quiet_import():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    # One sequence per document, which is what a GPT dataset takes for a document.
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [np.array(dataset[number]) for number in range(len(dataset))]


def files_in(folder: Path) -> set[str]:
    """Returns the names of all files in ``folder``, hidden ones included."""
    return set(os.listdir(folder))
