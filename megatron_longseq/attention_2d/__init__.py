"""2D attention: head exchange in the head group, a ring of keys and values between groups."""

from .attention import TwoDAttention, two_d_attention
from .changes import Dropout
from .traffic import AttentionTraffic, Traffic, attention_traffic

__all__ = [
    "AttentionTraffic",
    "Dropout",
    "Traffic",
    "TwoDAttention",
    "attention_traffic",
    "two_d_attention",
]
