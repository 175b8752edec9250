"""Command-line flags <-> config; nothing else in this package touches argparse.

:func:`extra_arguments` is what Megatron's ``extra_args_provider`` takes. It adds this package's
flags, sets the defaults that the flag table maps, and then checks the whole command line right
there: before Megatron's own checks, which end in bare assertions, and before any process group.
Whoever gives it to Megatron, be it our entry point or a user's own script, gets the same checks.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import cpu_platform, flag_table
from .attention_2d.factorisation import Factorisation, factorise
from .config import check_options, flag_of, options, ranks_per_node, ring_windows
from .errors import UserError
from .lasp.requirements import (
    MEGATRON_SIZES,
    MODEL_OPTIONS,
    RUN_OPTIONS,
    check_hybrid_pattern,
    check_length,
    check_linear,
    check_positions,
    preset_of,
)
from .layout_checks import check_layout, listed
from .memory import zero_presets
from .memory.requirements import FLAG as KEEP_FLAG
from .memory.requirements import OPTIONS as KEEP_OPTIONS
from .memory.requirements import check_keep_attention
from .metp.requirements import check_metp, check_sequence
from .placement import Grid, permute_rank
from .sequence_padding import SAMPLE_LENGTH, pad_arguments, pad_option, sample_length

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


# Options that only 2D attention reads.
TWO_D_OPTIONS = (
    "longseq_ring_window_size",
    "longseq_backward_ring",
    "longseq_ring_gradient_dtype",
    "longseq_placement",
    "longseq_network_cards_per_node",
)

# Options that only a ring of more than one rank reads.
RING_OPTIONS = ("longseq_backward_ring", "longseq_ring_gradient_dtype")

# Options that only METP reads.
METP_OPTIONS = ("longseq_metp_min_tokens", "longseq_metp_shards_per_step", "longseq_mlp_tiles")


def extra_arguments(then: Provider | None = None, *, argv: Sequence[str] | None = None) -> Provider:
    """Returns an ``extra_args_provider`` that adds this package's flags and checks everything.

    Args:
        then: the user's own provider, called first.
        argv: what to check; default ``sys.argv[1:]``, which Megatron parses.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if then is not None:
            parser = then(parser)
        add_arguments(parser)
        args = check_command_line(parser, sys.argv[1:] if argv is None else argv)
        if args.longseq_pad_sequence:
            pad_option(parser, args.seq_length)
        parser.set_defaults(**derived_arguments(args))
        if args.longseq_placement == "context-first":
            split = _factorisation(args)
            grid = Grid(args.tensor_model_parallel_size, split.head_parallel, split.ring)
            permute_rank(args.longseq_placement, grid)  # Megatron reads RANK when this returns
        return parser

    return provide


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of :mod:`megatron_longseq.config` and sets the mapped defaults."""
    group = parser.add_argument_group("megatron_longseq")
    for field in options():
        described = dict(field.metadata["longseq"])
        group.add_argument(flag_of(field.name), default=field.default, **described)
    defaults = flag_table.mapped_defaults()
    if cpu_platform.is_installed():
        defaults |= cpu_platform.ARGUMENTS
    parser.set_defaults(**defaults)


def check_command_line(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses ``argv`` and checks it; returns the arguments.

    Raises:
        UserError: with flag, value, rule and what would work.
    """
    raise_instead_of_exiting(parser)
    args = parser.parse_args(argv)
    given = given_arguments(parser, argv)
    _apply_zero_preset(args, given)
    if args.longseq_pad_sequence:
        pad_arguments(args)
    if args.hybrid_layer_pattern is not None:  # as Megatron will
        args.num_layers = len(args.hybrid_layer_pattern.split("/")[0].replace("|", ""))
    check_options({field.name: getattr(args, field.name) for field in options()})
    _check_refusals(args, given)
    if cpu_platform.is_installed():
        _check_cpu(parser, args, given)
    check_layout(args, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    _check_metp(args, given)
    check_hybrid_pattern(args)
    _check_linear(args, given)
    _check_two_d_attention(args, given)
    if not args.longseq_keep_attention_output:
        _refuse_without(given, KEEP_OPTIONS, KEEP_FLAG)
    check_keep_attention(args)
    return args


def _apply_zero_preset(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Sets the arguments of ``--longseq-zero`` before anything is checked against them."""
    if args.longseq_zero not in zero_presets.NAMES:
        return  # check_options names those there are
    chosen = zero_presets.preset_arguments(args, over_gloo=cpu_platform.is_installed())
    zero_presets.check_given(args.longseq_zero, chosen, given)
    vars(args).update(chosen)
    given |= chosen  # as if they had been given: other methods may refuse them


def derived_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of Megatron's and ours that follow from others; they become the defaults.

    2D attention lets Megatron build both dimensions of its groups, by the two levels of
    ``--hierarchical-context-parallel-sizes``. Over gloo, interleaved pipelines of more than two
    stages send and receive in turn: overlapped, they were seen to race.
    """
    derived: dict[str, Any] = zero_presets.preset_arguments(
        args, over_gloo=cpu_platform.is_installed()
    )
    if args.longseq_pad_sequence:
        derived[SAMPLE_LENGTH] = sample_length(args)
    if cpu_platform.is_installed() and (args.use_megatron_fsdp or args.use_torch_fsdp2):
        # Megatron wants more than one connection of a GPU then, and counts those of a CPU.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    interleaved = (
        args.num_virtual_stages_per_pipeline_rank or args.num_layers_per_virtual_pipeline_stage
    )
    if cpu_platform.is_installed() and interleaved and args.pipeline_model_parallel_size > 2:
        derived["overlap_p2p_comm"] = False
    if args.longseq_linear_attention == "none":
        # For Megatron's own linear layers, whose sizes have other defaults.
        derived |= {n: v for n, v in MEGATRON_SIZES.items() if getattr(args, n) is None}
    if args.longseq_context_parallel != "2d" or args.context_parallel_size == 1:
        return derived
    chosen = _factorisation(args)
    return derived | {
        "longseq_head_parallel_size": chosen.head_parallel,
        "hierarchical_context_parallel_sizes": [chosen.head_parallel, chosen.ring],
    }


def _factorisation(args: argparse.Namespace) -> Factorisation:
    if args.longseq_tensor_parallel == "metp":
        args.longseq_head_parallel_size = 1  # one ring over all ranks, whatever the heads
    tensor, heads = args.tensor_model_parallel_size, args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    return factorise(
        context_parallel=args.context_parallel_size,
        heads=heads // tensor,
        kv_heads=max(1, groups // tensor),
        tensor_parallel=tensor,
        ranks_per_node=ranks_per_node(),
        head_parallel=args.longseq_head_parallel_size,
    )


def given_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The arguments that ``argv`` sets itself, without any default."""
    defaults = [(action, action.default) for action in parser._actions]
    parser_defaults = dict(parser._defaults)
    try:
        for action, _ in defaults:
            action.default = argparse.SUPPRESS
        parser._defaults.clear()
        return vars(parser.parse_args(argv))
    finally:
        for action, default in defaults:
            action.default = default
        parser._defaults.update(parser_defaults)


def mapped_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What this package set by itself and still holds in ``args``; for the start-up lines."""
    defaults = flag_table.mapped_defaults()
    if cpu_platform.is_installed():
        defaults |= cpu_platform.ARGUMENTS
    return {name: value for name, value in defaults.items() if getattr(args, name, None) == value}


# --- checks -----------------------------------------------------------------------------------


def _check_refusals(args: argparse.Namespace, given: dict[str, Any]) -> None:
    for rule in flag_table.RULES:
        if rule.refuses is not None and rule.name in given and rule.refuses(args):
            value = given[rule.name]
            shown = "" if isinstance(value, bool) else f" {_shown(value)}"
            raise UserError(f"{rule.flag}{shown} is refused ({rule.when}): {rule.reason}")


def _check_cpu(
    parser: argparse.ArgumentParser, args: argparse.Namespace, given: dict[str, Any]
) -> None:
    """Refuses what a CPU cannot do, instead of letting the run fail somewhere inside Megatron."""
    for name, needed in cpu_platform.ARGUMENTS.items():
        if name == "num_workers" or name not in given or given[name] == needed:
            continue
        raise UserError(
            f"{_flag_in(parser, name)} {_shown(given[name])}: on a CPU it must be {needed}; "
            "leave it out, or run on a GPU"
        )
    for name in cpu_platform.NEEDS_GPU:
        if given.get(name) not in (None, False, 0, "none"):
            raise UserError(f"{_flag_in(parser, name)}: needs a GPU; leave it out on a CPU")
    if args.use_megatron_fsdp:
        for name, what in (("save", "writing its checkpoints"), ("load", "reading them")):
            if getattr(args, name) is not None:
                raise UserError(
                    f"--{name} {getattr(args, name)}: over gloo {what} under Megatron-FSDP was "
                    "seen to hang; leave it out, use --longseq-zero zero1, or run on GPUs"
                )
        if args.recompute_granularity == "full":
            raise UserError(
                "--recompute-granularity full: under Megatron-FSDP it asks for a GPU inside of "
                "backward; leave it out, use --longseq-zero zero1, or run on GPUs"
            )
    if args.num_experts is not None and args.add_bias_linear:
        raise UserError(
            f"--num-experts {args.num_experts}: without Transformer Engine, Megatron's experts "
            "cannot have biases; add --disable-bias-linear"
        )


def _check_metp(args: argparse.Namespace, given: dict[str, Any]) -> None:
    if args.longseq_tensor_parallel != "metp":
        _refuse_without(given, METP_OPTIONS, "--longseq-tensor-parallel metp")
        return
    check_metp(args)
    check_sequence(args.seq_length, args.tensor_model_parallel_size, args.context_parallel_size)


def _check_linear(args: argparse.Namespace, given: dict[str, Any]) -> None:
    if args.longseq_linear_attention == "none":
        _refuse_without(
            given, [*MODEL_OPTIONS[1:], *RUN_OPTIONS], "--longseq-linear-attention MODEL"
        )
        return
    check_linear(args)
    rotary = "rope" if args.use_rotary_position_embeddings else args.position_embedding_type
    check_positions(args, rotary, args.rotary_percent)
    check_length(args)
    preset = preset_of(args)
    assert preset is not None
    if "linear_conv_kernel_dim" in given and not preset.convolution:
        raise UserError(
            f"--linear-conv-kernel-dim {args.linear_conv_kernel_dim}: "
            f"--longseq-linear-attention {preset.name} has no convolution; leave it out"
        )
    if args.context_parallel_size == 1:
        _refuse_without(
            given,
            ["longseq_scan", "longseq_linear_layout"],
            "--context-parallel-size greater than 1",
        )


def _refuse_without(given: dict[str, Any], names: Iterable[str], needed: str) -> None:
    for name in names:
        if name in given:
            raise UserError(
                f"{flag_of(name)} {given[name]}: has no effect without {needed}; add that, or "
                "leave it out"
            )


def _check_two_d_attention(args: argparse.Namespace, given: dict[str, Any]) -> None:
    if args.longseq_context_parallel != "2d" or args.longseq_tensor_parallel == "metp":
        _refuse_without(
            given, TWO_D_OPTIONS, "--longseq-context-parallel 2d and Megatron's tensor parallelism"
        )
    if args.longseq_context_parallel != "2d":
        _refuse_without(given, ["longseq_head_parallel_size"], "--longseq-context-parallel 2d")
        if args.longseq_tensor_parallel != "metp":
            _refuse_without(
                given,
                ["longseq_attention_kernel"],
                "--longseq-context-parallel 2d or --longseq-tensor-parallel metp",
            )
        return
    if args.longseq_head_parallel_size is not None and args.context_parallel_size == 1:
        raise UserError(
            f"--longseq-head-parallel-size {args.longseq_head_parallel_size}: "
            "--context-parallel-size is 1; give as many ranks as head-parallel x ring needs"
        )
    if args.context_parallel_size == 1:
        _refuse_without(given, TWO_D_OPTIONS, "--context-parallel-size greater than 1")
    elif args.num_attention_heads is not None:
        split = _factorisation(args)
        if split.ring == 1:
            more = f"a ring: --longseq-head-parallel-size less than {split.head_parallel}"
            _refuse_without(given, RING_OPTIONS, more)
        if args.attention_dropout > 0 and args.longseq_backward_ring == "queries":
            raise UserError(
                f"--longseq-backward-ring queries: with --attention-dropout "
                f"{args.attention_dropout} keys go round, as each rank knows what its own queries "
                "drop; use auto or keys"
            )
        if args.longseq_tensor_parallel != "metp":
            ring_windows(args, split)


def _flag_in(parser: argparse.ArgumentParser, name: str) -> str:
    """The flag that sets an argument: mostly, but not always, its name with dashes."""
    for action in parser._actions:
        if action.dest == name and action.option_strings:
            return action.option_strings[0]
    return flag_of(name)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(getattr(value, "name", value))


def raise_instead_of_exiting(parser: argparse.ArgumentParser) -> None:
    """Makes this parser raise :class:`UserError` where argparse prints pages of usage and exits."""

    def error(message: str) -> None:
        prefix = "unrecognized arguments: "
        if not message.startswith(prefix):
            raise UserError(message)
        unknown = message.removeprefix(prefix).split()
        flags = [flag for flag in unknown if flag.startswith("--")]
        if not flags:
            raise UserError(f"{unknown[0]}: belongs to no flag")
        known = [text for action in parser._actions for text in action.option_strings]
        raise UserError(unknown_flag_message(flags[0].split("=")[0], known))

    parser.error = error  # type: ignore[assignment, method-assign]


def unknown_flag_message(flag: str, known: Sequence[str]) -> str:
    """Says that a flag is unknown and which known one was probably meant."""
    close = difflib.get_close_matches(flag, known, n=3, cutoff=0.6)
    return f"{flag}: there is no such flag" + (f"; nearest: {listed(close)}" if close else "")
