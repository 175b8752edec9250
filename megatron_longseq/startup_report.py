"""The start-up lines: what runs where, read off the model that was really built.

Nothing here is an intention: layer kinds and their modules come from the built model, groups from
Megatron's process groups, local shapes from the config. Printed once, by rank 0.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args

from . import __version__, arguments, compat, cpu_platform
from .config import factorisation, ring_windows
from .lasp.flops import throughput_factor
from .memory import zero_presets
from .memory.recomputed_layer import RecomputedLayer
from .metp.overlap import LayerShape, describe, gradient_bytes, measure
from .metp.self_attention import METPSelfAttention
from .placement import check_nodes, node_of_this_process, placement_lines
from .softmax.block_kernels import choose_kernel

# Rows longer than this are cut in the middle: a thousand ranks need no thousand numbers.
_SHOWN_GROUPS = 4
_SHOWN_RANKS = 8


def print_report_hook(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """A ``pre_wrap_hook`` of Megatron's model config: prints the report, returns the models."""
    args = get_args()
    groups = describe_groups()  # every rank takes part: it gathers
    groups += describe_placement(models[0].config)
    groups += describe_overlap(models, args.seq_length, args.micro_batch_size)  # and this measures
    if dist.get_rank() == 0:
        print("\n".join(report_lines(models, groups)), flush=True)
    return models


def report_lines(models: list[torch.nn.Module], groups: list[str]) -> list[str]:
    """The report, one string a line; ``groups`` are the lines that all ranks have to make."""
    args = get_args()
    config: Any = models[0].config
    device = "CPU over gloo" if cpu_platform.is_installed() else torch.cuda.get_device_name()
    lines = [
        f"megatron_longseq {__version__} on megatron-core {compat.check_megatron_version()}, "
        f"torch {torch.__version__}, {device}"
    ]
    mapped = arguments.mapped_arguments(args)
    lines.append("  set by default: " + " ".join(_as_setting(n, v) for n, v in mapped.items()))
    if args.longseq_zero != "none":
        chosen = zero_presets.preset_arguments(args, over_gloo=cpu_platform.is_installed())
        lines.append(f"  {args.longseq_zero}: {zero_presets.describe(chosen)}")
    lines += [f"  {line}" for line in describe_layers(models)]
    lines += [f"  {line}" for line in groups]
    lines += [f"  {line}" for line in describe_factorisation(config)]
    lines.append("  " + describe_shapes(args, config))
    if args.log_throughput and config.longseq_linear_attention != "none":
        factor = throughput_factor(args, compat.flops_of_sequence)
        lines.append(
            "  --log-throughput counts linear layers as Megatron's: its TFLOP/s times "
            f"{factor:.4g} are this model's"
        )
    return lines


def describe_layers(models: list[torch.nn.Module]) -> list[str]:
    """One line per kind of layer on this rank: how many, and which modules do the work."""
    kinds: Counter[tuple[str, ...]] = Counter()
    for model in models:
        for module in model.modules():
            if isinstance(module, TransformerLayer):
                kinds[_layer_kind(module)] += 1
    return [
        f"{count} layer{'s' if count > 1 else ''} on this rank: {', '.join(kind)}"
        for kind, count in kinds.items()
    ]


def _layer_kind(layer: TransformerLayer) -> tuple[str, ...]:
    attention = layer.self_attention
    core = getattr(attention, "core_attention", None)
    method = _described(attention, "attention")
    if core is not None and not hasattr(attention, "describe"):
        method += f" with {describe_kernel(core)}"
    # A layer of a hybrid pattern is attention or an MLP, with its norm before it.
    kind = [] if isinstance(attention, IdentityOp) else [method]
    kind += [] if isinstance(layer.mlp, IdentityOp) else [_described(layer.mlp, "MLP")]
    norm = layer.pre_mlp_layernorm if isinstance(attention, IdentityOp) else layer.input_layernorm
    kind.append(f"norm {type(norm).__name__}")
    if isinstance(layer, RecomputedLayer):
        kind.append(layer.describe_recompute())
    return tuple(kind)


def _described(module: torch.nn.Module, what: str) -> str:
    """A module of ours describes itself; another is called by its class."""
    describe = getattr(module, "describe", None)
    return describe() if describe is not None else f"{what} {type(module).__name__}"


def describe_kernel(core_attention: torch.nn.Module) -> str:
    """Which code computes the scores; a core attention of ours describes itself."""
    describe = getattr(core_attention, "describe", None)
    if describe is not None:
        return describe()
    name = type(core_attention).__name__
    if name == "DotProductAttention":
        return "DotProductAttention (Megatron's, keeps s x s scores)"
    return name


def describe_groups() -> list[str]:
    """One line per kind of process group with more than one rank: all groups of that kind."""
    kinds = {
        "tensor parallel": mpu.get_tensor_model_parallel_group(),
        "context parallel": mpu.get_context_parallel_group(),
        "pipeline parallel": mpu.get_pipeline_model_parallel_group(),
        "data parallel": mpu.get_data_parallel_group(),
        "expert parallel": mpu.get_expert_model_parallel_group(),
    }
    levels = mpu.get_hierarchical_context_parallel_groups(check_initialized=False)
    if levels and len(levels) == 2:
        kinds |= {"head parallel": levels[0], "ring": levels[1]}
    lines = []
    for name, group in kinds.items():
        mine = dist.get_process_group_ranks(group)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        distinct = sorted({tuple(ranks) for ranks in everyone})
        if len(mine) > 1:
            lines.append(f"{name} {len(mine)}: {_shown_groups(distinct)}")
    return lines or ["one process, no groups"]


def describe_placement(config: Any) -> list[str]:
    """Who sits where, of 2D attention's groups. Collective.

    Raises:
        UserError: the groups that should lie close together do not.
    """
    context, tensor = config.context_parallel_size, config.tensor_model_parallel_size
    is_two_d = config.longseq_context_parallel == "2d" and config.longseq_tensor_parallel != "metp"
    if context == 1 or not is_two_d:
        return []
    head, ring = mpu.get_hierarchical_context_parallel_groups()
    mine = node_of_this_process(), *map(dist.get_process_group_ranks, (head, ring))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    nodes = [node for node, _, _ in everyone]
    heads, rings = (sorted({tuple(entry[kind]) for entry in everyone}) for kind in (1, 2))
    close = heads if config.longseq_placement == "head-first" else rings
    blocks = {
        tuple(sorted({rank - rank % tensor + t for rank in ranks for t in range(tensor)}))
        for ranks in close
    }
    check_nodes(nodes, sorted(blocks), config.longseq_placement)
    chosen = ring_windows(config, factorisation(config, config.longseq_head_parallel_size))
    schedule = chosen.schedule
    lines = [f"{config.longseq_placement}; ring: {'double' if schedule else 'single'}, "]
    lines[0] += chosen.reason
    if len(set(nodes)) == 1:
        return lines  # one machine: everything is close
    inner = schedule.groups(ring.size())[0] if schedule is not None else []
    return lines + placement_lines(nodes, heads, rings, inner)


def describe_overlap(models: list[torch.nn.Module], seq_length: int, micro_batch: int) -> list[str]:
    """Which of METP's loops this machine hides behind compute. Collective: it measures."""
    for model in models:
        for module in model.modules():
            if isinstance(module, METPSelfAttention):
                return _overlap_of(module, model, seq_length, micro_batch)
    return []


def _overlap_of(
    attention: METPSelfAttention, model: Any, seq_length: int, micro_batch: int
) -> list[str]:
    config, runtime = attention.config, attention.runtime
    weight = attention.linear_qkv.weight
    token_ranks = runtime.attention.kv_ring.size
    shape = LayerShape(
        rows=max(1, seq_length // token_ranks),
        batch=micro_batch,
        hidden=config.hidden_size,
        query_width=config.num_attention_heads * config.kv_channels,
        kv_width=config.num_query_groups * config.kv_channels,
        ffn=config.ffn_hidden_size,
        vocabulary=model.vocab_size,
        gated=config.gated_linear_unit,
        weight_ranks=runtime.place.size,
        token_ranks=token_ranks,
        shards_per_step=runtime.shards_per_step,
        causal=attention.attn_mask_type is AttnMaskType.causal,
        element_bytes=weight.element_size(),
        gradient_bytes=gradient_bytes(weight.dtype),
    )
    machine = measure(
        shape,
        ring=runtime.chain.ring,
        kernel=choose_kernel(runtime.kernel, weight.dtype, weight.device),
        head_width=config.kv_channels,
        dtype=weight.dtype,
        device=weight.device,
    )
    return describe(shape, machine)


def describe_factorisation(config: Any) -> list[str]:
    """Why the head-parallel size of 2D attention is what it is."""
    if config.longseq_context_parallel != "2d" or config.context_parallel_size == 1:
        return []
    if config.longseq_tensor_parallel == "metp":
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        return [f"METP: keys and values of {ranks} ranks, tensor x context parallel, in one ring"]
    default = factorisation(config, None)
    size = config.longseq_head_parallel_size or default.head_parallel
    if size == default.head_parallel:
        return [f"head-parallel size {size}: {default.reason}"]
    given = factorisation(config, size)
    return [f"head-parallel size {size}: {given.reason}; the default is {default.head_parallel}"]


def describe_shapes(args: Any, config: Any) -> str:
    """Local sizes of what a layer sees: tokens, heads, and the hidden state between layers."""
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    tokens = args.seq_length // context
    local = tokens // tensor if config.sequence_parallel else tokens
    groups = config.num_query_groups or config.num_attention_heads
    return (
        f"per rank: {tokens} of {args.seq_length} tokens in attention, "
        f"{config.num_attention_heads // tensor} query heads, {max(1, groups // tensor)} "
        f"key/value heads of {config.kv_channels}, "
        f"hidden state [{local}, {args.micro_batch_size}, {config.hidden_size}] "
        f"{str(config.params_dtype).removeprefix('torch.')}"
    )


def _shown_groups(groups: list[tuple[int, ...]]) -> str:
    shown = [_shown_ranks(ranks) for ranks in groups[:_SHOWN_GROUPS]]
    more = len(groups) - len(shown)
    return " ".join(shown) + (f" and {more} more" if more else "")


def _shown_ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _SHOWN_RANKS:
        return "[" + " ".join(map(str, ranks)) + "]"
    return f"[{ranks[0]} {ranks[1]} .. {ranks[-1]}]"


def _as_setting(name: str, value: Any) -> str:
    return f"{name}={value}"
