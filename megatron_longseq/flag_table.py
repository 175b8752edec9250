"""Every Megatron flag that meets this package: takes effect, mapped, or refused.

The table is data, used three times: :mod:`megatron_longseq.arguments` sets the mapped defaults and
refuses what is refused, the start-up lines print what was mapped, and ``docs/flags.md`` is made
from it (``python -m megatron_longseq.flag_table > docs/flags.md``; a test compares the two).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from . import cpu_platform
from .lasp.presets import PRESETS
from .lasp.requirements import (
    MEGATRON_SIZES,
    NOT_IN_CHUNKS,
    SOFTMAX_ONLY,
    linear_layers,
)
from .lasp.requirements import UNSUPPORTED as NOT_LINEAR
from .memory.requirements import UNSUPPORTED as NOT_KEPT
from .metp.requirements import UNSUPPORTED
from .unsupported import Unsupported

Effect = Literal["takes effect", "mapped", "refused"]


@dataclass(frozen=True)
class FlagRule:
    """What happens to one Megatron flag.

    Attributes:
        flag: as the user writes it.
        name: its name in Megatron's arguments.
        effect: what happens.
        when: the condition, in words.
        reason: why, and for a refusal what to do instead.
        default: for ``mapped``: the default this package sets.
        refuses: for ``refused``: given the arguments, says whether this rule refuses them. It is
            asked only if the user gave the flag.
    """

    flag: str
    name: str
    effect: Effect
    when: str
    reason: str
    default: Any = None
    refuses: Callable[[Any], bool] | None = None


def _local(args: Any) -> bool:
    return args.transformer_impl == "local"


def _two_d(args: Any) -> bool:
    return args.longseq_context_parallel == "2d"


def _metp(args: Any) -> bool:
    return args.longseq_tensor_parallel == "metp"


def _linear(args: Any) -> bool:
    return args.longseq_linear_attention != "none"


def _all_linear(args: Any) -> bool:
    return _linear(args) and args.num_layers is not None and all(linear_layers(args))


def _keeps_attention(args: Any) -> bool:
    return args.longseq_keep_attention_output


def _convolves(args: Any) -> bool:
    return _linear(args) and PRESETS[args.longseq_linear_attention].convolution


def _chunked(args: Any) -> bool:
    return args.longseq_sequence_chunks > 1


def _not_where(asked: Callable[[Any], bool], when: str, option: Unsupported) -> FlagRule:
    """A refusal of what a method does not work with, where the method is asked for."""
    return FlagRule(
        option.flag,
        option.name,
        "refused",
        when,
        option.reason,
        refuses=lambda args: asked(args) and option.rejects(getattr(args, option.name)),
    )


def _looks_ahead(sizes: Any) -> bool:
    return sizes is not None and (sizes[1] != 0 or sizes[0] < -1)


def _always(_args: Any) -> bool:
    return True


RULES: tuple[FlagRule, ...] = (
    FlagRule(
        "--yaml-cfg",
        "yaml_cfg",
        "refused",
        "always",
        "it replaces all arguments, this package's own included; "
        "use `longseq train --config FILE`, whose keys are the same flags",
        refuses=_always,
    ),
    FlagRule(
        "--heterogeneous-layers-config-path",
        "heterogeneous_layers_config_path",
        "refused",
        "always",
        "Megatron then uses a config class of its own, without this package's options; "
        "run Megatron's own pretrain_gpt.py",
        refuses=_always,
    ),
    FlagRule(
        "--sft",
        "sft",
        "refused",
        "always",
        "its data set is not built here; pretrain on packed documents with "
        "--dataloader-inter-document-masking",
        refuses=_always,
    ),
    FlagRule(
        "--fim-data",
        "fim_data",
        "refused",
        "always",
        "the data set for filling in the middle is not built here; "
        "run Megatron's own pretrain_gpt.py",
        refuses=_always,
    ),
    FlagRule(
        "--dataloader-inter-document-masking",
        "dataloader_inter_document_masking",
        "takes effect",
        "with --longseq-context-parallel 2d, or --longseq-linear-attention in all layers",
        "a token sees its own document only; rows are split as a whole, documents are cut "
        "anywhere, and blocks of keys that no document reaches do not travel. Position ids begin "
        "anew with each document",
    ),
    *(
        FlagRule(
            "--dataloader-inter-document-masking",
            "dataloader_inter_document_masking",
            "refused",
            when,
            reason,
            refuses=refuses,
        )
        for when, reason, refuses in (
            (
                "with --multi-latent-attention",
                "Megatron's latent attention takes documents for rows laid one behind the other; "
                "leave one of the two out",
                lambda args: args.multi_latent_attention,
            ),
            (
                "where neither 2D nor linear attention computes a layer",
                "Megatron's own attention would let documents see one another here; use "
                "--longseq-context-parallel 2d",
                lambda args: not _two_d(args) and not _all_linear(args),
            ),
            (
                "with --longseq-tensor-parallel metp",
                "METP's ring does not know documents; use --longseq-tensor-parallel megatron",
                _metp,
            ),
            (
                "with --mtp-num-layers",
                "Megatron shifts packed rows document by document, which are cut anywhere here; "
                "leave out one of them",
                lambda args: args.mtp_num_layers is not None,
            ),
            (
                "with --longseq-sequence-chunks greater than 1",
                "states pass from chunk to chunk, whatever documents end there; use 1",
                _chunked,
            ),
            (
                "with a convolution in linear layers",
                "it would mix the ends of documents; choose a model without one: "
                + ", ".join(name for name, preset in PRESETS.items() if not preset.convolution),
                _convolves,
            ),
        )
    ),
    FlagRule(
        "--hybrid-context-parallel",
        "hybrid_context_parallel",
        "refused",
        "always",
        "groups that change with each sequence are not built here; leave it out",
        refuses=_always,
    ),
    FlagRule(
        "--reset-attention-mask",
        "reset_attention_mask",
        "refused",
        "always",
        "it needs a mask of s x s entries, which is never built here; "
        "documents attend across their borders, as in Megatron's default",
        refuses=_always,
    ),
    FlagRule(
        "--no-create-attention-mask-in-dataloader",
        "create_attention_mask_in_dataloader",
        "mapped",
        "always",
        "no layer here reads a mask of s x s entries; at long sequences building it is the first "
        "thing that runs out of memory",
        default=False,
    ),
    FlagRule(
        "--attention-dropout",
        "attention_dropout",
        "mapped",
        "default 0.0 instead of 0.1; a value given takes effect",
        "dropout makes two layouts differ: each rank draws its own numbers",
        default=0.0,
    ),
    FlagRule(
        "--attention-dropout",
        "attention_dropout",
        "refused",
        "greater than 0 with --longseq-context-parallel 2d, without --longseq-attention-kernel "
        "reference",
        "which weights are dropped follows from their places, so that backward and every layout "
        "drop the same; only the plain torch kernel does that, several times slower than a flash "
        "kernel: use --attention-dropout 0, or --longseq-attention-kernel reference",
        refuses=lambda args: (
            args.attention_dropout > 0
            and _two_d(args)
            and args.longseq_attention_kernel != "reference"
        ),
    ),
    FlagRule(
        "--attention-dropout",
        "attention_dropout",
        "refused",
        "greater than 0 with --longseq-linear-attention in all layers",
        "only softmax attention drops weights; leave it out",
        refuses=lambda args: args.attention_dropout > 0 and _all_linear(args),
    ),
    FlagRule(
        "--hybrid-override-pattern",
        "hybrid_override_pattern",
        "refused",
        "always",
        "it is Megatron's old name of --hybrid-layer-pattern; use that",
        refuses=lambda args: args.hybrid_override_pattern is not None,
    ),
    FlagRule(
        "--window-size",
        "window_size",
        "takes effect",
        "with --longseq-context-parallel 2d, the second number being 0",
        "W,0: a token sees W tokens before it, in the layers that --window-attn-skip-freq leaves; "
        "blocks of keys beyond the window do not travel",
    ),
    FlagRule(
        "--window-size",
        "window_size",
        "refused",
        "with --longseq-context-parallel 2d, unless the second number is 0 and the first at least "
        "-1",
        "a token sees none after it; use W,0",
        refuses=lambda args: _two_d(args) and not _metp(args) and _looks_ahead(args.window_size),
    ),
    FlagRule(
        "--softmax-type",
        "softmax_type",
        "takes effect",
        "with --longseq-context-parallel 2d",
        "learnable: a logit per query head, Megatron's `softmax_offset`, in its checkpoints too",
    ),
    *(
        FlagRule(
            flag,
            name,
            "refused",
            "with --longseq-context-parallel 2d",
            "2D attention does not know it; leave it out, or use --longseq-context-parallel "
            "megatron",
            refuses=_two_d,
        )
        for flag, name in (
            ("--qk-clip", "qk_clip"),
            ("--log-max-attention-logit", "log_max_attention_logit"),
            ("--experimental-attention-variant", "experimental_attention_variant"),
        )
    ),
    FlagRule(
        "--hidden-dropout",
        "hidden_dropout",
        "mapped",
        "default 0.0 instead of 0.1; a value given takes effect",
        "dropout makes two layouts differ: each rank draws its own numbers",
        default=0.0,
    ),
    FlagRule(
        "--eval-interval",
        "eval_interval",
        "mapped",
        "default 1000; a value given takes effect",
        "without one Megatron stops with a TypeError once the model is built",
        default=1000,
    ),
    FlagRule(
        "--context-parallel-size",
        "context_parallel_size",
        "refused",
        "greater than 1 with --longseq-context-parallel megatron and local layers of softmax "
        "attention or METP",
        "Megatron's local attention cannot split a sequence, and METP's is not Megatron's; use "
        "--longseq-context-parallel 2d, --context-parallel-size 1, or, without METP, "
        "--transformer-impl transformer_engine on a GPU",
        refuses=lambda args: (
            args.context_parallel_size > 1
            and (_local(args) or _metp(args))
            and not _two_d(args)
            and not _all_linear(args)
        ),
    ),
    FlagRule(
        "--context-parallel-size",
        "context_parallel_size",
        "takes effect",
        "with --longseq-context-parallel 2d",
        "head-parallel x ring; the factorisation is chosen, or --longseq-head-parallel-size's. "
        "With --longseq-tensor-parallel metp one ring over all tensor- and context-parallel ranks",
    ),
    FlagRule(
        "--context-parallel-size",
        "context_parallel_size",
        "takes effect",
        "with --longseq-linear-attention",
        "linear layers pass states on; layers of softmax attention among them need "
        "--longseq-context-parallel 2d",
    ),
    *(
        _not_where(_metp, "with --longseq-tensor-parallel metp", option)
        for option in UNSUPPORTED
        if not option.config_only
    ),
    *(_not_where(_linear, "with --longseq-linear-attention", option) for option in NOT_LINEAR),
    *(
        _not_where(_all_linear, "with --longseq-linear-attention in all layers", option)
        for option in SOFTMAX_ONLY
    ),
    *(
        _not_where(_chunked, "with --longseq-sequence-chunks greater than 1", option)
        for option in NOT_IN_CHUNKS
        if not option.config_only
    ),
    *(
        _not_where(_keeps_attention, "with --longseq-keep-attention-output", option)
        for option in NOT_KEPT
        if option.name != "recompute_granularity"
    ),
    FlagRule(
        "--group-query-attention",
        "group_query_attention",
        "refused",
        "with --longseq-linear-attention in all layers",
        "heads of linear layers are --linear-num-key-heads and --linear-num-value-heads; leave it "
        "out",
        refuses=_all_linear,
    ),
    FlagRule(
        "--linear-attention-freq",
        "linear_attention_freq",
        "takes effect",
        "with --longseq-linear-attention",
        "N: every N-th layer has softmax attention; a list: 1 is a linear layer; none: all are",
    ),
    *(
        FlagRule(
            "--" + name.replace("_", "-"),
            name,
            "mapped",
            "default: as softmax attention, with --longseq-linear-attention; Megatron's, without",
            "a model's linear layers are then as wide as its others",
        )
        for name in MEGATRON_SIZES
    ),
    FlagRule(
        "--recompute-granularity",
        "recompute_granularity",
        "takes effect",
        "selective or full, with every layer of ours",
        "a recomputed attention repeats its communication, in the same order on all ranks; under "
        "METP `--recompute-modules` layernorm saves most, core_attn saves nothing",
    ),
    FlagRule(
        "--sequence-parallel",
        "sequence_parallel",
        "takes effect",
        "also where neither NVIDIA Apex nor Transformer Engine is installed",
        "Megatron's PyTorch norm refuses it; this package's norm takes its place. METP needs it",
    ),
    FlagRule(
        "--calculate-per-token-loss",
        "calculate_per_token_loss",
        "takes effect",
        "with every layer of ours",
        "without it Megatron divides by each context-parallel rank's own count of tokens: exact "
        "only where all have as many unmasked ones",
    ),
    FlagRule(
        "--cp-comm-type",
        "cp_comm_type",
        "refused",
        "with local layers, or with --longseq-context-parallel 2d",
        "only Transformer Engine's attention reads it; leave it out",
        refuses=lambda args: _local(args) or _two_d(args),
    ),
    FlagRule(
        "--hierarchical-context-parallel-sizes",
        "hierarchical_context_parallel_sizes",
        "refused",
        "if given, with local layers or with --longseq-context-parallel 2d",
        "2D attention sets it: use --longseq-head-parallel-size; otherwise only Transformer "
        "Engine's attention reads it: leave it out",
        refuses=lambda args: _local(args) or _two_d(args),
    ),
    FlagRule(
        "--attention-backend",
        "attention_backend",
        "refused",
        "with local layers or --longseq-context-parallel 2d, unless auto or unfused",
        "only Transformer Engine's attention has other backends; leave it out, or choose the "
        "kernel of 2D attention with --longseq-attention-kernel",
        refuses=lambda args: (
            (_local(args) or _two_d(args))
            and getattr(args.attention_backend, "name", args.attention_backend)
            not in ("auto", "unfused")
        ),
    ),
    FlagRule(
        "--dist-ckpt-optim-fully-reshardable",
        "dist_ckpt_optim_fully_reshardable",
        "mapped",
        "always; matters with --use-distributed-optimizer",
        "a checkpoint with optimizer state then loads into any tensor- and pipeline-parallel size",
        default=True,
    ),
)


def mapped_defaults() -> dict[str, Any]:
    """Argument name -> default, for every rule that maps without a further condition."""
    return {rule.name: rule.default for rule in RULES if rule.effect == "mapped"}


def as_markdown() -> str:
    """The table as a page of the documentation."""
    lines = [
        "# Megatron flags that meet ours",
        "",
        "A flag that is given takes effect or stops the run before the first step. Flags of",
        "Megatron that are not named here are Megatron's own and work as there; what this package",
        "set by itself is in the start-up lines.",
        "",
        "| flag | effect | when | why, and what to do |",
        "|---|---|---|---|",
    ]
    for rule in RULES:
        lines.append(f"| `{rule.flag}` | {rule.effect} | {rule.when} | {rule.reason} |")
    lines += [
        "",
        "## On a CPU",
        "",
        "Set by default, and refused if given otherwise (but for `num_workers`): "
        + ", ".join(f"`{name}={value}`" for name, value in cpu_platform.ARGUMENTS.items())
        + ".",
        "",
        "Refused, because they ask a GPU or its driver for something: arguments "
        + ", ".join(f"`{name}`" for name in cpu_platform.NEEDS_GPU)
        + "; and `--num-experts` without `--disable-bias-linear`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
