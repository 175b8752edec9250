"""What keeping attention's results through a full recompute needs of a run."""

from typing import Any

from ..errors import UserError
from ..unsupported import check_unsupported, unsupported

FLAG = "--longseq-keep-attention-output"
# Options that only it reads: shares, and where it is kept.
SHARES = ("longseq_keep_attention_layers", "longseq_keep_attention_tokens")
OPTIONS = (*SHARES, "longseq_keep_attention_offload")

UNSUPPORTED = (
    unsupported(
        "recompute_granularity",
        "it keeps attention through a recompute of whole layers, and without one attention is kept "
        "anyway, with selective recompute too (but for core_attn, which is its opposite); use "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "full",
        refuses=lambda value: value != "full",
    ),
    unsupported(
        "fp8", "its checkpoints are Transformer Engine's; leave it out", None, flag="--fp8-format"
    ),
    unsupported(
        "fp4", "its checkpoints are Transformer Engine's; leave it out", None, flag="--fp4-format"
    ),
    unsupported("mtp_num_layers", "these layers recompute by themselves; leave it out", None),
    unsupported("cuda_graph_impl", "a graph replays both runs of a layer; leave it out", "none"),
)


def check_keep_attention(config: Any) -> None:
    """Checks a transformer config, or the arguments of a run.

    Raises:
        UserError: naming flag, value, rule and what would work.
    """
    if not config.longseq_keep_attention_output:
        return
    if getattr(config, "longseq_own_recompute", None) is not None:
        return  # has been checked, and taken over, before
    check_unsupported(config, UNSUPPORTED, FLAG)
    stock = ("longseq_context_parallel", "longseq_tensor_parallel")
    if config.longseq_linear_attention == "none" and all(
        getattr(config, name) == "megatron" for name in stock
    ):
        raise UserError(
            f"{FLAG}: keeps what this package's attention has computed, and all layers are "
            "Megatron's; add --longseq-context-parallel 2d, --longseq-tensor-parallel metp or "
            "--longseq-linear-attention MODEL"
        )
    tokens = config.longseq_keep_attention_tokens
    if tokens < 1 and (
        config.longseq_context_parallel != "2d" or config.longseq_tensor_parallel == "metp"
    ):
        raise UserError(
            f"--longseq-keep-attention-tokens {tokens}: only layers of 2D attention can keep a "
            "part of their tokens; leave it out"
        )
    layers = config.recompute_num_layers
    if config.recompute_method == "uniform" and layers not in (None, 1):
        raise UserError(
            f"--recompute-num-layers {layers}: with {FLAG} every layer keeps its own input; use 1, "
            "or --recompute-method block, which recomputes the first N layers of a stage"
        )


def take_over_recompute(config: Any) -> tuple[str, int | None]:
    """Takes the recompute of layers over from Megatron's block: it must not do it as well.

    Returns:
        The method and the number of layers that were asked for.
    """
    own = getattr(config, "longseq_own_recompute", None)
    if own is None:
        own = config.recompute_method or "uniform", config.recompute_num_layers
        config.longseq_own_recompute = own
        config.recompute_granularity = None
    return own
