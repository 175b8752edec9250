"""A norm that works under sequence parallelism without Apex or Transformer Engine.

Megatron's fallback, ``WrappedTorchNorm``, refuses ``--sequence-parallel`` because a plain PyTorch
norm does not mark its weights: each tensor-parallel rank then sees a different part of the
sequence, and the gradients of the replicated weights must be summed over the group.
"""

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class SequenceParallelNorm(torch.nn.Module):
    """LayerNorm or RMSNorm with weights marked for Megatron's gradient sum.

    Parameter names and shapes (``weight`` and, for LayerNorm, ``bias``, each ``[hidden_size]``)
    are those of PyTorch's and Transformer Engine's norms, so that checkpoints load into either.

    Args:
        config: ``normalization``, ``layernorm_zero_centered_gamma``, ``sequence_parallel`` and
            ``params_dtype`` are read.
        hidden_size: size of the last dimension, which is normalised.
        eps: added to the variance.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused
    ) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise NotImplementedError(
                f"--normalization {config.normalization}: this norm knows LayerNorm and RMSNorm"
            )
        self.shape = (hidden_size,)
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.is_rms = config.normalization == "RMSNorm"
        start = torch.zeros if self.zero_centered else torch.ones
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            start(hidden_size, dtype=config.params_dtype, device=device)
        )
        if self.is_rms:
            self.register_parameter("bias", None)
        else:
            self.bias = torch.nn.Parameter(
                torch.zeros(hidden_size, dtype=config.params_dtype, device=device)
            )
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalises ``[.., hidden_size]`` over its last dimension; returns the weights' dtype."""
        # With --fp32-residual-connection the input is wider than the weights; what follows the
        # norm has the weights' dtype.
        weight = (self.weight + 1 if self.zero_centered else self.weight).to(hidden_states.dtype)
        if self.is_rms:
            out = torch.nn.functional.rms_norm(hidden_states, self.shape, weight, self.eps)
        else:
            bias = self.bias.to(hidden_states.dtype)
            out = torch.nn.functional.layer_norm(hidden_states, self.shape, weight, bias, self.eps)
        return out.to(self.weight.dtype)
