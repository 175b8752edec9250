"""Softmax attention in parts: block kernels, their merge, and the ring that needs both."""

from .aten_kernel import AtenKernel
from .block_kernels import BlockKernel, choose_kernel, kernels
from .mask_plan import Mask, MaskPlan, PackedDocuments
from .online_softmax import OnlineSoftmax, merge_
from .ring_attention import ring_attention, ring_attention_backward, ring_attention_forward

__all__ = [
    "AtenKernel",
    "BlockKernel",
    "Mask",
    "MaskPlan",
    "OnlineSoftmax",
    "PackedDocuments",
    "choose_kernel",
    "kernels",
    "merge_",
    "ring_attention",
    "ring_attention_backward",
    "ring_attention_forward",
]
