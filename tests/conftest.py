"""Fixtures shared by all tests: pools that fork ranks from a parent which has imported once."""

from pathlib import Path

import pytest

from megatron_longseq.launch import RankPool
from megatron_longseq.launch.training import PRELOAD, PRELOAD_DOUBLE_PRECISION


@pytest.fixture(scope="session")
def ranks():
    """A pool whose ranks have torch; for everything that is plain PyTorch."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def megatron_ranks():
    """A pool whose ranks have Megatron under the CPU platform."""
    with RankPool(preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="session")
def megatron_ranks_fp64():
    """As ``megatron_ranks``, with every float32 of Megatron's turned into float64."""
    with RankPool(preload=PRELOAD_DOUBLE_PRECISION) as pool:
        yield pool


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Prefix of a corpus of real text: the source code of the running Python's ``json``."""
    import json

    from megatron_longseq.cli import main

    prefix = tmp_path_factory.mktemp("corpus") / "json"
    assert main(["prepare-data", str(Path(json.__file__).parent), "--output", str(prefix)]) == 0
    return prefix
