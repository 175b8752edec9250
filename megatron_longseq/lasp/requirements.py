"""What linear attention needs of a run, which layers have it, and what is refused by name.

Read by the config's checks, the command line's and the layer specs alike.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import UserError, check_at_least_one, divisors, nearest_values
from ..unsupported import check_unsupported, unsupported
from .presets import Preset, choose_preset

FLAG = "--longseq-linear-attention"

# Options that make the model, and options that say how it is computed.
MODEL_OPTIONS = (
    "longseq_linear_attention",
    "longseq_feature_map",
    "longseq_output_norm",
    "longseq_output_gate",
)
RUN_OPTIONS = (
    "longseq_scan",
    "longseq_linear_layout",
    "longseq_linear_backend",
    "longseq_sequence_chunks",
)

# Megatron's own sizes of linear layers. Without a value they are those of softmax attention.
SIZES = (
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
# Megatron's defaults of these, for its own linear layers.
MEGATRON_SIZES = dict(zip(SIZES, (128, 128, 16, 32), strict=True))

_VARIANT = "it chooses Megatron's own layers; leave it out"
_STATE = "linear layers keep states between tokens that it does not know; leave it out"

UNSUPPORTED = (
    unsupported("experimental_attention_variant", _VARIANT, None),
    unsupported("multi_latent_attention", _VARIANT),
    unsupported("flash_decode", "linear layers have no key/value cache; leave it out"),
    unsupported(
        "transformer_impl",
        "use local or transformer_engine",
        "local",
        refuses=lambda value: value == "inference_optimized",
    ),
    unsupported("fp8", "states and decays need more bits; leave it out", None, flag="--fp8-format"),
    unsupported("fp4", "states and decays need more bits; leave it out", None, flag="--fp4-format"),
    unsupported("cuda_graph_impl", "a graph does not hold the scan's waits; leave it out", "none"),
    unsupported("enable_cuda_graph", "a graph does not hold the scan's waits; leave it out"),
    unsupported("external_cuda_graph", "a graph does not hold the scan's waits; leave it out"),
    unsupported(
        "overlap_moe_expert_parallel_comm", "it schedules stock layers alone; leave it out"
    ),
    unsupported("mtp_num_layers", _STATE, None),
    unsupported(
        "longseq_tensor_parallel",
        "METP splits a sequence over the tensor-parallel ranks too, and linear layers do not yet; "
        "use megatron",
        "megatron",
    ),
)

# What softmax attention alone reads: without a layer of it these do nothing.
_NO_SOFTMAX = "all layers are linear, and only softmax attention reads it; leave it out"
SOFTMAX_ONLY = (
    unsupported("window_size", _NO_SOFTMAX, None),
    unsupported("softmax_type", _NO_SOFTMAX, "vanilla"),
    unsupported("qk_layernorm", _NO_SOFTMAX),
    unsupported("qk_clip", _NO_SOFTMAX),
    unsupported("attention_output_gate", _NO_SOFTMAX),
    unsupported("longseq_context_parallel", _NO_SOFTMAX, "megatron"),
)

# What a loop over the chunks of a sequence does not work with.
NOT_IN_CHUNKS = (
    unsupported(
        "pipeline_model_parallel_size",
        "a pipeline passes micro-batches on, and the loop over chunks stands in one stage's "
        "forward; use 1",
        1,
    ),
    unsupported(
        "recompute_granularity",
        "backward computes every chunk's forward again anyway; leave it out, or use selective",
        refuses=lambda value: value == "full",
    ),
    unsupported(
        "recompute_modules",
        "backward through a chunk asks for gradients of its own, which Megatron's checkpoints of "
        "other modules do not know; use core_attn alone",
        refuses=lambda value: value is not None and set(value) - {"core_attn"},
    ),
    unsupported(
        "use_torch_fsdp2",
        "a chunk's gradients are those of whole parameters; use --use-distributed-optimizer or "
        "--longseq-zero zero3",
    ),
    unsupported(
        "hidden_dropout",
        "the second forward of a chunk would draw other numbers; use 0",
        0.0,
    ),
    *(
        unsupported(
            name,
            "the auxiliary losses of experts count the tokens of a whole micro-batch; leave it out",
            None,
            flag="--num-experts",
            config_only=name == "num_moe_experts",
        )
        for name in ("num_experts", "num_moe_experts")
    ),
)


# What a model of Megatron's hybrid pattern does not go with.
NOT_IN_PATTERNS = (
    unsupported("linear_attention_freq", "the pattern names the layers; leave it out", None),
    unsupported(
        "longseq_sequence_chunks",
        "the loop over chunks stands in the forward of Megatron's GPT model; use "
        "--linear-attention-freq, or 1",
        1,
    ),
    unsupported(
        "longseq_keep_attention_output",
        "Megatron's hybrid stack recomputes its layers itself; leave it out",
    ),
)


@dataclass(frozen=True)
class Heads:
    """Heads of the whole model's linear layers, and their widths."""

    key: int
    value: int
    key_width: int
    value_width: int


def heads_of(config: Any) -> Heads:
    """Heads of a config, or of arguments: Megatron's ``--linear-*`` sizes, else softmax's."""
    heads = config.num_attention_heads
    width = config.kv_channels or config.hidden_size // heads
    return Heads(
        key=config.linear_num_key_heads or heads,
        value=config.linear_num_value_heads or config.linear_num_key_heads or heads,
        key_width=config.linear_key_head_dim or width,
        value_width=config.linear_value_head_dim or width,
    )


def preset_of(config: Any) -> Preset | None:
    """The preset of a config, or of arguments; None for a model of softmax attention."""
    if config.longseq_linear_attention == "none":
        return None
    return choose_preset(
        config.longseq_linear_attention,
        feature_map=config.longseq_feature_map,
        output_norm=config.longseq_output_norm,
        output_gate=config.longseq_output_gate,
    )


def layer_pattern(config: Any) -> str | None:
    """``--hybrid-layer-pattern`` of arguments, or of a config."""
    names = "hybrid_layer_pattern", "longseq_layer_pattern"
    return next((found for name in names if (found := getattr(config, name, None))), None)


def linear_layers(config: Any) -> list[bool]:
    """Which of the whole model's layers of attention are linear.

    ``--linear-attention-freq``: N, every N-th layer has softmax attention; a list, 1 for a linear
    layer; none: all are linear. Of ``--hybrid-layer-pattern``, the layers ``G``.

    Raises:
        UserError: the pattern does not fit, or leaves no linear layer.
    """
    pattern_of_hybrid = layer_pattern(config)
    if pattern_of_hybrid is not None:
        return [symbol == "G" for symbol in pattern_of_hybrid if symbol in "G*"]
    frequency, layers = config.linear_attention_freq, config.num_layers
    if frequency is None:
        return [True] * layers
    if isinstance(frequency, list):
        if len(frequency) != layers:
            raise UserError(
                f"--linear-attention-freq {frequency}: has {len(frequency)} entries and "
                f"--num-layers is {layers}; give one entry for each layer"
            )
        pattern = [bool(entry) for entry in frequency]
    else:
        check_at_least_one("--linear-attention-freq", frequency)
        pattern = [(layer + 1) % frequency != 0 for layer in range(layers)]
    if not any(pattern):
        raise UserError(
            f"--linear-attention-freq {frequency}: leaves no layer to {FLAG} "
            f"{config.longseq_linear_attention}; use at least 2, or a 1 in the list"
        )
    return pattern


def check_linear(config: Any) -> None:
    """Checks a transformer config, or the arguments of a run, for linear attention.

    Raises:
        UserError: naming flag, value, rule and what would work.
    """
    preset = preset_of(config)
    if preset is None:
        return
    method = f"{FLAG} {preset.name}"
    check_unsupported(config, UNSUPPORTED, method)
    if not _names_layers(config):
        return  # Megatron names what is missing
    for name in (*SIZES, "linear_conv_kernel_dim"):
        check_at_least_one("--" + name.replace("_", "-"), getattr(config, name))
    _check_heads(config)
    softmax = not all(linear_layers(config))
    if not softmax:
        check_unsupported(config, SOFTMAX_ONLY, method)
    context = config.context_parallel_size
    if softmax and context > 1:
        _check_softmax_layers(config, context)
    _check_chunks(config, softmax)


def _naming(config: Any) -> str:
    """The flag that says which layers are linear."""
    pattern = layer_pattern(config)
    if pattern is not None:
        return f"--hybrid-layer-pattern {pattern}"
    return f"--linear-attention-freq {config.linear_attention_freq}"


def _names_layers(config: Any) -> bool:
    """Whether a config, or arguments, say how many layers there are, and of what."""
    pattern = layer_pattern(config)
    layers = config.num_layers if pattern is None else pattern
    return layers is not None and config.num_attention_heads is not None


def check_hybrid_pattern(config: Any) -> None:
    """Checks ``--hybrid-layer-pattern`` for this package's layers.

    Raises:
        UserError: a layer that cannot be built here, or linear attention without a layer of it.
    """
    pattern = layer_pattern(config)
    if pattern is None:
        return
    shown = f"--hybrid-layer-pattern {pattern}"
    linear = config.longseq_linear_attention != "none"
    if config.transformer_impl == "local":
        unknown = sorted(set(pattern) - set("G*-|"))
        if unknown:
            raise UserError(
                f"{shown}: layers {' '.join(unknown)} need Transformer Engine; without it there "
                "are G (linear attention), * (softmax attention), - (MLP) and | (stages)"
            )
        if config.multi_latent_attention:
            raise UserError(
                f"--multi-latent-attention: {shown} needs Transformer Engine for it; use * layers "
                "without it, or --num-layers instead of a pattern"
            )
        if "G" in pattern and not linear:
            raise UserError(
                f"{shown}: Megatron's own layer G needs Transformer Engine; add {FLAG} gdn"
            )
    if linear and "G" not in pattern:
        raise UserError(
            f"{FLAG} {config.longseq_linear_attention}: {shown} has no layer G, which it would be"
        )
    check_unsupported(config, NOT_IN_PATTERNS, shown)


def _check_chunks(config: Any, softmax: bool) -> None:
    chunks = config.longseq_sequence_chunks
    if chunks == 1:
        return
    method = f"--longseq-sequence-chunks {chunks}"
    if softmax:
        raise UserError(
            f"{method}: --linear-attention-freq {config.linear_attention_freq} leaves layers of "
            "softmax attention, which need the keys and values of all earlier chunks; use linear "
            "layers alone, or --longseq-sequence-chunks 1"
        )
    check_unsupported(config, NOT_IN_CHUNKS, method)


def _check_heads(config: Any) -> None:
    heads, tensor = heads_of(config), config.tensor_model_parallel_size
    if heads.value % heads.key:
        usable = [k * heads.key for k in range(1, heads.value // heads.key + 2)]
        raise UserError(
            f"--linear-num-value-heads {heads.value}: must be a multiple of "
            f"--linear-num-key-heads {heads.key}; nearest: {nearest_values(heads.value, usable)}"
        )
    if heads.key % tensor:
        raise UserError(
            f"--tensor-model-parallel-size {tensor}: must divide the {heads.key} key heads of the "
            f"linear layers; nearest: {nearest_values(tensor, divisors(heads.key))}"
        )


def _check_softmax_layers(config: Any, context: int) -> None:
    if config.longseq_linear_layout == "contiguous":
        raise UserError(
            f"--longseq-linear-layout contiguous: {_naming(config)} leaves layers of softmax "
            "attention, which take Megatron's zigzag; use --longseq-linear-layout zigzag, or "
            "linear layers alone"
        )
    if config.longseq_context_parallel != "2d" and config.transformer_impl == "local":
        raise UserError(
            f"--context-parallel-size {context}: {_naming(config)} leaves layers of softmax "
            "attention, and Megatron's local one cannot split a sequence; add "
            "--longseq-context-parallel 2d, or use 1"
        )


def check_positions(config: Any, embedding: str, rotary_percent: float) -> None:
    """Checks a model's position embedding.

    Args:
        config: a transformer config, or arguments.
        embedding: ``--position-embedding-type``.
        rotary_percent: ``--rotary-percent``.

    Raises:
        UserError: RoPE that no layer reads, or is missing, or does not fit the layout.
    """
    preset = preset_of(config)
    if preset is None or not _names_layers(config):
        return
    softmax, method = not all(linear_layers(config)), f"{FLAG} {preset.name}"
    rotated = embedding in ("rope", "yarn", "mrope")
    if preset.rotary:
        if embedding != "rope":
            raise UserError(
                f"--position-embedding-type {embedding}: {method} rotates queries and keys by "
                "RoPE; use rope"
            )
        heads = heads_of(config)
        width = config.kv_channels or config.hidden_size // config.num_attention_heads
        if int(width * rotary_percent) > heads.key_width:
            raise UserError(
                f"--linear-key-head-dim {heads.key_width}: RoPE rotates "
                f"{int(width * rotary_percent)} of its channels (--kv-channels x "
                f"--rotary-percent); use at least as many, or a smaller --rotary-percent"
            )
    elif rotated and not softmax:
        raise UserError(
            f"--position-embedding-type {embedding}: no layer reads it, as all are linear and "
            f"{preset.name} does without; use none, or learned_absolute"
        )
    contiguous = config.longseq_linear_layout == "contiguous" and config.context_parallel_size > 1
    if contiguous and rotated:
        raise UserError(
            f"--longseq-linear-layout contiguous: --position-embedding-type {embedding} is cut "
            "for Megatron's zigzag; use --longseq-linear-layout zigzag"
        )


def check_length(args: Any) -> None:
    """Checks that a sequence splits into its chunks and segments, and that none is too short.

    Raises:
        UserError: naming what works.
    """
    preset, context, chunks = (
        preset_of(args),
        args.context_parallel_size,
        args.longseq_sequence_chunks,
    )
    if preset is None or args.seq_length is None:
        return
    segments = chunks
    if context > 1:
        segments *= context * (1 if args.longseq_linear_layout == "contiguous" else 2)
    if chunks > 1 and args.seq_length % segments:
        usable = [
            k
            for k in range(1, args.seq_length + 1)
            if args.seq_length % (segments // chunks * k) == 0
        ]
        raise UserError(
            f"--longseq-sequence-chunks {chunks}: --seq-length {args.seq_length} is no multiple of "
            f"{segments} = chunks x {segments // chunks} segments of a chunk; nearest: "
            f"{nearest_values(chunks, usable)}"
        )
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if chunks > 1 and (args.seq_length // chunks // context) % tensor:
        raise UserError(
            f"--longseq-sequence-chunks {chunks}: a rank's {args.seq_length // chunks // context} "
            f"tokens of a chunk must split over --tensor-model-parallel-size {tensor} for "
            "--sequence-parallel; use fewer chunks"
        )
    halo = args.linear_conv_kernel_dim - 1
    if preset.convolution and segments > 1 and args.seq_length // segments < halo:
        raise UserError(
            f"--seq-length {args.seq_length}: {FLAG} {preset.name} convolves over "
            f"{halo + 1} tokens, and each of {segments} segments must have {halo}; use at least "
            f"{halo * segments}"
        )


def check_own_batches(config: Any, where: str) -> None:
    """Refuses what this package alone cuts batches for, where others cut them.

    Args:
        where: who cuts them.

    Raises:
        UserError: there are ranks to cut for, and the layout is contiguous or has chunks.
    """
    if config.context_parallel_size == 1:
        return
    if config.longseq_sequence_chunks > 1:
        raise UserError(
            f"--longseq-sequence-chunks {config.longseq_sequence_chunks}: {where} cuts whole "
            "sequences for the context-parallel ranks; use -m megatron_longseq.pretrain_gpt, or "
            "--context-parallel-size 1"
        )
    if config.longseq_linear_layout == "contiguous":
        raise UserError(
            f"--longseq-linear-layout contiguous: {where} cuts batches in Megatron's zigzag; use "
            "--longseq-linear-layout zigzag, or -m megatron_longseq.pretrain_gpt"
        )
