"""What METP needs of a run, and what it does not know: each refused by name before the first step.

:data:`UNSUPPORTED` is data. The config's checks and the flag table both read it, so that a command
line and a config built by hand are refused alike.
"""

from typing import Any

import torch.nn.functional as F

from ..communication.ring import accumulation_dtype
from ..errors import UserError, divisors, nearest_values
from ..unsupported import Unsupported, check_unsupported, unsupported
from .traffic import head_group_traffic, matmul_chain_traffic

FLAG = "--longseq-tensor-parallel metp"


_ATTENTION = "METP's attention does not know it; leave it out"
_PATTERN = "its layers are not those of METP; leave it out"
_WEIGHTS = "METP's weights pass from rank to rank as they are; leave it out"
_LOSS = "METP's loss never builds the logits it works on; leave it out"

UNSUPPORTED: tuple[Unsupported, ...] = (
    unsupported("multi_latent_attention", _ATTENTION),
    unsupported("experimental_attention_variant", _ATTENTION, None),
    unsupported("attention_output_gate", _ATTENTION),
    unsupported("window_size", _ATTENTION, None),
    unsupported("softmax_type", _ATTENTION, "vanilla"),
    unsupported("qk_clip", _ATTENTION),
    unsupported("log_max_attention_logit", _ATTENTION),
    unsupported("apply_query_key_layer_scaling", _ATTENTION),
    unsupported("fused_single_qkv_rope", _ATTENTION, config_only=True),
    unsupported("attention_dropout", "METP's attention has none; use --attention-dropout 0", 0.0),
    unsupported("linear_attention_freq", _ATTENTION, None),
    unsupported("hybrid_layer_pattern", _PATTERN, None),
    unsupported(
        "longseq_layer_pattern", _PATTERN, None, flag="--hybrid-layer-pattern", config_only=True
    ),
    unsupported("flash_decode", "METP is for training; use --longseq-tensor-parallel megatron"),
    unsupported(
        "transformer_impl",
        "METP is for training; use local or transformer_engine",
        "local",
        refuses=lambda value: value == "inference_optimized",
    ),
    unsupported("fp8", _WEIGHTS, None, flag="--fp8-format"),
    unsupported("fp4", _WEIGHTS, None, flag="--fp4-format"),
    unsupported("gtp_weight_remat_size", _WEIGHTS, 1, config_only=True),
    unsupported("use_kitchen", _WEIGHTS, config_only=True),
    unsupported("use_kitchen_attention", _ATTENTION),
    unsupported("use_te_activation_func", "METP computes the activation itself; leave it out"),
    unsupported("use_transformer_engine_op_fuser", "METP computes the MLP itself; leave it out"),
    unsupported(
        "use_megatron_fsdp", "METP needs whole weight shards; use --use-distributed-optimizer"
    ),
    unsupported(
        "use_torch_fsdp2", "METP needs whole weight shards; use --use-distributed-optimizer"
    ),
    unsupported(
        "tp_comm_overlap",
        "it overlaps the gathers that METP does without; leave it out",
    ),
    unsupported("delay_wgrad_compute", "weight gradients travel as they are made; leave it out"),
    unsupported(
        "defer_embedding_wgrad_compute", "weight gradients travel as they are made; leave it out"
    ),
    unsupported(
        "mlp_chunks_for_training",
        "each chunk would circulate all weights again; use --longseq-mlp-tiles",
        1,
    ),
    unsupported("cuda_graph_impl", "a graph does not hold METP's waits; leave it out", "none"),
    unsupported("enable_cuda_graph", "a graph does not hold METP's waits; leave it out"),
    unsupported("external_cuda_graph", "a graph does not hold METP's waits; leave it out"),
    unsupported("cpu_offloading", "METP's layers do not offload; leave it out", config_only=True),
    unsupported("cpu_offloading_num_layers", "METP's layers do not offload; leave it out", 0),
    unsupported("fine_grained_activation_offloading", "METP's layers do not offload; leave it out"),
    unsupported(
        "overlap_moe_expert_parallel_comm", "it schedules stock layers alone; leave it out"
    ),
    unsupported(
        "mtp_num_layers",
        "further tokens are predicted by stock layers, which take tokens in natural order; leave "
        "it out",
        None,
    ),
    unsupported(
        "recompute_modules",
        "METP keeps nothing of an MLP but its input, and Megatron's checkpoint of one with biases "
        "recurses without end; leave mlp out",
        None,
        refuses=lambda value: "mlp" in (value or ()),
    ),
    unsupported("use_mup", _LOSS),
    unsupported("cross_entropy_loss_fusion", _LOSS),
    unsupported("fp16_lm_cross_entropy", _LOSS),
    unsupported(
        "position_embedding_type",
        "use rope, yarn, learned_absolute or none",
        "rope",
        refuses=lambda value: value == "mrope",
    ),
)


def check_metp(config: Any) -> None:
    """Checks a transformer config, or the arguments of a run, for METP.

    Raises:
        UserError: naming flag, value, rule and what would work.
    """
    tensor = config.tensor_model_parallel_size
    heads = config.num_attention_heads
    if tensor < 2:
        usable = [d for d in divisors(heads) if d > 1] if heads else [2]
        raise UserError(
            f"--tensor-model-parallel-size {tensor}: {FLAG} splits weights and tokens over it; "
            f"use at least 2, for example {nearest_values(tensor, usable)}"
        )
    if not config.sequence_parallel:
        raise UserError(f"{FLAG}: keeps the tokens split between layers; add --sequence-parallel")
    context = config.context_parallel_size
    if context > 1 and config.longseq_context_parallel != "2d":
        raise UserError(
            f"--context-parallel-size {context}: {FLAG} splits a sequence over context-parallel "
            "ranks too only with --longseq-context-parallel 2d; add that, or use 1"
        )
    if config.longseq_context_parallel == "2d" and (config.longseq_head_parallel_size or 1) > 1:
        raise UserError(
            f"--longseq-head-parallel-size {config.longseq_head_parallel_size}: with {FLAG} keys "
            "and values pass around over all tensor- and context-parallel ranks; use 1"
        )
    check_unsupported(config, UNSUPPORTED, FLAG)
    if getattr(config, "bias_activation_fusion", False):
        _check_fused_activation(config)
    if heads and heads % tensor == 0:
        check_shards_per_step(config)


def _check_fused_activation(config: Any) -> None:
    """Megatron's dense MLP has two fused activations, and stops in the first step at others."""
    function, gated = config.activation_func, config.gated_linear_unit
    if function is F.gelu or (function is F.silu and gated):
        return
    name = getattr(function, "__name__", str(function))
    raise UserError(
        f"{'gated ' if gated else ''}{name} with bias_activation_fusion: not with {FLAG}: Megatron "
        "fuses GELU and SwiGLU alone; add --no-bias-gelu-fusion"
    )


def check_shards_per_step(config: Any) -> int:
    """The weight shards per step of attention's outer loop: given, or the fewest that work.

    A step must bring whole key/value heads: if there are fewer of them than ranks, each is spread
    over several shards.

    Raises:
        UserError: the number given tears a head, or does not divide the ranks.
    """
    tensor = config.tensor_model_parallel_size
    groups = kv_heads(config)
    fewest = max(1, tensor // groups)
    given = config.longseq_metp_shards_per_step
    if given is None:
        return fewest
    usable = [d for d in divisors(tensor) if d % fewest == 0]
    if given not in usable:
        raise UserError(
            f"--longseq-metp-shards-per-step {given}: must divide "
            f"--tensor-model-parallel-size {tensor} and bring whole key/value heads, of which "
            f"there are {groups}; usable: {usable}"
        )
    return given


def kv_heads(config: Any) -> int:
    """Key/value heads of a config, or of arguments, where ungrouped attention has a 1 or None."""
    if getattr(config, "group_query_attention", True) and config.num_query_groups:
        return config.num_query_groups
    return config.num_attention_heads


def crossover_tokens(
    *,
    ranks: int,
    hidden: int,
    query_heads: int,
    kv_heads: int,
    head_width: int,
    ffn: int,
    gated: bool,
    element_bytes: int,
    gradient_bytes: int,
) -> int | None:
    """Tokens in the tensor-parallel group from which METP sends fewer bytes per layer and step.

    What METP moves are the weights, whatever the tokens, and K, V and their gradients; Megatron's
    tensor parallelism with sequence parallelism gathers and scatters ``10 (p - 1) / p`` hidden
    states. Both in bytes, by the formulas of :mod:`.traffic`.

    Returns:
        None if METP sends more per token, so that it never comes to send less.
    """

    def metp(tokens: int) -> int:
        total = 0
        for backward in (False, True):
            total += matmul_chain_traffic(
                ranks=ranks,
                hidden=hidden,
                ffn=ffn,
                gated=gated,
                element_bytes=element_bytes,
                gradient_bytes=gradient_bytes,
                backward=backward,
            ).bytes
            total += head_group_traffic(
                ranks=ranks,
                tokens=tokens,
                batch=1,
                hidden=hidden,
                query_heads=query_heads,
                key_heads=kv_heads,
                width=head_width,
                element_bytes=element_bytes,
                gradient_bytes=gradient_bytes,
                backward=backward,
            ).bytes
        return total

    # Per token of this rank, of which the group has p times as many.
    fixed, per_token = metp(0), metp(1) - metp(0)
    saved = 10 * hidden * element_bytes * (ranks - 1) - per_token
    return None if saved <= 0 else -(-fixed // saved) * ranks


def check_sequence(length: int | None, tensor: int, context: int) -> None:
    """Checks that every rank can hold two equal pieces of a sequence of ``length`` tokens.

    Raises:
        UserError: with the nearest lengths that do.
    """
    parts = 2 * tensor * context
    if length is not None and length % parts:
        below = length // parts
        nearest = [k * parts for k in (below, below + 1) if k > 0]
        raise UserError(
            f"--seq-length {length}: under METP every tensor- and context-parallel rank holds two "
            f"equal pieces, so it must be a multiple of {parts}; nearest: {nearest}"
        )


def least_tokens(config: Any) -> int:
    """``--longseq-metp-min-tokens`` of a transformer config as a number.

    Raises:
        UserError: ``auto``, and METP never comes to send less than tensor parallelism.
    """
    given = parse_min_tokens(config.longseq_metp_min_tokens)
    if given is not None:
        return given
    least = crossover_tokens(
        ranks=config.tensor_model_parallel_size,
        hidden=config.hidden_size,
        query_heads=config.num_attention_heads,
        kv_heads=kv_heads(config),
        head_width=config.kv_channels,
        ffn=config.ffn_hidden_size,
        gated=config.gated_linear_unit,
        element_bytes=config.params_dtype.itemsize,
        gradient_bytes=accumulation_dtype(config.params_dtype).itemsize,
    )
    if least is None:
        raise UserError(
            "--longseq-metp-min-tokens auto: with these heads and ranks METP sends more than "
            "tensor parallelism at any length (its gain is memory); use 0, or a number of tokens"
        )
    return least


def parse_min_tokens(text: str) -> int | None:
    """``--longseq-metp-min-tokens``: a number, or None for ``auto``.

    Raises:
        UserError: it is neither.
    """
    if text == "auto":
        return None
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise UserError(
            f"--longseq-metp-min-tokens {text}: must be auto, 0 (always METP) or a number of tokens"
        )
    return value
