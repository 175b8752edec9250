"""What only an import can tell, found out in a process of its own.

``python -m megatron_longseq.environment.probe FD STEP...`` takes the steps in turn and writes one
JSON line before and one after each to the descriptor FD. A package that crashes the interpreter, or
hangs, then costs this process and not the one that asked, which knows which step it was.

No step makes a CUDA context: devices are counted through NVML, and kernels are asked what they
would take, not called. No step makes a process group.
"""

import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")


def main() -> None:
    """Takes the steps named on the command line."""
    channel, steps = int(sys.argv[1]), sys.argv[2:]
    warnings.simplefilter("ignore")
    with open(channel, "w", buffering=1) as answers:
        for step in steps:
            print(json.dumps({"begin": step}), file=answers)
            print(json.dumps({"end": step} | take(step)), file=answers)
    # Exit handlers of a half-imported package have crashed before; nothing here needs them.
    os._exit(0)


def take(step: str) -> dict[str, Any]:
    """``{"facts": ..}`` or ``{"error": first line}``."""
    kind, _, name = step.partition(":")
    try:
        if kind == "import":
            return {"facts": import_facts(name)}
        return {"facts": QUESTIONS[name]()}
    except BaseException as error:  # a package may raise anything at all, SystemExit included
        return {"error": first_line(error)}


def first_line(error: BaseException) -> str:
    """``"ImportError: libcudart.so.12: cannot open shared object file"``."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def import_facts(module: str) -> dict[str, Any]:
    """Imports a module; its version and file."""
    found = importlib.import_module(module)
    version = getattr(found, "__version__", None)
    return {
        "version": version if isinstance(version, str) else None,
        "file": getattr(found, "__file__", None),
    }


def torch_facts() -> dict[str, Any]:
    """What this build of PyTorch was made for and what it sees."""
    import torch
    import torch.distributed as dist

    available = torch.cuda.is_available()
    distributed = dist.is_available()
    nccl = distributed and dist.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cuda_available": available,
        "device_count": torch.cuda.device_count() if available else 0,
        "built_for": torch.cuda.get_arch_list() if available else [],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "gloo": distributed and dist.is_gloo_available(),
    }


def block_kernels() -> dict[str, Any]:
    """For each device and dtype: the kernel ``auto`` takes, and why others are not usable."""
    import torch

    from ..softmax.block_kernels import choose_kernel, kernels

    answers: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        for name in DTYPES:
            dtype, place = getattr(torch, name), torch.device(device)
            answers[f"{device} {name}"] = {
                "auto": choose_kernel("auto", dtype, place).name,
                "unusable": {k.name: k.unusable(dtype, place) for k in kernels().values()},
            }
    return answers


def flash_interface() -> dict[str, Any]:
    """Imports what the flash kernel imports at its first call."""
    return import_facts("flash_attn.flash_attn_interface")


def optimizer() -> dict[str, Any]:
    """Which Adam Megatron takes, by its own order: ``megatron/core/optimizer/__init__.py``."""
    for module in ("transformer_engine.pytorch.optimizers", "apex.optimizers"):
        try:
            if hasattr(importlib.import_module(module), "FusedAdam"):
                return {"module": module}
        except ImportError:
            continue
    return {"module": "torch.optim"}


def norm() -> dict[str, Any]:
    """Which norm Megatron takes, by its own order, for the norm at the end and in local layers.

    ``megatron/core/transformer/transformer_block.py`` and ``models/gpt/gpt_layer_specs.py``. Any
    importable ``apex`` makes them take Apex's norm, whether or not it is NVIDIA's.
    """

    def first(*modules: str) -> str:
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError:
                continue
            return module
        return "torch"

    return {"final": first("transformer_engine", "apex"), "local": first("apex")}


QUESTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    function.__name__: function
    for function in (torch_facts, block_kernels, flash_interface, optimizer, norm)
}

if __name__ == "__main__":
    main()
