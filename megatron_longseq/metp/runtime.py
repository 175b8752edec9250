"""What all METP modules of a model share: operators, buffers, the order of tokens, the switch.

Plain PyTorch over process groups; the modules that know Megatron ask it.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.buffers import BufferPool
from ..communication.groups import GroupPlace
from ..communication.ring import Ring
from ..token_layout import zigzag_tokens
from .head_groups import HeadGroupAttention
from .matmul_chain import RingMatmulChain

Path = Literal["METP", "tensor parallel"]


@dataclass(frozen=True)
class MetpGroups:
    """The groups METP communicates on: what overlaps runs on groups of its own.

    Attributes:
        tensor: Megatron's tensor-parallel group.
        weights: its ranks again, for weight shards.
        gradients: its ranks again, for weight gradients.
        kv: the ranks among which the tokens of a sequence are split, tensor parallel x context
            parallel, in zigzag order, for keys and values.
        kv_gradients: the ranks of ``kv`` again, for dK and dV beside the next K and V.
        context: Megatron's context-parallel group; None for one rank.
    """

    tensor: dist.ProcessGroup
    weights: dist.ProcessGroup
    gradients: dist.ProcessGroup
    kv: dist.ProcessGroup
    kv_gradients: dist.ProcessGroup
    context: dist.ProcessGroup | None = None


class MetpRuntime:
    """One per model.

    Args:
        groups: of this rank.
        kernel: ``--longseq-attention-kernel``.
        shards_per_step: weight shards per step of attention's outer loop.
        mlp_tiles: parts in which an MLP works off its rows.
        min_tokens: below so many tokens in the tensor-parallel group (sequence x micro-batch) the
            layers compute as Megatron's tensor parallelism does.
        timeout_seconds: limit of every wait.

    Attributes:
        chosen: how many micro-batches of how many tokens took which path, in training.
    """

    def __init__(
        self,
        groups: MetpGroups,
        *,
        kernel: str = "auto",
        shards_per_step: int = 1,
        mlp_tiles: int = 1,
        min_tokens: int = 0,
        timeout_seconds: float,
    ) -> None:
        self.groups = groups
        self.buffers = BufferPool()
        self.kernel = kernel
        self.shards_per_step = shards_per_step
        self.mlp_tiles = mlp_tiles
        self.min_tokens = min_tokens
        self.place = GroupPlace.of(groups.tensor)
        self.chain = RingMatmulChain(
            groups.weights,
            gradient_group=groups.gradients,
            buffers=self.buffers,
            timeout_seconds=timeout_seconds,
        )
        self.attention = HeadGroupAttention(
            groups.weights,
            groups.kv,
            groups.gradients,
            kv_gradient_group=groups.kv_gradients,
            buffers=self.buffers,
            timeout_seconds=timeout_seconds,
        )
        self.context_ring = Ring(groups.context, self.buffers, timeout_seconds=timeout_seconds)
        # Vocabulary shards pass around on the same groups: the layers are idle then.
        self.vocabulary_ring = self.chain.ring
        self.chosen: Counter[tuple[Path, int]] = Counter()
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._orders: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, _memo: dict[int, Any]) -> "MetpRuntime":
        # Megatron copies specs; groups and buffers are one for all copies.
        return self

    def positions(self, total: int, device: torch.device) -> Tensor:
        """Which of ``total`` tokens of the group this rank holds, in its order: int64."""
        return zigzag_tokens(self.place.position, self.place.size, total).to(device)

    def order(self, total: int, device: torch.device) -> Tensor:
        """Which token stands in each row when the ranks' parts are side by side: ``[total]``."""
        return self._order(total, device)[0]

    def natural(self, total: int, device: torch.device) -> Tensor:
        """Which row of :meth:`order` holds each token, in natural order: ``[total]``."""
        return self._order(total, device)[1]

    def _order(self, total: int, device: torch.device) -> tuple[Tensor, Tensor]:
        known = self._orders.get((total, device))
        if known is None:
            ranks = range(self.place.size)
            parts = [zigzag_tokens(rank, self.place.size, total) for rank in ranks]
            order = torch.cat(parts).to(device)
            # Of the last length only: others are made again when they come.
            self._orders = {(total, device): (order, order.argsort())}
            known = self._orders[total, device]
        return known

    def rotary_rows(self, embedding: Tensor) -> Tensor:
        """The rows of a position embedding ``[s, 1, 1, d]`` that belong to this rank's tokens.

        Kept while the embedding is the same tensor, as it is for all layers of a micro-batch: the
        layers save it for backward, once for all.
        """
        if self._rotary is None or self._rotary[0] is not embedding:
            rows = embedding[self.positions(embedding.shape[0], embedding.device)]
            self._rotary = embedding, rows
        return self._rotary[1]

    def path(self, tokens: int) -> Path:
        """How layers compute a micro-batch of ``tokens`` tokens in the tensor-parallel group.

        A function of the shape alone: all ranks of the group and every recomputation decide alike.
        """
        return "METP" if tokens >= self.min_tokens else "tensor parallel"

    def count(self, tokens: int) -> None:
        """Counts a training micro-batch; the first one of its size and path is announced."""
        chosen = self.path(tokens), tokens
        self.chosen[chosen] += 1
        if self.min_tokens > 0 and self.chosen[chosen] == 1 and dist.get_rank() == 0:
            relation = "at least" if chosen[0] == "METP" else "below"
            print(
                f"METP: micro-batches of {tokens} tokens compute as {chosen[0]} "
                f"({relation} --longseq-metp-min-tokens, {self.min_tokens})",
                flush=True,
            )

    def summary(self) -> str:
        """How many micro-batches took which path so far, for the log."""
        return ", ".join(
            f"{count} micro-batches of {tokens} tokens as {path}"
            for (path, tokens), count in sorted(self.chosen.items())
        )
