"""What METP needs of a run, and what it does not know: each refused by name before the first step.

:data:`UNSUPPORTED` is data. The config's checks and the flag table both read it, so that a command
line and a config built by hand are refused alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from ..errors import UserError, divisors, nearest_values

FLAG = "--longseq-tensor-parallel metp"


@dataclass(frozen=True)
class Unsupported:
    """An option that METP does not work with.

    Attributes:
        name: in Megatron's arguments, and in its config where it has it.
        flag: as the user writes it.
        allowed: what it works with.
        reason: why, and what to do instead.
        refuses: which values are refused, where it is not all but the allowed one.
        config_only: no flag of Megatron's command line sets it.
    """

    name: str
    flag: str
    allowed: Any
    reason: str
    refuses: Callable[[Any], bool] | None = None
    config_only: bool = False

    def rejects(self, value: Any) -> bool:
        """Whether METP refuses this value."""
        if self.refuses is not None:
            return self.refuses(value)
        return value not in (self.allowed, None)


def _option(name: str, reason: str, allowed: Any = False, **more: Any) -> Unsupported:
    flag = more.pop("flag", "--" + name.replace("_", "-"))
    return Unsupported(name, flag, allowed, reason, **more)


_ATTENTION = "METP's attention does not know it; leave it out"
_WEIGHTS = "METP's weights pass from rank to rank as they are; leave it out"
_LOSS = "METP's loss never builds the logits it works on; leave it out"

UNSUPPORTED: tuple[Unsupported, ...] = (
    _option("multi_latent_attention", _ATTENTION),
    _option("experimental_attention_variant", _ATTENTION, None),
    _option("attention_output_gate", _ATTENTION),
    _option("window_size", _ATTENTION, None),
    _option("softmax_type", _ATTENTION, "vanilla"),
    _option("qk_clip", _ATTENTION),
    _option("log_max_attention_logit", _ATTENTION),
    _option("apply_query_key_layer_scaling", _ATTENTION),
    _option("fused_single_qkv_rope", _ATTENTION, config_only=True),
    _option("attention_dropout", "METP's attention has none; use --attention-dropout 0", 0.0),
    _option("linear_attention_freq", _ATTENTION, None),
    _option("flash_decode", "METP is for training; use --longseq-tensor-parallel megatron"),
    _option(
        "transformer_impl",
        "METP is for training; use local or transformer_engine",
        "local",
        refuses=lambda value: value == "inference_optimized",
    ),
    _option("fp8", _WEIGHTS, None, flag="--fp8-format"),
    _option("fp4", _WEIGHTS, None, flag="--fp4-format"),
    _option("gtp_weight_remat_size", _WEIGHTS, 1, config_only=True),
    _option("use_kitchen", _WEIGHTS, config_only=True),
    _option("use_kitchen_attention", _ATTENTION),
    _option("use_te_activation_func", "METP computes the activation itself; leave it out"),
    _option("use_transformer_engine_op_fuser", "METP computes the MLP itself; leave it out"),
    _option("use_megatron_fsdp", "METP needs whole weight shards; use --use-distributed-optimizer"),
    _option("use_torch_fsdp2", "METP needs whole weight shards; use --use-distributed-optimizer"),
    _option(
        "tp_comm_overlap",
        "it overlaps the gathers that METP does without; leave it out",
    ),
    _option("delay_wgrad_compute", "weight gradients travel as they are made; leave it out"),
    _option(
        "defer_embedding_wgrad_compute", "weight gradients travel as they are made; leave it out"
    ),
    _option(
        "mlp_chunks_for_training",
        "each chunk would circulate all weights again; use --longseq-mlp-tiles",
        1,
    ),
    _option("cuda_graph_impl", "a graph does not hold METP's waits; leave it out", "none"),
    _option("enable_cuda_graph", "a graph does not hold METP's waits; leave it out"),
    _option("external_cuda_graph", "a graph does not hold METP's waits; leave it out"),
    _option("cpu_offloading", "METP's layers do not offload; leave it out", config_only=True),
    _option("cpu_offloading_num_layers", "METP's layers do not offload; leave it out", 0),
    _option("fine_grained_activation_offloading", "METP's layers do not offload; leave it out"),
    _option("overlap_moe_expert_parallel_comm", "it schedules stock layers alone; leave it out"),
    _option(
        "mtp_num_layers",
        "further tokens are predicted by stock layers, which take tokens in natural order; leave "
        "it out",
        None,
    ),
    _option(
        "recompute_modules",
        "METP keeps nothing of an MLP but its input, and Megatron's checkpoint of one with biases "
        "recurses without end; leave mlp out",
        None,
        refuses=lambda value: "mlp" in (value or ()),
    ),
    _option("use_mup", _LOSS),
    _option("cross_entropy_loss_fusion", _LOSS),
    _option("fp16_lm_cross_entropy", _LOSS),
    _option(
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
    for option in UNSUPPORTED:
        value = getattr(config, option.name, None)
        if option.rejects(value):
            raise UserError(f"{option.flag} {value}: not with {FLAG}: {option.reason}")
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


def crossover_tokens(*, hidden: int, kv_width: int, ffn: int, gated: bool) -> int:
    """Tokens in the tensor-parallel group from which METP sends less than tensor parallelism.

    ``3 W / (10 h - 6 k)``, W being the weights of a layer: what METP moves grows with them, what
    Megatron's sequence parallelism moves with the tokens. See ``docs/metp.md``.
    """
    weights = (3 if gated else 2) * hidden * ffn + 2 * hidden * hidden + 2 * hidden * kv_width
    return -(-3 * weights // (10 * hidden - 6 * kv_width))


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
