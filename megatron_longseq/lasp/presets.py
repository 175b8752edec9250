"""The linear attention models that a flag can name: what happens around the recurrence in each.

    q, k, v = maps(short convolution(W x))      o = linear attention(q, k, v, decay, beta)
    y = W_o (norm(o) * gate(x))

Plain data and plain torch. Heads and layers are counted over the whole model, so that a layout
changes none of these numbers.

Sources: linear, arXiv 2006.16236; retention, 2307.08621; lightning (TransNormerLLM), 2307.14995 and
2405.17381; gla and simple-gla, 2312.06635; deltanet, 2406.06484; gdn, 2412.06464; kda, 2510.26692.
The table is in ``docs/linear-models.md``.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError

Decay = Literal["none", "constant", "softplus", "logsigmoid"]

# The divisor of the logarithm of GLA's decay, so that a gate near 1/2 forgets slowly (2312.06635).
GATE_NORMALIZER = 16.0
# Rank of the product of two matrices that gives GLA's decay (2312.06635).
DECAY_RANK = 16
HIDDEN_NORM_EPS = 1e-6
UNIT_LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class Preset:
    """A linear attention model.

    Attributes:
        name: the flag's value.
        feature_map: of queries and keys.
        value_map: of values.
        convolution: queries, keys and values first pass a short causal convolution.
        unit_length: queries and keys are divided by their length, after their map.
        rotary: queries and keys are rotated by RoPE.
        decay: ``constant`` per head and layer, or from the input: ``softplus``,
            ``-exp(A_log) softplus(x + dt_bias)``, or ``logsigmoid``,
            ``logsigmoid(x + dt_bias) / 16``.
        constant: of a constant decay: ``(heads, layer, layers)`` to the log decays.
        per_channel: a decay from the input is per key channel, through a product of two matrices,
            instead of per head.
        decay_rank: of that product; ``None`` for the width of a key.
        beta: the delta rule, with a write strength ``sigmoid(W x)`` per head.
        scaled: the output has a factor ``d ** -0.5``.
        norm: ``denominator``, the sum of the weights; ``head``, a norm per head with learnt
            weights; ``hidden``, ``x / rms(x)`` over all heads.
        gate: activation of the output gate.
        low_rank_gate: the gate's argument is ``W2 W1 x``, of the rank of a value's width.
        fixed_map: ``--longseq-feature-map`` does not apply.
    """

    name: str
    feature_map: str = "identity"
    value_map: str = "identity"
    convolution: bool = False
    unit_length: bool = False
    rotary: bool = False
    decay: Decay = "none"
    constant: Callable[[int, int, int], Tensor] | None = None
    per_channel: bool = False
    decay_rank: int | None = None
    beta: bool = False
    scaled: bool = True
    norm: str = "head"
    gate: str = "silu"
    low_rank_gate: bool = False
    fixed_map: bool = True

    def log_decays(self, heads: int, layer: int, layers: int) -> Tensor:
        """The logarithms of a constant decay: fp64 ``[heads]``.

        Args:
            heads: of the whole model.
            layer: counted from 0 over the whole model.
            layers: of the whole model.
        """
        assert self.constant is not None, self.name
        return self.constant(heads, layer, layers)


def alibi_slopes(heads: int) -> Tensor:
    """``2 ** (-8 (h + 1) / heads)`` for head h = 0, 1, ..: fp64 ``[heads]``.

    For a number of heads that is no power of two: the slopes of the next lower power, then every
    second one of twice that power. Source: ALiBi, arXiv 2108.12409.
    """
    lower = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * lower)) for h in range(0, 2 * lower, 2)]
    return torch.tensor((slopes + between)[:heads], dtype=torch.float64)


def lightning_decays(heads: int, layer: int, layers: int) -> Tensor:
    """TransNormerLLM's: ALiBi's slopes, fading towards the last layer, which has nearly none."""
    depth = layer / (layers - 1) if layers > 1 else 0.0
    return -alibi_slopes(heads) * (1.0 - depth + 1e-5)


def lightning_fla_decays(heads: int, layer: int, layers: int) -> Tensor:
    """flash-linear-attention's reading of the same model: linear in the head, none in the first."""
    head = torch.arange(heads, dtype=torch.float64)
    return -head * (8.0 / heads) * (1.0 - layer / layers)


def retention_decays(heads: int, _layer: int, _layers: int) -> Tensor:
    """RetNet's: ``ln(1 - 2 ** (-5 - h))``."""
    head = torch.arange(heads, dtype=torch.float64)
    return torch.log1p(-torch.exp2(-5.0 - head))


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("linear", feature_map="elu", scaled=False, norm="denominator", fixed_map=False),
        Preset("retention", rotary=True, decay="constant", constant=retention_decays),
        Preset(
            "lightning",
            feature_map="silu",
            value_map="silu",
            decay="constant",
            constant=lightning_decays,
            scaled=False,
            norm="hidden",
            gate="sigmoid",
            low_rank_gate=True,
        ),
        Preset(
            "lightning-fla",
            decay="constant",
            constant=lightning_fla_decays,
            norm="hidden",
            gate="sigmoid",
            low_rank_gate=True,
            fixed_map=False,
        ),
        Preset("simple-gla", decay="logsigmoid", fixed_map=False),
        Preset("gla", decay="logsigmoid", per_channel=True, decay_rank=DECAY_RANK),
        Preset(
            "deltanet",
            feature_map="silu",
            value_map="silu",
            convolution=True,
            unit_length=True,
            beta=True,
            gate="none",
        ),
        Preset(
            "gdn",
            feature_map="silu",
            value_map="silu",
            convolution=True,
            unit_length=True,
            decay="softplus",
            beta=True,
        ),
        Preset(
            "kda",
            feature_map="silu",
            value_map="silu",
            convolution=True,
            unit_length=True,
            decay="softplus",
            per_channel=True,
            beta=True,
            gate="sigmoid",
            low_rank_gate=True,
        ),
    )
}

NAMES = ("none", *PRESETS)
FEATURE_MAPS = ("auto", "identity", "silu", "elu", "relu")
OUTPUT_NORMS = ("auto", "denominator", "head", "hidden")
OUTPUT_GATES = ("auto", "none", "silu", "sigmoid")


def choose_preset(
    name: str, *, feature_map: str = "auto", output_norm: str = "auto", output_gate: str = "auto"
) -> Preset:
    """The preset called ``name`` with the parts that are given in place of its own.

    Raises:
        UserError: a part that the preset does not read, or that cannot work with the others.
    """
    if name not in PRESETS:
        raise UserError(
            f"--longseq-linear-attention {name}: unknown; there are {', '.join(PRESETS)}"
        )
    preset = PRESETS[name]
    if feature_map != "auto":
        if preset.fixed_map:
            free = ", ".join(p.name for p in PRESETS.values() if not p.fixed_map)
            raise UserError(
                f"--longseq-feature-map {feature_map}: {name} has a map of its own for queries and "
                f"keys; leave it out, or use one of {free}"
            )
        preset = dataclasses.replace(preset, feature_map=feature_map)
    positive = preset.feature_map in ("elu", "relu")
    if output_norm != "auto":
        preset = dataclasses.replace(preset, norm=output_norm)
    elif preset.norm == "denominator" and not positive:
        preset = dataclasses.replace(preset, norm="head")
    if output_gate != "auto":
        preset = dataclasses.replace(preset, gate=output_gate)
    if preset.norm == "denominator" and not positive:
        raise UserError(
            "--longseq-output-norm denominator: divides by a sum of weights, which must not be "
            f"negative, and the map of queries and keys is {preset.feature_map}; use "
            "--longseq-linear-attention linear with --longseq-feature-map elu or relu, or "
            "--longseq-output-norm head"
        )
    return preset


_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


def apply_map(name: str, x: Tensor) -> Tensor:
    """A feature map or activation by its name; ``elu`` is ``elu(x) + 1``."""
    return _MAPS[name](x)


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def to_unit_length(x: Tensor) -> Tensor:
    """``x / sqrt(|x|^2 + 1e-6)`` over the last dimension, computed in fp32 (fp64 for fp64)."""
    full = wide(x)
    return (full * torch.rsqrt(full.square().sum(-1, keepdim=True) + UNIT_LENGTH_EPS)).to(x.dtype)


def softplus_decay(x: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """``-exp(a_log) softplus(x + bias)``, in fp32 (fp64 for fp64).

    Args:
        x: ``[.., h]``, or ``[.., h, d]`` per key channel.
        a_log: ``[h]``.
        bias: ``[h]``, or ``[h, d]``.
    """
    rate = wide(a_log).exp()
    if x.dim() == 4:
        rate = rate[:, None]
    return -rate * F.softplus(wide(x) + wide(bias))


def logsigmoid_decay(x: Tensor, bias: Tensor) -> Tensor:
    """``logsigmoid(x + bias) / 16``, in fp32 (fp64 for fp64); shapes as in softplus_decay()."""
    return F.logsigmoid(wide(x) + wide(bias)) / GATE_NORMALIZER


def initial_rates(heads: int) -> Tensor:
    """First values of ``a_log``: ``ln A``, A evenly spread over (1, 16): fp64 ``[heads]``.

    Mamba-2 and Gated DeltaNet draw A at random from that range (arXiv 2405.21060); spread evenly
    over the heads of the whole model, no layout changes it.
    """
    return torch.log(1.0 + 15.0 * (torch.arange(heads, dtype=torch.float64) + 0.5) / heads)


def initial_time_steps(count: int) -> Tensor:
    """First values of ``dt_bias``: softplus of it spreads over 0.001 .. 0.1: fp64 ``[count]``.

    On a logarithmic scale, as in Mamba-2 (arXiv 2405.21060), and evenly as in initial_rates().
    """
    place = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    step = torch.exp(math.log(1e-3) + place * (math.log(1e-1) - math.log(1e-3)))
    return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
