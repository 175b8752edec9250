"""``--longseq-pad-sequence``: sequences of lengths that the ranks do not divide.

Samples keep ``--seq-length`` tokens. Batches are filled up behind them to the next length that all
ranks divide, with tokens whose loss is masked; attention is causal, so that no real token sees one.
The loss of a micro-batch is divided by its real tokens over all context-parallel ranks: where the
padding lies, ranks have fewer of them than others.
"""

import argparse
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .errors import UserError

FLAG = "--longseq-pad-sequence"

# The length of the samples, beside ``seq_length``, that of the batches.
SAMPLE_LENGTH = "longseq_sample_length"


def divisor(args: Any) -> int:
    """What the length of a sequence must be a multiple of in a layout."""
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    context, chunks = args.context_parallel_size, args.longseq_sequence_chunks
    cut = context > 1 or args.longseq_context_parallel == "2d"  # 2D attention takes pairs of pieces
    each = lcm(2 * context, context * tensor) if cut else tensor
    if args.longseq_tensor_parallel == "metp":
        each = 2 * context * args.tensor_model_parallel_size
    return each * chunks


def padded_length(args: Any) -> int:
    """The next length that all ranks divide."""
    step = divisor(args)
    return -(-args.seq_length // step) * step


def pad_arguments(args: argparse.Namespace) -> None:
    """Makes ``seq_length`` the length of the batches, before anything is checked against it.

    Raises:
        UserError: there is no length to fill up, or something that does not go with it.
    """
    if args.seq_length is None:
        raise UserError(f"{FLAG}: needs --seq-length N, the length of a sample")
    setattr(args, SAMPLE_LENGTH, args.seq_length)
    if args.seq_length > 0:
        _check(args)
        args.seq_length = padded_length(args)
        positions = args.max_position_embeddings
        if positions is not None and positions < args.seq_length:
            raise UserError(
                f"--max-position-embeddings {positions}: {FLAG} fills {sample_length(args)} tokens "
                f"up to {args.seq_length}, and there must be as many; nearest: {args.seq_length}"
            )


def pad_option(parser: argparse.ArgumentParser, length: int) -> None:
    """Lets ``parser`` give ``--seq-length`` as the length of the batches, which others read."""
    for action in parser._actions:
        if action.dest == "seq_length":
            action.type = lambda _: length


def sample_length(args: Any) -> int:
    """Tokens of a sample: ``--seq-length`` as it was given."""
    given = getattr(args, SAMPLE_LENGTH, None)
    return args.seq_length if given is None else given


def pad_batch(args: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Fills the rows of a batch up from ``[b, sample]`` to ``[b, s]``: masked tokens 0."""
    more = args.seq_length - sample_length(args)
    if more == 0:
        return batch
    padded = dict(batch)
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        if key == "attention_mask":
            padded[key] = pad(value, (0, more, 0, more), value=True)  # true: not seen
        else:
            padded[key] = pad(value, (0, more))
    return padded


def pad_documents(args: Any, boundaries: Tensor) -> Tensor:
    """Makes the padding of each row a document of its own.

    Args:
        boundaries: ``[b, k]``, filled up with the length of a sample.
    """
    if args.seq_length == sample_length(args):
        return boundaries
    end = boundaries.new_full((len(boundaries), 1), args.seq_length)
    return torch.cat([boundaries, end], 1)


def weight_of_rank(count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the loss of this rank is multiplied by, so that the mean over ranks is that over tokens.

    Megatron divides it by the rank's own count of tokens.

    Args:
        count: real tokens of this rank.
        group: the context-parallel ranks.

    Returns:
        The rank's tokens over those of a rank on average; fp64.
    """
    mine = count.clamp(min=1).to(torch.float64)
    everyone = count.to(torch.float64)
    dist.all_reduce(everyone, group=group)
    return mine * group.size() / everyone.clamp(min=1)  # of nothing, the loss is 0


def _check(args: argparse.Namespace) -> None:
    refused = {
        "--num-experts": (args.num_experts, "padding would take part in the routing"),
        "--mtp-num-layers": (
            args.mtp_num_layers,
            "Megatron divides its losses by the tokens of each rank, which differ",
        ),
        "--megatron-path": (getattr(args, "megatron_path", None), "its script makes the batches"),
        "--dataloader-type external": (
            args.dataloader_type == "external" or None,
            "the batches are the user's own",
        ),
    }
    for flag, (value, reason) in refused.items():
        if value is not None:
            shown = flag if value is True else f"{flag} {value}"
            raise UserError(f"{FLAG} with {shown}: {reason}; leave one of the two out")


def check_own_batches(args: Any, where: str) -> None:
    """Refuses padding where others make the batches.

    Raises:
        UserError: there is something to pad.
    """
    if args.seq_length != sample_length(args):
        raise UserError(
            f"{FLAG}: {where} makes batches of {sample_length(args)} tokens, which "
            f"{divisor(args)} does not divide; use -m megatron_longseq.pretrain_gpt"
        )
