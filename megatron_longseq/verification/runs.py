"""The two command lines of a verification: the run itself, and what it is compared with."""

import argparse
from collections.abc import Sequence

from ..arguments import given_arguments
from ..config import options
from ..errors import UserError
from ..lasp.requirements import MODEL_OPTIONS

# Largest relative differences that count as equal. In float64 nothing but the order of sums
# differs.
TOLERANCES = {
    "fp64": {"output": 1e-10, "loss": 1e-10, "gradient": 1e-10, "parameter": 1e-10},
    "fp32": {"output": 1e-4, "loss": 1e-5, "gradient": 1e-3, "parameter": 1e-3},
    "bf16": {"output": 5e-2, "loss": 1e-3, "gradient": 5e-2, "parameter": 5e-2},
}
# Adam steps by the sign of a gradient, however small; where a gradient is zero but for rounding,
# as that of a key's bias is, the sign is noise. An epsilon well above the noise makes the step
# follow the gradient's size.
NARROW_ADAM_EPSILON = "1e-3"

# Rounding of each precision; see `comparison.compare`.
ROUNDING = {"fp64": 2.3e-16, "fp32": 1.2e-7, "bf16": 7.9e-3}
# So small that clipping acts in every step: a gradient norm that counts a tensor-parallel copy
# twice, or forgets a shard, then changes every gradient that is compared.
CLIP_GRAD = "0.01"

# What makes a layout. The reference does without.
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "hierarchical_context_parallel_sizes",
    "cp_comm_type",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage",
    "pipeline_model_parallel_layout",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_p2p_comm",
    "align_param_gather",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

# What a verification replaces: data, length, checkpoints, logs.
REPLACED = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "split",
    "mock_data",
    "train_iters",
    "train_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "eval_iters",
    "eval_interval",
    "save",
    "save_interval",
    "load",
    "pretrained_checkpoint",
    "use_checkpoint_args",
    "finetune",
    "no_load_optim",
    "no_load_rng",
    "no_save_optim",
    "no_save_rng",
    "exit_on_missing_checkpoint",
    "exit_interval",
    "exit_duration_in_mins",
    "exit_signal_handler",
    "tensorboard_dir",
    "log_interval",
    "clip_grad",
    "longseq_measure",
    "logging_level",
    "bf16",
    "fp16",
    "make_vocab_size_divisible_by",
)


def verification_runs(
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    *,
    processes: int,
    against: str,
    precision: str,
    steps: int,
) -> dict[str, tuple[list[str], int, bool]]:
    """Makes the command lines of a verification from those of a run.

    Args:
        argv: the run's flags.
        parser: knows every flag.
        processes: ranks of the run.
        against: ``one-process``, or ``stock``: the same layout without this package's methods.
        precision: ``fp64``, ``fp32`` or ``bf16``.
        steps: optimizer steps.

    Returns:
        Command line, number of ranks, and whether tokens are masked at random, of the
        ``reference`` and of the ``candidate``. With context parallelism Megatron divides a loss by
        each rank's own count of tokens unless ``--calculate-per-token-loss`` or
        ``--longseq-pad-sequence`` is given: there no token is masked.

    Raises:
        UserError: the flags draw random numbers, which no two layouts share.
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: must be at least 1")
    args = parser.parse_args(list(argv))
    if args.fp16:
        raise UserError(
            "--fp16: its loss scale hides small gradients; verify with --precision bf16"
        )
    given = given_arguments(parser, argv)
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(args, name):
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: each layout draws other "
                "numbers; verify with 0"
            )
    narrow = precision != "fp64"
    common = [
        *without(argv, parser, [*REPLACED, *(["adam_eps"] if narrow else [])]),
        *("--train-iters", str(steps), "--lr-decay-iters", str(steps)),
        *("--eval-iters", "0", "--eval-interval", "1000000", "--log-interval", "1000000"),
        *("--clip-grad", CLIP_GRAD, "--logging-level", "40"),
        "--no-check-for-nan-in-loss-and-grad",
        *(["--bf16"] if precision == "bf16" else []),
        *(["--adam-eps", NARROW_ADAM_EPSILON] if narrow else []),
    ]
    if "global_batch_size" not in given:
        common += ["--global-batch-size", str((args.micro_batch_size or 1) * processes)]
    # The vocabulary is padded to a multiple that depends on the tensor-parallel size: the padded
    # size must be the same in both runs.
    unit = args.make_vocab_size_divisible_by
    tensor = args.tensor_model_parallel_size
    ours = [option.name for option in options()]
    if against == "stock":
        if args.longseq_linear_attention != "none":
            raise UserError(
                f"--against stock: Megatron has no layers of --longseq-linear-attention "
                f"{args.longseq_linear_attention} here; verify against one-process"
            )
        reference = without(common, parser, ours)
        divisor, reference_processes = unit, processes
    else:
        layout = [name for name in ours if name not in MODEL_OPTIONS]
        reference = _without_stages(without(common, parser, [*LAYOUT, *layout]))
        divisor, reference_processes = unit * tensor, 1
    pad = "--make-vocab-size-divisible-by"
    masked = (
        args.context_parallel_size == 1
        or args.calculate_per_token_loss
        or args.longseq_pad_sequence
    )
    return {
        "reference": ([*reference, pad, str(divisor)], reference_processes, masked),
        "candidate": ([*common, pad, str(unit)], processes, masked),
    }


def _without_stages(argv: Sequence[str]) -> list[str]:
    """A hybrid pattern without the ends of its pipeline stages: the same model."""
    flag, words = "--hybrid-layer-pattern", list(argv)
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            words[index + 1] = words[index + 1].replace("|", "")
        elif word.startswith(f"{flag}="):
            words[index] = word.replace("|", "")
    return words


def without(
    argv: Sequence[str], parser: argparse.ArgumentParser, names: Sequence[str]
) -> list[str]:
    """The command line without the flags that set these arguments."""
    actions = {text: action for action in parser._actions for text in action.option_strings}
    kept: list[str] = []
    dropping = False
    for word in argv:
        action = actions.get(word.split("=")[0]) if word.startswith("-") else None
        if action is not None:
            dropping = action.dest in names
        if not dropping:
            kept.append(word)
    return kept
