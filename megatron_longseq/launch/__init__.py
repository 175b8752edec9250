"""Starting ranks: one parent that imports once and forks (CPU), or torchrun."""

from .pool import RankFailure, RankPool
from .torchrun import torchrun_command

__all__ = ["RankFailure", "RankPool", "torchrun_command"]
