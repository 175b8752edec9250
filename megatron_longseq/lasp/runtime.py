"""What all linear layers of a model share, and what one passes on to the next tokens.

Plain PyTorch over process groups; the layers that know Megatron ask it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..communication.scan import Scan
from ..token_layout import Layout
from .chunk_kernels import choose_kernel
from .halo import CausalConvolution
from .linear_attention import LinearAttentionOperator
from .presets import Preset, wide
from .segments import Segments


class LinearState(NamedTuple):
    """What a linear layer knows of all tokens before the next one.

    Attributes:
        recurrent: ``[b, heads / p, d, e]`` in fp32 (fp64 for fp64); one more column with a
            denominator.
        rows: ``[b, w - 1, channels / p]``, the last inputs of the convolution; ``None`` without.
    """

    recurrent: Tensor
    rows: Tensor | None


@dataclass
class Passage:
    """States that enter the layers of a model with some tokens, and those they leave behind.

    Attributes:
        entering: by layer number; none for a layer: zeros.
        first_token: place of the first of these tokens in their sequence.
        leaving: filled by the layers.
    """

    entering: dict[int, LinearState]
    first_token: int
    leaving: dict[int, LinearState] = field(default_factory=dict)


class LinearRuntime:
    """What all linear layers of a model share: preset, operator, convolution, buffers.

    Args:
        group: the context-parallel ranks; ``None`` for one.
        preset: of the model.
        layout, schedule, backend: see :class:`.linear_attention.LinearAttentionOperator`.
        node_size: consecutive ranks of the group on one node; ``None`` if all are.
        timeout_seconds: limit of every wait.

    Raises:
        UserError: the schedule does not fit the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        preset: Preset,
        *,
        layout: Layout = "zigzag",
        schedule: Any = "auto",
        backend: str = "auto",
        node_size: int | None = None,
        timeout_seconds: float,
    ) -> None:
        self.preset = preset
        self.backend = backend
        # All ranks have read the same flags: comparing shapes, or looking at decays, at every call
        # of every layer would stop a GPU each time.
        scan = Scan(
            group,
            layout=layout,
            schedule=schedule,
            node_size=node_size,
            timeout_seconds=timeout_seconds,
            check_agreement=False,
        )
        self.operator = LinearAttentionOperator(
            group,
            layout=layout,
            backend=backend,
            scan=scan,
            timeout_seconds=timeout_seconds,
            check_agreement=False,
            check_values=False,
        )
        self.convolution = CausalConvolution(group, layout=layout, timeout_seconds=timeout_seconds)
        self.timeout_seconds = timeout_seconds
        # Set while a model's forward runs that continues other tokens: see `carrying`.
        self.passage: Passage | None = None

    @contextmanager
    def carrying(self, passage: Passage) -> Iterator[Passage]:
        """While it lasts, layers start from the passage's states and leave theirs in it.

        Between Megatron's model and its layers there is no other way for them: what a layer is
        given is fixed by Megatron's blocks.
        """
        before, self.passage = self.passage, passage
        try:
            yield passage
        finally:
            self.passage = before

    def __deepcopy__(self, _memo: dict[int, Any]) -> "LinearRuntime":
        # Megatron copies specs; groups and buffers are one for all copies.
        return self

    def kernel(self, key_width: int, value_width: int, like: Tensor) -> str:
        """The name of the kernel that works on heads of such widths, of the dtype of ``like``."""
        key = like.new_zeros(1, 1, 1, 1, key_width)
        value = like.new_zeros(1, 1, 1, 1, value_width)
        gate, preset = wide(key[..., 0]), self.preset
        decay = None if preset.decay == "none" else wide(key) if preset.per_channel else gate
        segments = Segments(key, key, value, decay, gate if preset.beta else None)
        return choose_kernel(self.backend, segments).name


def follow_positions(model: Any, runtime: LinearRuntime) -> None:
    """Lets the rotary embedding of Megatron's model begin where the passage under way begins."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None:
        rotary.register_forward_pre_hook(_Offset(runtime), with_kwargs=True)


class _Offset:
    """A forward hook of Megatron's rotary embedding: the position of its first row."""

    def __init__(self, runtime: LinearRuntime) -> None:
        self.runtime = runtime

    def __call__(self, _module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        passage = self.runtime.passage
        if passage is None or not passage.first_token:
            return args, kwargs
        return args, {**kwargs, "offset": passage.first_token}
