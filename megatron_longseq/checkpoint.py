"""Checks of what a run loads and saves, before it begins; and what a full disk means after.

Megatron reports a checkpoint of another model as a tensor that does not fit, on every rank, and
takes an empty folder for a fresh start. Both cost a day on a cluster, so both are looked at first.
"""

import errno
import os
import shutil
import traceback
from pathlib import Path
from typing import Any

# Derives from BaseException, so that `except Exception` lets it through.
from torch.distributed.checkpoint.api import CheckpointException

from . import compat
from .config import flag_of
from .errors import NodeError
from .lasp.requirements import MODEL_OPTIONS, SIZES

TRACKER = "latest_checkpointed_iteration.txt"

# Arguments that shape the weights. Those of a layout do not: a checkpoint loads into any.
SHAPING = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "position_embedding_type",
    "untie_embeddings_and_output_weights",
    "max_position_embeddings",
    "num_experts",
    "moe_ffn_hidden_size",
    "mtp_num_layers",
    "padded_vocab_size",
    "linear_attention_freq",
    "hybrid_layer_pattern",
    "linear_conv_kernel_dim",
    *MODEL_OPTIONS,
    *SIZES,
)


LEARNED = "learned_absolute"

# Arguments that shape the schedules of learning rate and weight decay, each with what Megatron
# takes for it, once the run has begun, if it is not given.
SCHEDULING = {
    "train_iters": None,
    "train_samples": None,
    "lr_decay_iters": "train_iters",
    "lr_decay_samples": "train_samples",
}


def check_checkpoint(args: Any) -> None:
    """Checks ``--load`` against this run's model, and ``--save`` for being writable.

    Raises:
        NodeError: names the flag, the folder, both values and the remedy.
    """
    if args.load is not None:
        _check_load(args)
    if args.save is not None:
        _check_save(Path(args.save))


def _check_load(args: Any) -> None:
    folder = Path(args.load)
    tracker = folder / TRACKER
    if not tracker.is_file():
        if args.save is not None and Path(args.save).resolve() == folder.resolve():
            return  # the usual way to resume: the first run finds nothing yet
        raise NodeError(
            f"--load {folder}: there is no checkpoint (no {TRACKER}); name a folder that has one, "
            "or leave --load out to start from random weights"
        )
    saved = saved_arguments(folder, tracker.read_text().strip())
    if saved is None:
        return
    for name in SHAPING:
        if name == "num_query_groups" and not args.group_query_attention:
            continue  # Megatron fills it in after it has read the flags
        if name == "max_position_embeddings" and args.position_embedding_type != LEARNED:
            continue
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if name == "hybrid_layer_pattern" and None not in (theirs, ours):
            # Where stages end is no part of the model.
            theirs, ours = theirs.replace("|", ""), ours.replace("|", "")
        none_counts = name in ("num_experts", "mtp_num_layers") and hasattr(saved, name)
        if theirs != ours and (none_counts or None not in (theirs, ours)):
            hint = ""
            if name == "padded_vocab_size":
                hint = (
                    "; the vocabulary is padded to a multiple of --make-vocab-size-divisible-by "
                    f"{args.make_vocab_size_divisible_by} x --tensor-model-parallel-size "
                    f"{args.tensor_model_parallel_size}: choose them so that it stays {theirs}"
                )
            raise NodeError(
                f"--load {folder}: its model has {flag_of(name)} {theirs}, this run has {ours}; "
                f"use the checkpoint's value{hint}"
            )
    check_schedule(folder, saved, args)


def check_schedule(folder: Path, saved: Any, args: Any) -> None:
    """An optimizer of another kind, or a schedule of another length: Megatron fails at either.

    Raises:
        NodeError: the arguments saved in ``folder`` and those of this run differ in it.
    """
    loads_optimizer = not (args.finetune or args.no_load_optim)
    for name in ("optimizer", "use_distributed_optimizer") if loads_optimizer else ():
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if None not in (theirs, ours) and theirs != ours:
            raise NodeError(
                f"--load {folder}: its optimizer state was saved with {flag_of(name)} {theirs}, "
                f"this run has {ours}; use the same, or add --no-load-optim to begin with a new "
                "optimizer"
            )
    keeps_schedule = not (
        args.finetune
        or args.no_load_optim
        or args.override_opt_param_scheduler
        or args.use_checkpoint_opt_param_scheduler
    )
    for name, otherwise in SCHEDULING.items() if keeps_schedule else ():
        theirs, ours = (_given_or(of, name, otherwise) for of in (saved, args))
        if theirs != ours:
            raise NodeError(
                f"--load {folder}: its schedule was made for {flag_of(name)} {theirs}, this run "
                f"has {ours}; add --override-opt-param-scheduler to follow this run's flags, or "
                "--use-checkpoint-opt-param-scheduler to follow the checkpoint's"
            )


def _given_or(args: Any, name: str, otherwise: str | None) -> Any:
    value = getattr(args, name, None)
    return getattr(args, otherwise, None) if value is None and otherwise else value


def folder_of(iteration: str) -> str:
    """Name of the folder of a checkpoint, by its iteration as the tracker has it."""
    return "release" if iteration == "release" else f"iter_{int(iteration):07d}"


def saved_arguments(folder: Path, iteration: str) -> Any:
    """The arguments of the run that wrote the checkpoint; None if it holds none.

    Args:
        folder: of all checkpoints of the run.
        iteration: as in the tracker file: a number, or ``release``.

    Raises:
        NodeError: there is no such checkpoint, or it is damaged.
    """
    name = folder_of(iteration)
    path = folder / name
    if not path.is_dir():
        raise NodeError(
            f"--load {folder}: {TRACKER} names iteration {iteration}, but there is no {name}; "
            "write the number of a folder that exists into it"
        )
    if not (path / "metadata.json").is_file():
        return None  # a legacy checkpoint, one file a rank: Megatron compares its arguments itself
    try:
        return compat.saved_common_state(path).get("args")
    except (Exception, CheckpointException) as error:
        # Whatever a torn file makes of its reader; the text of the innermost cause says most.
        reason = _innermost(error)
        raise NodeError(
            f"--load {folder}: {name} is damaged ({reason}); write the number of an older "
            f"checkpoint into {TRACKER}"
        ) from error


def _innermost(error: BaseException) -> str:
    """The last line of the first cause of an error."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _check_save(folder: Path) -> None:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise NodeError(
            f"--save {folder}: {existing} is not a folder that can be written; name another one"
        )


def explain_failed_write(error: BaseException, args: Any) -> NodeError | None:
    """Returns what a user should know of a run that could not write; None for other failures.

    A full disk seldom shows as such: the process that writes a checkpoint reports a stream that
    stands at the wrong position, and the ranks that a process failed. So for any checkpoint that
    could not be written this says how much room there is.
    """
    text = "".join(traceback.format_exception(error))
    is_full = any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))
    if args.save is not None and "save_checkpoint" in text:
        what, folder = "the checkpoint could not be written", Path(args.save)
        remedy = "make room, or name another folder with --save"
        reason = "no space left on device" if is_full else _innermost(error)
        kept = folder / TRACKER
        last = kept.read_text().strip() if kept.is_file() else None
        whole = f"; the checkpoint of step {last} is whole" if last else ""
    elif is_full:
        what, folder = "a file could not be written", Path(args.longseq_measure or os.getcwd())
        remedy, reason, whole = "make room", "no space left on device", ""
    else:
        return None
    return NodeError(
        f"{what} to {folder} ({_free_bytes(folder):,} bytes are free there): {reason}; "
        f"{remedy}{whole}"
    )


def _free_bytes(path: Path) -> int:
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
