"""Linear attention over a sequence split across ranks (LASP, LASP-2, ZeCO)."""

from .decode import decode
from .linear_attention import LinearAttentionOperator, linear_attention
from .recurrence import Affine

__all__ = ["Affine", "LinearAttentionOperator", "decode", "linear_attention"]
