"""Sizes of a layout that must divide each other, checked before Megatron's own bare assertions."""

from collections.abc import Iterable
from typing import Any

from .config import flag_of
from .errors import UserError, check_at_least_one, divisors, nearest_values
from .memory import zero_presets

# Sizes and counts of which there must be one.
AT_LEAST_ONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
)


def check_layout(args: Any, world_size: int) -> None:
    """Checks sizes that must divide each other, naming the values that would work."""
    for name in AT_LEAST_ONE:
        check_at_least_one(flag_of(name), getattr(args, name))
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context = args.context_parallel_size
    model = tensor * pipeline * context
    if world_size % model:
        raise UserError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} needs {model} processes or a multiple of it, "
            f"but {world_size} {'was' if world_size == 1 else 'were'} started"
        )
    zero_presets.check_instances(args, world_size // (tensor * pipeline))
    if args.num_layers is None or args.hidden_size is None:
        return  # Megatron names what is missing
    heads = args.num_attention_heads
    _must_divide("--tensor-model-parallel-size", tensor, "--num-attention-heads", heads)
    if args.group_query_attention:
        groups = args.num_query_groups
        _must_divide("--num-query-groups", groups, "--num-attention-heads", heads)
        if groups % tensor and tensor % groups:
            works = [d for d in divisors(heads) if groups % d == 0 or d % groups == 0]
            raise UserError(
                f"--tensor-model-parallel-size {tensor}: must divide --num-query-groups {groups} "
                f"or be a multiple of it; nearest: {listed(nearest_values(tensor, works))}"
            )
    width = args.kv_channels or args.hidden_size // heads
    rows = (heads + 2 * (args.num_query_groups if args.group_query_attention else heads)) * width
    if rows % tensor:
        works = [d for d in divisors(heads) if rows % d == 0]
        raise UserError(
            f"--tensor-model-parallel-size {tensor}: must divide the {rows} rows of the projection "
            f"to queries, keys and values; nearest: {listed(nearest_values(tensor, works))}"
        )
    if args.num_experts is not None:
        experts = args.expert_model_parallel_size
        _must_divide("--expert-model-parallel-size", experts, "--num-experts", args.num_experts)
    if args.kv_channels is None:
        _must_divide("--num-attention-heads", heads, "--hidden-size", args.hidden_size)
    if args.ffn_hidden_size is not None:
        _must_divide(
            "--tensor-model-parallel-size", tensor, "--ffn-hidden-size", args.ffn_hidden_size
        )
    _check_pipeline(args, pipeline)
    if args.sequence_parallel and tensor > 1:
        _must_divide("--tensor-model-parallel-size", tensor, "--seq-length", args.seq_length)
    cut = context > 1 or args.longseq_context_parallel == "2d"  # into pairs of pieces
    if cut and args.seq_length % (2 * context):
        step = 2 * context
        raise UserError(
            f"--seq-length {args.seq_length}: must be a multiple of 2 x --context-parallel-size "
            f"= {step}; nearest: {_multiples_around(args.seq_length, step)}; "
            "or fill batches up with --longseq-pad-sequence"
        )
    if args.lr_warmup_iters and args.train_iters:
        decay = args.lr_decay_iters or args.train_iters
        if args.lr_warmup_iters >= decay:
            raise UserError(
                f"--lr-warmup-iters {args.lr_warmup_iters}: must be less than the {decay} steps of "
                f"the learning rate's decay; nearest: {decay - 1}"
            )
    data = world_size // model
    micro, batch = args.micro_batch_size, args.global_batch_size
    if micro and batch and batch % (micro * data):
        raise UserError(
            f"--global-batch-size {batch}: must be a multiple of --micro-batch-size {micro} x "
            f"{data} data-parallel replicas = {micro * data}; "
            f"nearest: {_multiples_around(batch, micro * data)}"
        )


def _check_pipeline(args: Any, pipeline: int) -> None:
    pattern = args.hybrid_layer_pattern
    if pattern is not None and "|" not in pattern and pipeline > 1:
        layers = args.num_layers
        _must_divide(
            "--pipeline-model-parallel-size",
            pipeline,
            f"the layers of --hybrid-layer-pattern {pattern}, or | name the stages:",
            layers,
        )
    uneven = (
        pattern is not None
        or args.pipeline_model_parallel_layout is not None
        or args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
    )
    if not uneven:
        _must_divide("--pipeline-model-parallel-size", pipeline, "--num-layers", args.num_layers)
        chunks = args.num_virtual_stages_per_pipeline_rank
        if chunks is not None:
            _must_divide(
                "--num-virtual-stages-per-pipeline-rank",
                chunks,
                "the layers of a pipeline stage:",
                args.num_layers // pipeline,
            )


def _must_divide(flag: str, value: int, of_flag: str, total: int) -> None:
    if value < 1 or total % value:
        raise UserError(
            f"{flag} {value}: must divide {of_flag} {total}; "
            f"nearest: {listed(nearest_values(value, divisors(total)))}"
        )


def _multiples_around(value: int, step: int) -> str:
    below = value // step * step
    return listed([v for v in (below, below + step) if v > 0])


def listed(values: Iterable[Any]) -> str:
    """Values for a message: ``1, 2, 4``."""
    return ", ".join(str(value) for value in values)
