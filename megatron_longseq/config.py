"""Every option of this package, once: its flag, its meaning and its checks.

A field named ``longseq_x`` is the flag ``--longseq-x``. Megatron fills the fields of a config class
from arguments of the same name, so that :class:`LongSeqTransformerConfig` reaches every module.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from .attention_2d.factorisation import Factorisation, factorise
from .attention_2d.windows import RingWindows, choose_windows
from .errors import UserError, check_at_least_one
from .lasp import presets
from .lasp.requirements import MEGATRON_SIZES, check_hybrid_pattern, check_linear
from .memory import zero_presets
from .memory.requirements import SHARES, check_keep_attention
from .metp.requirements import check_metp, parse_min_tokens

# A year: what a clock of the transport can still count.
MOST_SECONDS = 31_536_000.0


def _option(default: Any, help_text: str, **argparse_options: Any) -> Any:
    metadata = {"help": help_text, **argparse_options}
    return dataclasses.field(default=default, metadata={"longseq": metadata})


@dataclass
class LongSeqTransformerConfig(TransformerConfig):
    """Megatron's transformer config with this package's options."""

    longseq_device: str = _option(
        "auto",
        "Where to run: a GPU if there is one, else the CPU over gloo (auto); or one of them, or "
        "an error.",
        choices=("auto", "cpu", "cuda"),
    )
    longseq_measure: str | None = _option(
        None,
        "Write one JSON line per step and rank to this directory: loss, tokens, seconds, peak "
        "bytes of live tensors, bytes and messages sent by group.",
        metavar="DIR",
    )

    longseq_pad_sequence: bool = _option(
        False,
        "Train on a --seq-length that the ranks do not divide: batches are filled up with masked "
        "tokens to the next one that they do, and the loss is divided by the real ones.",
        action="store_true",
    )
    longseq_context_parallel: str = _option(
        "megatron",
        "What splits the sequence over --context-parallel-size ranks: Megatron's own attention, or "
        "2D attention (head-parallel x ring). With one rank, 2d still computes attention with this "
        "package's kernel, which keeps no s x s scores.",
        choices=("megatron", "2d"),
    )
    longseq_head_parallel_size: int | None = _option(
        None,
        "Head-parallel size of 2D attention; the ring has the rest of --context-parallel-size. "
        "Default: chosen from heads and node size, and said at start-up.",
        type=int,
        metavar="N",
    )
    longseq_ring_window_size: int | None = _option(
        None,
        "Double-Ring-Attention: ranks of the inner rings of 2D attention's ring; 1, or the ring's "
        "size, is a single ring. Default: the ring's members on a node, where that saves anything; "
        "said at start-up.",
        type=int,
        metavar="N",
    )
    longseq_backward_ring: str = _option(
        "auto",
        "What goes round the ring of 2D attention in the backward: keys and values, with their "
        "gradients behind them; queries, with the gradients of output and query; or the one of "
        "fewer bytes. Rows under a window or of packed documents that travel alone are keys.",
        choices=("auto", "keys", "queries"),
    )
    longseq_ring_gradient_dtype: str = _option(
        "fp32",
        "In which gradients add up and travel in the ring of 2D attention: fp32, or the dtype of "
        "the input, which in 16 bits halves their bytes and rounds once per hop.",
        choices=("fp32", "input"),
    )
    longseq_placement: str = _option(
        "head-first",
        "What lies on neighbouring ranks: the head groups of 2D attention, or its rings "
        "(context-first, for a large ring of replicated key/value heads).",
        choices=("head-first", "context-first"),
    )
    longseq_network_cards_per_node: int | None = _option(
        None,
        "Network cards of a node, where there are fewer than ranks: the windows of a double ring "
        "are then spread over the node.",
        type=int,
        metavar="N",
    )
    longseq_attention_kernel: str = _option(
        "auto",
        "Kernel of one block of 2D attention or METP: the first usable of flash (the flash-attn "
        "package), aten (PyTorch's own flash kernels), reference (plain torch, whose scores are a "
        "matrix in memory); or one of them.",
        choices=("auto", "flash", "aten", "reference"),
    )
    longseq_tensor_parallel: str = _option(
        "megatron",
        "What splits the layers over --tensor-model-parallel-size ranks: Megatron's tensor "
        "parallelism, or METP: weights and K/V pass from rank to rank, activations stay. Same "
        "weights, same checkpoints; needs --sequence-parallel.",
        choices=("megatron", "metp"),
    )
    longseq_metp_min_tokens: str = _option(
        "0",
        "Micro-batches of fewer tokens (sequence x micro-batch, per tensor-parallel group) compute "
        "as Megatron's tensor parallelism, on the same weights: a number (0: always METP), or "
        "auto: where METP begins to send less.",
        metavar="TOKENS",
    )
    longseq_metp_shards_per_step: int | None = _option(
        None,
        "Weight shards that METP's attention works with at a time. Default: as few as leave "
        "key/value heads whole; more make fewer, larger messages and kernels, and need more "
        "memory.",
        type=int,
        metavar="N",
    )
    longseq_mlp_tiles: int = _option(
        1,
        "METP's MLP works off its tokens in this many parts: a smaller peak, the same messages.",
        type=int,
        metavar="N",
    )
    longseq_keep_attention_output: bool = _option(
        False,
        "Selective Checkpoint++: --recompute-granularity full computes layers again but for what "
        "their attention has computed: output and log-sum-exp, of linear attention the states "
        "that have travelled.",
        action="store_true",
    )
    longseq_keep_attention_layers: float = _option(
        1.0,
        "Share of the recomputed layers of a pipeline stage that keep it, the first ones.",
        type=float,
        metavar="SHARE",
    )
    longseq_keep_attention_tokens: float = _option(
        1.0,
        "Share of a rank's tokens whose softmax attention is kept, those that cost most.",
        type=float,
        metavar="SHARE",
    )
    longseq_keep_attention_offload: bool = _option(
        False,
        "Keep it in host memory: copied there beside the layers that follow, and back one layer "
        "ahead of its use.",
        action="store_true",
    )
    longseq_zero: str = _option(
        "none",
        "What data- and context-parallel ranks shard, as a set of Megatron's own flags: optimizer "
        "states (zero1; in several groups: zero1-partial), gradients too (zero2), parameters too "
        "(zero3), these in groups (hybrid).",
        choices=zero_presets.NAMES,
    )
    longseq_zero_instances: int | None = _option(
        None,
        "Groups of ranks that shard on their own, with zero1-partial and hybrid.",
        type=int,
        metavar="N",
    )
    longseq_linear_attention: str = _option(
        "none",
        "Layers of linear attention, of this model, in place of softmax attention: all of them, or "
        "those that --linear-attention-freq names. They split a sequence over "
        "--context-parallel-size ranks by passing states on (LASP). Sizes: Megatron's "
        "--linear-key-head-dim and its kin, else those of softmax attention.",
        choices=presets.NAMES,
    )
    longseq_feature_map: str = _option(
        "auto",
        "Map of queries and keys of linear attention, where the model leaves it open: elu is "
        "elu(x) + 1. Default: the model's.",
        choices=presets.FEATURE_MAPS,
    )
    longseq_output_norm: str = _option(
        "auto",
        "Norm behind linear attention: the sum of the weights (denominator), a norm per head with "
        "weights (head), or over all heads without (hidden). Default: the model's.",
        choices=presets.OUTPUT_NORMS,
    )
    longseq_output_gate: str = _option(
        "auto",
        "Activation of the gate behind linear attention, or none. Default: the model's.",
        choices=presets.OUTPUT_GATES,
    )
    longseq_scan: str = _option(
        "auto",
        "How states of linear attention travel along the sequence: one after the other (ring), all "
        "to all (all_gather, LASP-2), in doubling steps (log_scan), in blocks (all_scan, ZeCO), or "
        "inside the nodes first (two_level). Default: the fastest by a cost model.",
        choices=("auto", "ring", "all_gather", "log_scan", "all_scan", "two_level"),
    )
    longseq_linear_layout: str = _option(
        "zigzag",
        "Tokens of a rank: Megatron's zigzag, or one contiguous part, which halves the states that "
        "travel, for models of linear attention alone, without RoPE.",
        choices=("zigzag", "contiguous"),
    )
    longseq_sequence_chunks: int = _option(
        1,
        "Sequence accumulation: a sequence goes through the model in this many parts, one after "
        "the other, and backward through them in reverse. Activations need the memory of one part; "
        "one more forward is computed. For models of linear attention alone.",
        type=int,
        metavar="K",
    )
    longseq_linear_backend: str = _option(
        "auto",
        "Kernel of one rank's part of linear attention: torch, triton, or the first usable.",
        choices=("auto", "torch", "triton"),
    )
    # Method and number of layers of a recompute that this package's layers do themselves.
    longseq_own_recompute: Any = dataclasses.field(default=None, init=False)
    # Megatron's sizes of linear layers, without its defaults: none given are softmax attention's.
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    # --hybrid-layer-pattern. Megatron keeps it beside its config, and there it must not have the
    # same name; checks need it here.
    longseq_layer_pattern: str | None = None
    longseq_comm_timeout_seconds: float = _option(
        1800.0,
        "Limit of every wait in this package's communication. Over gloo the run then stops with "
        "the group, step and peer; NCCL waits on the GPU and ends the process by its own watchdog.",
        type=float,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        if self.longseq_linear_attention == "none":
            for name, value in MEGATRON_SIZES.items():
                if getattr(self, name) is None:
                    setattr(self, name, value)
        super().__post_init__()
        check_options({field.name: getattr(self, field.name) for field in options()})
        check_methods(self)


@dataclass
class LongSeqMLATransformerConfig(LongSeqTransformerConfig, MLATransformerConfig):
    """The same for models of multi-latent attention, which have a config class of their own."""


def with_options(config: TransformerConfig, args: Any) -> LongSeqTransformerConfig:
    """A config with this package's options, from one that Megatron has made without.

    For multi-latent attention Megatron takes its own class, whatever class it is asked for.

    Args:
        config: Megatron's.
        args: the arguments it was made from.

    Raises:
        UserError: the options do not fit it.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    ours = {field.name: getattr(args, field.name) for field in options()}
    return LongSeqMLATransformerConfig(**(values | ours))


def check_methods(config: TransformerConfig) -> None:
    """Checks what the methods that a config asks for need of it.

    Raises:
        UserError: naming flag, value, rule and what would work.
    """
    if config.longseq_tensor_parallel == "metp":
        check_metp(config)
    check_linear(config)
    check_hybrid_pattern(config)
    check_latent_attention(config)
    check_two_d_attention(config)
    check_keep_attention(config)


def check_two_d_attention(config: TransformerConfig) -> None:
    """Checks what 2D attention needs of a config, for those who build one themselves too.

    Raises:
        UserError: naming flag, value, rule and what would work.
    """
    if config.longseq_context_parallel != "2d":
        return
    split = factorisation(config, config.longseq_head_parallel_size)
    if config.longseq_tensor_parallel != "metp":
        ring_windows(config, split)
    for name, allowed in (
        ("experimental_attention_variant", None),
        ("qk_clip", False),
        ("log_max_attention_logit", False),
    ):
        value = getattr(config, name, allowed)
        if value != allowed:
            raise UserError(
                f"{flag_of(name)} {value}: --longseq-context-parallel 2d does not know it; "
                f"it works with {allowed}"
            )

    dropout = config.attention_dropout
    if dropout > 0 and config.longseq_attention_kernel != "reference":
        raise UserError(
            f"--attention-dropout {dropout}: --longseq-context-parallel 2d drops weights in the "
            "plain torch kernel alone, several times slower than a flash kernel; use "
            "--attention-dropout 0, or --longseq-attention-kernel reference"
        )
    check_window(getattr(config, "window_size", None))


def check_latent_attention(config: TransformerConfig) -> None:
    """Checks multi-latent attention where Megatron's local layers compute it.

    Raises:
        UserError: they have no core attention for it, or would train on wrong gradients.
    """
    if not config.multi_latent_attention or config.transformer_impl != "local":
        return
    if config.longseq_context_parallel != "2d":
        raise UserError(
            "--multi-latent-attention: Megatron's local layers have no core attention for it; add "
            "--longseq-context-parallel 2d, or use Transformer Engine's layers"
        )
    tensor = config.tensor_model_parallel_size
    if tensor > 1:
        raise UserError(
            f"--tensor-model-parallel-size {tensor}: with --multi-latent-attention Megatron's "
            "local layers do not add up, over these ranks, the gradient of the key that all heads "
            "share; use 1, or Transformer Engine's layers"
        )


def check_window(sizes: Any) -> None:
    """Checks ``--window-size`` for 2D attention.

    Raises:
        UserError: it looks ahead, or is neither a number of tokens nor -1.
    """
    if sizes is None:
        return
    before, after = sizes
    if after != 0 or before < -1:
        raise UserError(
            f"--window-size {before},{after}: with --longseq-context-parallel 2d a token sees as "
            "many tokens before it as the first number says (-1: all) and none after it: the "
            f"second is 0; nearest: {max(before, -1)},0"
        )


def factorisation(config: TransformerConfig, head_parallel: int | None) -> Factorisation:
    """How 2D attention splits the context-parallel ranks of this config; see ``factorise``.

    METP rings over all of them, whatever the heads.
    """
    if config.longseq_tensor_parallel == "metp":
        head_parallel = 1
    tensor = config.tensor_model_parallel_size
    groups = config.num_query_groups or config.num_attention_heads
    return factorise(
        context_parallel=config.context_parallel_size,
        heads=config.num_attention_heads // tensor,
        kv_heads=max(1, groups // tensor),
        tensor_parallel=tensor,
        ranks_per_node=ranks_per_node(),
        head_parallel=head_parallel,
    )


def ring_windows(config: Any, split: Factorisation) -> RingWindows:
    """Whether the ring of 2D attention is a double one; see ``choose_windows``.

    Args:
        config: a transformer config, or arguments.
        split: of its context-parallel ranks.
    """
    return choose_windows(
        ring=split.ring,
        head_parallel=split.head_parallel,
        tensor_parallel=config.tensor_model_parallel_size,
        ranks_per_node=ranks_per_node(),
        context_first=config.longseq_placement == "context-first",
        cards_per_node=config.longseq_network_cards_per_node,
        window=config.longseq_ring_window_size,
    )


def ranks_per_node() -> int:
    """Ranks that share this machine, as torchrun tells them; one if nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def options() -> list[dataclasses.Field]:
    """The fields of :class:`LongSeqTransformerConfig` that are this package's own."""
    return [f for f in dataclasses.fields(LongSeqTransformerConfig) if "longseq" in f.metadata]


def flag_of(name: str) -> str:
    """The command-line flag of an argument name: ``num_layers`` -> ``--num-layers``."""
    return "--" + name.replace("_", "-")


def check_options(values: dict[str, Any]) -> None:
    """Checks each option by itself; raises :class:`UserError` naming flag, value and rule."""
    timeout = values["longseq_comm_timeout_seconds"]
    if not 0 < timeout <= MOST_SECONDS:
        raise UserError(
            f"{flag_of('longseq_comm_timeout_seconds')} {timeout}: must be more than 0 and at most "
            f"{MOST_SECONDS:g} seconds"
        )
    parse_min_tokens(values["longseq_metp_min_tokens"])
    for name in (
        "longseq_metp_shards_per_step",
        "longseq_mlp_tiles",
        "longseq_sequence_chunks",
        "longseq_ring_window_size",
        "longseq_network_cards_per_node",
    ):
        check_at_least_one(flag_of(name), values[name])
    for name in SHARES:
        if not 0 < values[name] <= 1:
            raise UserError(f"{flag_of(name)} {values[name]}: must be more than 0 and at most 1")
    for field in options():
        choices = field.metadata["longseq"].get("choices")
        value = values[field.name]
        if choices is not None and value not in choices:
            raise UserError(
                f"{flag_of(field.name)} {value}: must be one of {', '.join(map(str, choices))}"
            )
