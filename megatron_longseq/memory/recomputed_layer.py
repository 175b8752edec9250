"""Megatron's transformer layer, recomputed in backward but for its attention.

Megatron's block hands a checkpoint a function that runs its layers; between its two runs nothing
tells them apart. So the layer checkpoints itself, with Megatron's own checkpoint, and the block is
told not to.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from .keep_attention import Kept


class RecomputedLayer(TransformerLayer):
    """Keeps its input and what its attention has computed; computes the rest again in backward.

    Args:
        kept_share: of the rows of attention's output that are kept, 0 to 1; 0 recomputes all.
    """

    def __init__(self, *args: Any, kept_share: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept_share = kept_share

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

        function = Kept(run, self.kept_share) if self.kept_share > 0 else run
        return tensor_parallel.checkpoint(
            function, self.config.distribute_saved_activations, hidden_states
        )

    def describe_recompute(self) -> str:
        """For the start-up lines: what is kept."""
        if self.kept_share == 0:
            return "recomputed"
        share = "" if self.kept_share == 1 else f", {self.kept_share:.0%} of its rows"
        return f"recomputed but for its attention{share}"
