"""Fixtures shared by all tests: pools that fork ranks from a parent which has imported once."""

import pytest

from megatron_longseq.launch import RankPool


@pytest.fixture(scope="session")
def ranks():
    """A pool whose ranks have torch; for everything that is plain PyTorch."""
    with RankPool() as pool:
        yield pool
