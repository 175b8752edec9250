"""Megatron's linear layers, which also give away their shard.

METP computes with the shards of all ranks and must *call* the module that owns a weight instead of
reading its ``.weight``: Megatron's DDP waits for the gathering of updated parameters in the forward
hook of that module. Who reads the attribute bare computes with, and sends to its neighbours, the
weights of the step before.
"""

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


class ColumnShardLinear(ColumnParallelLinear):
    """Column-parallel; called without an input it returns (weight, bias) of this rank's shard.

    Weight ``[out / p, in]``, bias ``[out / p]`` or None. With an input it is Megatron's layer.
    """

    def forward(  # type: ignore[override]
        self,
        input_: Tensor | None = None,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's forward, or the shard."""
        if input_ is None:
            return self.weight, self.bias
        return super().forward(input_, weight, runtime_gather_output)


class RowShardLinear(RowParallelLinear):
    """Row-parallel; called without an input it returns (weight, bias) of this rank's shard.

    Weight ``[out, in / p]``; the bias ``[out]`` is replicated, or None. With an input it is
    Megatron's layer.
    """

    def forward(self, input_: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Megatron's forward, or the shard."""
        if input_ is None:
            return self.weight, self.bias
        return super().forward(input_)
