"""Parts of a corpus are computed as Megatron computes them."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_longseq.data.splits import smallest_part, split_bounds, suggested_split
from megatron_longseq.data.tokenizer import quiet_import
from megatron_longseq.errors import UserError

weight = st.sampled_from(["0", "0.5", ".1", "1", "3", "7", "30", "90", "969"])


@settings(deadline=None)
@given(weights=st.lists(weight, min_size=1, max_size=3), sequences=st.integers(1, 100_000))
def test_bounds_are_megatrons(weights: list[str], sequences: int) -> None:
    assume(any(float(number) for number in weights))
    with quiet_import():
        from megatron.core.datasets.blended_megatron_dataset_config import (
            convert_split_vector_to_split_matrix,
            parse_and_normalize_split,
        )
    split = ", ".join(weights)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    expected = [
        part and tuple(round(share * float(sequences)) for share in part) for part in matrix
    ]
    assert split_bounds(split, sequences) == expected


@pytest.mark.parametrize("split", ["", "0,0,0", "1,2,3,4", "a,b", "1..2"])
def test_a_split_that_is_none_is_refused(split: str) -> None:
    with pytest.raises(UserError, match=r"--split .*up to three weights"):
        split_bounds(split, 10)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=300), tokens=st.integers(1, 500))
def test_a_suggested_split_gives_each_part_its_tokens(lengths: list[int], tokens: int) -> None:
    sizes = np.array(lengths)
    split = suggested_split(sizes, tokens)
    if split is None:
        assert sizes.sum() < tokens
    else:
        assert smallest_part(split, sizes) >= tokens


def test_a_corpus_of_one_document_is_for_training_alone() -> None:
    assert suggested_split(np.array([1000]), 10) == "100,0,0"
