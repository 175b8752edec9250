"""Floating-point operations of linear layers, by the convention of Megatron's own count.

Megatron counts every layer it does not know as softmax attention, whose core grows with the square
of the sequence. Its number is a sum over layers, so the difference can be told.
"""

import copy
from collections.abc import Callable
from typing import Any

from .requirements import heads_of, linear_layers, preset_of

# A product and a sum; forward, and backward to inputs and to weights.
_PER_MULTIPLICATION = 2 * 3


def softmax_layer_flops(args: Any) -> float:
    """What Megatron counts for the attention of one layer, per token: forward and backward.

    Args:
        args: Megatron's arguments, validated.
    """
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    rows = query + 2 * args.kv_channels * groups
    rows += query if args.attention_output_gate else 0
    projections = args.hidden_size * (rows + query)
    return _PER_MULTIPLICATION * (projections + args.seq_length * query)


def linear_layer_flops(args: Any) -> float:
    """The same for one of this package's linear layers: of the recurrence, whatever the kernel.

    Per head and token it writes ``d e`` products into the state and reads as many; the delta rule
    reads twice and writes twice.
    """
    preset, heads, hidden = preset_of(args), heads_of(args), args.hidden_size
    assert preset is not None
    keys, values = heads.key * heads.key_width, heads.value * heads.value_width
    rows, extra = 2 * keys + values, 0
    if preset.beta:
        rows += heads.value
    if preset.decay in ("softplus", "logsigmoid"):
        if preset.per_channel:
            rank = preset.decay_rank or heads.key_width
            extra += rank * (hidden + keys)
        else:
            rows += heads.value
    if preset.gate != "none":
        if preset.low_rank_gate:
            extra += heads.value_width * (hidden + values)
        else:
            rows += values
    if preset.convolution:
        extra += args.linear_conv_kernel_dim * (2 * keys + values)
    states = max(heads.key, heads.value) * heads.key_width * heads.value_width
    extra += (4 if preset.beta else 2) * states
    return _PER_MULTIPLICATION * (hidden * (rows + values) + extra)


def throughput_factor(args: Any, count: Callable[[Any], float]) -> float:
    """What Megatron's throughput must be multiplied by for a model with linear layers.

    Args:
        args: Megatron's arguments, validated.
        count: Megatron's operations of one sequence for such arguments.
    """
    layers, counted = sum(linear_layers(args)), count(args)
    if args.hybrid_layer_pattern is not None:
        # Megatron counts G layers as its own; its number is a sum over layers.
        others = copy.copy(args)
        others.hybrid_layer_pattern = args.hybrid_layer_pattern.replace("G", "")
        stock = (counted - count(others)) / layers
    else:
        stock = args.seq_length * softmax_layer_flops(args)
    return 1 + layers * (args.seq_length * linear_layer_flops(args) - stock) / counted
