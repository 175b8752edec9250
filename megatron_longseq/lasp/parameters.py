"""Parameters of a linear layer that Megatron has no module for, split over heads or replicated."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from ..split_parameters import device_of, mark_split
from .halo import CausalConvolution


class ShortConvolution(MegatronModule):
    """A depthwise causal convolution of queries, keys and values, without a bias.

    Its ``weight`` is ``[channels / p, 1, w]``, the channels of query, key and value in this order,
    each split over the tensor-parallel ranks by itself.

    Args:
        sections: channels of query, key and value in the whole model.
        convolution: over the context-parallel ranks.
        tp_group: the tensor-parallel group.
    """

    def __init__(
        self,
        config: Any,
        sections: Sequence[int],
        convolution: CausalConvolution,
        *,
        tp_group: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self._convolution = convolution
        self._sections = [size // tp_group.size() for size in sections]
        width = config.linear_conv_kernel_dim
        bound = 1 / math.sqrt(width)  # PyTorch's own, for one input channel
        if config.use_cpu_initialization:
            # Every rank draws the whole and takes its part, as Megatron's linear layers do.
            whole = torch.empty(sum(sections), 1, width).uniform_(-bound, bound)
            ranks, rank = tp_group.size(), tp_group.rank()
            weight = torch.cat([s.chunk(ranks)[rank] for s in whole.split(list(sections))])
        else:
            weight = torch.empty(sum(self._sections), 1, width, device=device_of(config))
            with get_cuda_rng_tracker().fork():
                weight.uniform_(-bound, bound)
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))
        mark_split(self.weight)

    def forward(
        self, x: Tensor, rows: Tensor | None, output_rows: bool
    ) -> tuple[Tensor, Tensor | None]:
        """``[b, n, channels / p]`` to the same, and the last rows if asked for."""
        return self._convolution(
            x, self.weight[:, 0], initial_rows=rows, output_final_rows=output_rows
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight, section by section."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        described = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        key = f"{prefix}weight"
        names = ["query", "key", "value"]
        described[key] = _split_tensor_factory(described[key], self._sections, names, 0)
        return described


class _Down(torch.nn.Module):
    """The first matrix of a product of two: ``[rank, h]``, the same on all ranks."""

    def __init__(self, config: Any, rank: int) -> None:
        super().__init__()
        shape = (rank, config.hidden_size)
        weight = torch.empty(shape, device=device_of(config), dtype=config.params_dtype)
        config.init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        # Under sequence parallelism each rank sees other tokens: Megatron sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


class LowRank(MegatronModule):
    """``W2 W1 x``: W1 whole on every rank, W2 column-parallel, so that ``W1 x`` is all it gathers.

    Args:
        rank: rows of W1.
        up: makes W2 for that rank.
    """

    def __init__(
        self, config: Any, rank: int, up: Callable[[int], torch.nn.Module], *, tp_group: Any
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.down = _Down(config, rank)
        self.up = up(rank)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[n / p, b, h]`` (``[n, b, h]`` without sequence parallelism) to ``[n, b, out / p]``."""
        return self.up(self.down(hidden_states))[0]
