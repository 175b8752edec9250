"""Parameters of our own layers of which each tensor-parallel rank has a part."""

from typing import Any

import torch
from torch import Tensor


def per_head(config: Any, whole: Tensor, tp_group: Any) -> torch.nn.Parameter:
    """A parameter of which each tensor-parallel rank has the part of its heads.

    Args:
        whole: its first values, ``[heads, ..]`` or ``[heads x width]`` of the whole model.
    """
    part = whole.chunk(tp_group.size())[tp_group.rank()]
    parameter = torch.nn.Parameter(part.to(device_of(config), config.params_dtype, copy=True))
    mark_split(parameter)
    return parameter


def device_of(config: Any) -> Any:
    """Where Megatron makes the weights of a model."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def mark_split(parameter: torch.nn.Parameter) -> None:
    """Tells Megatron that each tensor-parallel rank has another part of it, along dimension 0."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = 0  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
