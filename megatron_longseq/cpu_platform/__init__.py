"""Lets unmodified Megatron-LM run on a CPU, over gloo.

Megatron asks for CUDA in a few hundred places. On a machine without a GPU this module answers them:

* a :class:`torch.overrides.TorchFunctionMode` over the whole process turns the device ``cuda`` into
  ``cpu`` in every PyTorch call;
* ``torch.cuda`` answers what a single device would, with streams and events that do nothing (on a
  CPU everything is in order), the CPU's random generator, and memory figures that are counted
  exactly from live tensors;
* the few places in Megatron that cannot work without a GPU, Apex or Transformer Engine are
  mended (:meth:`CpuPlatform.mend_megatron`, each with its reason). All of them are contract tests:
  when Megatron repairs one, a test says so.

This is the one place in the package that replaces names in other libraries: :mod:`.cuda` in
PyTorch, :mod:`.mends` in Megatron. It does so only when
asked, before Megatron is imported, and refuses when a GPU is in use; :func:`mend_wheel` alone is
for every device.

With ``double_precision=True`` every ``float32`` that Megatron asks for becomes ``float64``, so that
two layouts can be compared to 1e-10 and better although Megatron casts to ``float32`` by name.
"""

import importlib
import logging
import os
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import UserError
from ..measurement import LiveBytes
from .cuda import OnCpu, Stream, answer_for_cuda
from .mends import mend_megatron, mend_wheel

__all__ = [
    "ARGUMENTS",
    "NEEDS_GPU",
    "CpuPlatform",
    "is_installed",
    "mend_wheel",
    "should_use",
]

# What Megatron must be told on a CPU: option name -> value. The entry point makes them the
# defaults and prints them; a contrary value given by the user is refused.
ARGUMENTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    # Worker processes of the data loader would compete with the ranks for the same cores.
    "num_workers": 0,
}

# Flags of Megatron's that ask a GPU or its driver for something.
NEEDS_GPU = (
    "fp8",
    "fp4",
    "tp_comm_overlap",
    "log_device_memory_used",
    "profile",
    "record_memory_history",
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
    "optimizer_cpu_offload",
    "cpu_offloading_num_layers",
)


class CpuPlatform:
    """Megatron on a CPU; see the module's docstring.

    Args:
        double_precision: compute in ``float64`` wherever Megatron asks for ``float32``.

    Use :meth:`install` before Megatron is imported and :meth:`mend_megatron` after.
    """

    def __init__(self, double_precision: bool = False) -> None:
        self.double_precision = double_precision
        self.live_bytes: LiveBytes | None = None
        self._mode: TorchFunctionMode | None = None

    def install(self) -> None:
        """Makes ``torch.cuda`` answer from the CPU, for the rest of this process.

        Raises:
            UserError: a GPU is in use.
            RuntimeError: Megatron has been imported already and holds the real ``torch.cuda``.
        """
        if torch.cuda.is_initialized():
            raise UserError(
                "--longseq-device cpu: this process already uses a GPU; start a process of its own"
            )
        if "megatron.core.tensor_parallel.random" in sys.modules:
            raise RuntimeError("the CPU platform must be installed before Megatron is imported")
        # Read by Megatron's argument checks; a CPU has one queue, so its value changes nothing.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Says at import that a CUDA toolkit has no driver; on a CPU that is as it should be.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        # Files every function of torch.cuda by identity when it is first imported, which
        # Megatron's import does: it must see the real functions.
        importlib.import_module("torch._dynamo")
        answer_for_cuda(lambda: self.live_bytes)
        # The mode stays entered: this process computes on the CPU until its end.
        self._mode = OnCpu(self.double_precision)
        self._mode.__enter__()
        if self.double_precision:
            torch.set_default_dtype(torch.float64)

    def count_memory(self) -> None:
        """Starts counting live tensors; from here on ``torch.cuda``'s memory figures are exact."""
        if self.live_bytes is None:
            self.live_bytes = LiveBytes()
            self.live_bytes.__enter__()

    def mend_megatron(self) -> None:
        """Replaces the few functions of Megatron that cannot work without a GPU, Apex or TE."""
        mend_megatron()


def is_installed() -> bool:
    """Says whether this process runs under the CPU platform."""
    return torch.cuda.Stream is Stream


def should_use(device: str) -> bool:
    """Decides for ``--longseq-device {auto,cpu,cuda}``.

    Raises:
        UserError: ``cuda`` was asked for and there is none.
    """
    if device == "cpu":
        return True
    if torch.cuda.is_available() and not is_installed():
        return False
    if device == "cuda":
        raise UserError(
            "--longseq-device cuda: PyTorch finds no CUDA device here; "
            "use auto or cpu, or check the driver with nvidia-smi"
        )
    return True
