"""What linear attention can work with; everything else stops with the rule and what would work."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ..attention_inputs import check_query_key_value
from ..errors import UserError, divisors, nearest_values
from ..token_layout import SegmentChain
from .chunk_kernels import SUPPORTED_DTYPES
from .segments import LEAST_LOG_DECAY

AXES = ("batch", "tokens", "heads", "width")


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call; see :func:`~megatron_longseq.lasp.linear_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    cu_seqlens: Tensor | Sequence[int] | None = None
    scale: float = 1.0
    normalize: bool = False
    causal: bool = True

    @property
    def sum_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def tensors(self) -> dict[str, Tensor | None]:
        """Those arguments that are tensors or may be, by name, but for ``cu_seqlens``."""
        names = ("query", "key", "value", "log_decay", "beta", "initial_state")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> dict[str, object]:
        """What must be equal on all ranks, by the name it has in an error message."""
        fields: dict[str, object] = {}
        gradients = False
        for name, tensor in self.tensors().items():
            if not isinstance(tensor, Tensor):
                fields[name] = "none" if tensor is None else f"a {type(tensor).__name__}"
                continue
            wanted = torch.is_grad_enabled() and tensor.requires_grad
            gradients |= wanted
            if tensor.dim() == len(AXES) and name in ("query", "key", "value"):
                fields |= {
                    f"{name} {axis}": size for axis, size in zip(AXES, tensor.shape, strict=True)
                }
            else:
                fields[f"{name} shape"] = tuple(tensor.shape)
            fields[f"{name} dtype"] = tensor.dtype
            # A state may come from another call, which made it differentiable on one rank only.
            if name != "initial_state":
                fields[f"{name} requires a gradient"] = wanted
        # All ranks take part in backward, or none.
        fields["some input requires a gradient"] = gradients
        for name in ("output_final_state", "scale", "normalize", "causal"):
            fields[name] = getattr(self, name)
        return fields

    def check(self, chain: SegmentChain, *, values: bool) -> None:
        """Checks all but ``cu_seqlens``, and the numbers in ``log_decay`` only if ``values``.

        Raises:
            UserError: naming the argument, the value, the rule and the nearest values that work.
        """
        for name, tensor in self.tensors().items():
            optional = name not in ("query", "key", "value")
            if not isinstance(tensor, Tensor) and not (optional and tensor is None):
                what = "None" if tensor is None else f"a {type(tensor).__name__}"
                raise UserError(f"{name} is {what}: it must be a tensor{' or None' * optional}")
        self._check_tensors(chain)
        _check_heads(self.query.shape[2], self.key.shape[2], self.value.shape[2])
        _check_gates(self.key, self.value, self.log_decay, self.beta, values)
        if self.initial_state is not None:
            _check_state(self.initial_state, self.key, self.value, self.normalize)
        self._check_modes()

    def _check_tensors(self, chain: SegmentChain) -> None:
        query, key, value = self.query, self.key, self.value
        check_query_key_value(
            query,
            key,
            value,
            rows=("batch", "tokens"),
            dtypes=SUPPORTED_DTYPES,
            operator="linear attention",
        )
        if key.shape[:2] != value.shape[:2]:
            raise UserError(
                f"key of shape {tuple(key.shape)} and value of shape {tuple(value.shape)} must "
                "have the same batch and tokens"
            )
        if key.shape[1] % chain.segments_per_rank:
            tokens = key.shape[1]
            raise UserError(
                f"{tokens} tokens on each rank: the zigzag layout gives a rank two segments of "
                f"equal length, so it must be even; nearest: {[tokens - 1, tokens + 1]}"
            )
        if not isfinite(self.scale):
            raise UserError(f"scale={self.scale} must be a finite number")

    def _check_modes(self) -> None:
        """Which arguments go together."""
        batch = self.query.shape[0]
        if not self.causal and self.beta is not None:
            raise UserError(
                "causal=False with beta: the delta rule depends on the order of the tokens; leave "
                "out beta, or keep causal=True"
            )
        if not self.causal and (self.initial_state is not None or self.output_final_state):
            raise UserError(
                "causal=False with initial_state or output_final_state: without an order there is "
                "no state before or after the sequence"
            )
        if self.normalize and self.beta is not None:
            raise UserError(
                "normalize=True with beta: the sum of decayed weights is not a denominator under "
                "the delta rule, which also erases; leave out one of them"
            )
        if self.cu_seqlens is not None and batch != 1:
            raise UserError(
                f"cu_seqlens with a batch of {batch}: packed documents need batch 1; lay the "
                "sequences one behind the other"
            )


def _check_heads(query: int, key: int, value: int) -> None:
    grouped_values = query == key and value % key == 0
    grouped_queries = key == value and query % key == 0
    if not grouped_values and not grouped_queries:
        raise UserError(
            f"{query} query, {key} key and {value} value heads: either query and key have the same "
            "number, which divides that of the value (grouped values), or key and value have the "
            "same, which divides that of the query (grouped queries); nearest numbers of key and "
            f"value heads for {query} query heads: {nearest_values(key, divisors(query))}"
        )


def _check_gates(
    key: Tensor, value: Tensor, log_decay: Tensor | None, beta: Tensor | None, values: bool
) -> None:
    batch, tokens, _, width = key.shape
    heads = max(key.shape[2], value.shape[2])
    if beta is not None and tuple(beta.shape) != (batch, tokens, heads):
        raise UserError(
            f"beta of shape {tuple(beta.shape)}: expected [batch, tokens, heads] = "
            f"{[batch, tokens, heads]}, heads being those of the states"
        )
    if log_decay is not None and tuple(log_decay.shape) not in (
        (heads,),
        (batch, tokens, heads),
        (batch, tokens, heads, width),
    ):
        raise UserError(
            f"log_decay of shape {tuple(log_decay.shape)}: expected [heads] = {[heads]}, "
            f"[batch, tokens, heads] = {[batch, tokens, heads]} or [batch, tokens, heads, width] = "
            f"{[batch, tokens, heads, width]}, heads being those of the states"
        )
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        if gate is None:
            continue
        if gate.dtype not in SUPPORTED_DTYPES or gate.device != key.device:
            raise UserError(
                f"{name} is {gate.dtype} on {gate.device}: it must be a floating-point tensor on "
                f"{key.device}"
            )
    if values and log_decay is not None:
        smallest, largest = (bound.item() for bound in torch.aminmax(log_decay.detach()))
        # Written so that NaN, which aminmax passes on, is refused.
        if not (largest <= 0 and smallest > -torch.inf):
            least = LEAST_LOG_DECAY.get(key.dtype, LEAST_LOG_DECAY[torch.float32])
            raise UserError(
                f"log_decay from {smallest:g} to {largest:g}: a decay must be in (0, 1], so its "
                "logarithm finite and not above 0; nearest: 0 (no decay), or, for a token that "
                f"forgets all before it, {least:g} or any number below it"
            )


def _check_state(state: Tensor, key: Tensor, value: Tensor, normalize: bool) -> None:
    expected = (
        key.shape[0],
        max(key.shape[2], value.shape[2]),
        key.shape[3],
        value.shape[3] + int(normalize),
    )
    if tuple(state.shape) != expected:
        extra = ", the last column for the denominator" if normalize else ""
        raise UserError(
            f"initial_state of shape {tuple(state.shape)}: expected [batch, heads, key width, "
            f"value width] = {list(expected)}{extra}"
        )
    if state.dtype not in SUPPORTED_DTYPES or state.device != key.device:
        raise UserError(
            f"initial_state is {state.dtype} on {state.device}: it must be a floating-point "
            f"tensor on {key.device}"
        )
