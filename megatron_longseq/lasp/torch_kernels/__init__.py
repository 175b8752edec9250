"""Linear attention on one rank in plain torch: any gate, dtype and device."""

from .kernel import TorchKernel

__all__ = ["TorchKernel"]
