"""Linear attention on one rank in fused Triton kernels: any decay, no delta rule."""

from .kernel import TritonKernel

__all__ = ["TritonKernel"]
