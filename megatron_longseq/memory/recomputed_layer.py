"""Megatron's transformer layer, recomputed in backward but for its attention.

Megatron's block hands a checkpoint a function that runs its layers; between its two runs nothing
tells them apart. So the layer checkpoints itself, with Megatron's own checkpoint, and the block is
told not to.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from .keep_attention import Kept
from .offload import HostStore


class RecomputedLayer(TransformerLayer):
    """Keeps its input and what its attention has computed; computes the rest again in backward.

    Args:
        kept_share: of the rows of attention's output that are kept, 0 to 1; 0 recomputes all.
        offload: keeps them in host memory, with those of the other layers; ``None``: on the GPU.
    """

    def __init__(
        self, *args: Any, kept_share: float, offload: "LayerOffload | None" = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.kept_share = kept_share
        self.offload = offload

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As Megatron's; in evaluation it is Megatron's."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(hidden_states, *args, **kwargs)
        if not hidden_states.requires_grad:
            # Behind frozen weights a checkpoint sees nothing to differentiate, and the layer's own
            # weights would go without.
            hidden_states = hidden_states.detach().requires_grad_()
        forward = super().forward

        def run(hidden: Tensor) -> tuple[Any, Any]:
            return forward(hidden, *args, **kwargs)

        function: Any = run
        if self.kept_share > 0 and self.offload is not None:
            function = self.offload.kept(run, self.kept_share)
        elif self.kept_share > 0:
            function = Kept(run, self.kept_share)
        return tensor_parallel.checkpoint(
            function, self.config.distribute_saved_activations, hidden_states
        )

    def describe_recompute(self) -> str:
        """For the start-up lines: what is kept."""
        if self.kept_share == 0:
            return "recomputed"
        share = "" if self.kept_share == 1 else f", {self.kept_share:.0%} of its rows"
        where = "" if self.offload is None else ", kept in host memory"
        return f"recomputed but for its attention{share}{where}"


class LayerOffload:
    """The host memory of a model's layers, and the order in which they have kept."""

    def __init__(self) -> None:
        self.store = HostStore()
        self._last: weakref.ref[Kept] | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "LayerOffload":
        # Megatron copies specs; the layers share one.
        return self

    def kept(self, function: Callable[..., Any], share: float) -> Kept:
        """The function of one call of a checkpoint, after that of the layer before."""
        before = None if self._last is None else self._last()
        kept = Kept(function, share, store=self.store, before=before)
        self._last = weakref.ref(kept)
        return kept
