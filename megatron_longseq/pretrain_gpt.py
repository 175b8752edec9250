"""Entry point: ``torchrun .. -m megatron_longseq.pretrain_gpt <Megatron flags> --longseq-..``.

A complete main job from the Megatron wheel alone. What it does, in order: decide for CPU or GPU,
parse and check the command line, build Megatron's configs with this package's layer spec, and
hand over to Megatron's own training loop with the batches and loss of :mod:`gpt_training`.

With ``--megatron-path DIR`` Megatron comes from that checkout, and batches and loss from its own
``pretrain_gpt.py``.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from . import checkout
from .errors import NodeError, UserError

USER_ERROR_EXIT_CODE = 2


def prepare_process(argv: Sequence[str] = (), *, double_precision: bool = False):
    """Installs the CPU platform if it is to be used, and imports Megatron.

    Also the preload function of the launcher: after it a process is ready to fork ranks.

    Args:
        argv: of its flags, those are read that decide before Megatron is imported:
            ``--longseq-device`` and ``--megatron-path``.

    Returns:
        The :class:`~megatron_longseq.cpu_platform.CpuPlatform`, or None on a GPU.

    Raises:
        UserError: the device is not there, or the folder holds no Megatron that is supported.
    """
    early = early_flags(argv)
    device = early.longseq_device
    source = checkout.find_checkout(early.megatron_path) if early.megatron_path else None
    if source is not None:
        checkout.import_from(source)

    from . import cpu_platform

    platform = None
    if cpu_platform.should_use(device) and not cpu_platform.is_installed():
        platform = cpu_platform.CpuPlatform(double_precision=double_precision)
        platform.install()
    _import_megatron()
    cpu_platform.mend_wheel()
    if platform is not None:
        platform.mend_megatron()
        platform.count_memory()
    if source is not None:
        checkout.check_imported(source)
    return platform


def early_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags that decide what is imported, and from where; parsed before all others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # A flag without its value is left to the full parser, which says so.
    parser.add_argument("--longseq-device", nargs="?", default="auto", const="auto")
    parser.add_argument(checkout.FLAG, nargs="?")
    return parser.parse_known_args(list(argv))[0]


def train() -> None:
    """Trains with the flags in ``sys.argv``; the process must have been prepared."""
    # Derives from BaseException, so that `except Exception` lets it through.
    from torch.distributed.checkpoint.api import CheckpointException

    from . import checkpoint, compat, gpt_training
    from .arguments import extra_arguments
    from .checkout_training import CheckoutTraining
    from .config import LongSeqTransformerConfig
    from .lasp.requirements import check_own_batches
    from .layer_specs import closing_lines, longseq_layer_spec
    from .startup_report import print_report_hook

    args = compat.parse_and_validate(extra_arguments(checkout.add_argument))
    script = None
    if args.megatron_path is not None:
        check_own_batches(args, f"the {checkout.SCRIPT} of {checkout.FLAG}")
        script = checkout.import_script(checkout.find_checkout(args.megatron_path))
    else:
        gpt_training.check_data(args)
    checkpoint.check_checkpoint(args)
    config = compat.model_config(args, LongSeqTransformerConfig, longseq_layer_spec)
    config.pre_wrap_hooks.append(print_report_hook)
    run = gpt_training.GPTTraining(args) if script is None else CheckoutTraining(args, script)
    try:
        with run:
            compat.pretrain(args, config, run.datasets, run.forward_step)
        for line in closing_lines(config) if args.rank == 0 else []:
            print(line, flush=True)
    except (Exception, CheckpointException) as error:
        explanation = checkpoint.explain_failed_write(error, args)
        if explanation is None:
            raise
        raise explanation from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; prints a user's error once per cause, without a stack trace."""
    if argv is not None:
        sys.argv[1:] = argv
    try:
        prepare_process(sys.argv[1:])
        train()
    except UserError as error:
        if should_print(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    return 0


def should_print(error: UserError) -> bool:
    """One rank speaks for all: rank 0, or for what only one machine sees its first rank."""
    variable = "LOCAL_RANK" if isinstance(error, NodeError) else "RANK"
    return os.environ.get(variable, "0") == "0"


def _import_megatron() -> None:
    import warnings

    with warnings.catch_warnings():
        # Apex and Transformer Engine are optional here; each of their absences warns at import.
        warnings.simplefilter("ignore")
        from . import compat

        compat.check_megatron_version()
        import megatron.core.dist_checkpointing
        import megatron.training
        import megatron.training.argument_utils
        import megatron.training.models.gpt
        import megatron.training.training  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
