"""The ranks each method talks to, built once from Megatron's own groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .communication.collectives import Collectives
from .communication.groups import GroupPlace
from .communication.schedule import DoubleRing
from .errors import UserError
from .metp.runtime import MetpGroups


@dataclass(frozen=True)
class ContextParallelGroups:
    """The two dimensions of 2D attention; ``None`` where a dimension has one rank.

    Attributes:
        head: the ranks that exchange heads for tokens: neighbours in Megatron's order.
        ring: the ranks among which keys and values circulate, with stride head-parallel.
        gradients: the ring's ranks once more: dK and dV travel beside the next K and V.
        schedule: of the ring, if it is a double one.
        lanes: groups of the double ring's lanes: the window of this rank, and the ranks that stand
            where it stands in the other windows.
    """

    head: dist.ProcessGroup | None
    ring: dist.ProcessGroup | None
    gradients: dist.ProcessGroup | None
    schedule: DoubleRing | None = None
    lanes: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)


def context_parallel_groups(
    context_parallel: int, timeout_seconds: float, schedule: DoubleRing | None = None
) -> ContextParallelGroups:
    """Builds the groups of this rank. A collective call of the whole world.

    Args:
        context_parallel: ``--context-parallel-size``.
        timeout_seconds: limit of the waits on the groups that are made here.
        schedule: of a double ring.

    Megatron has made both dimensions from ``--hierarchical-context-parallel-sizes``, which
    ``--longseq-head-parallel-size`` sets; only the second group of the ring, and the inner and
    outer rings of a double one, are new.

    Raises:
        UserError: Megatron has no hierarchical groups.
    """
    if context_parallel == 1:
        return ContextParallelGroups(None, None, None)
    levels = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    if not levels or len(levels) != 2:
        raise UserError(
            "--longseq-context-parallel 2d needs Megatron's hierarchical context-parallel groups "
            "of two levels: call initialize_model_parallel with "
            "hierarchical_context_parallel_sizes=[head-parallel size, ring size]"
        )
    head, ring = levels
    place = ring.rank() * head.size() + head.rank()
    rank = parallel_state.get_context_parallel_rank()
    if place != rank:
        raise RuntimeError(
            f"context-parallel rank {rank} stands at place {place} of head groups x rings: "
            "Megatron orders its hierarchical groups otherwise than it cuts the sequence"
        )
    gradients, lanes = None, {}
    if ring.size() > 1:
        gradients = _second_group(ring, timeout_seconds, "LONGSEQ_RING_GRADIENTS_GROUP")
    if schedule is not None:
        ranks = dist.get_process_group_ranks(ring)
        kinds = zip(
            (schedule.inner_lane, schedule.outer_lane), schedule.groups(len(ranks)), strict=True
        )
        for lane, kind in kinds:
            mine = next(places for places in kind if ring.rank() in places)
            lanes[lane] = _group_of(
                tuple(ranks[place] for place in mine),
                timeout_seconds,
                f"LONGSEQ_RING_{lane.upper()}_GROUP",
            )
    return ContextParallelGroups(
        head if head.size() > 1 else None,
        ring if ring.size() > 1 else None,
        gradients,
        schedule,
        lanes,
    )


def metp_groups(timeout_seconds: float) -> MetpGroups:
    """Builds METP's groups of this rank from Megatron's. A collective call of the whole world.

    Args:
        timeout_seconds: limit of the waits on the groups that are made here.

    The zigzag inside each context-parallel rank's tokens is, over all of them, the zigzag of
    tensor x context parallel ranks, tensor parallel fastest: Megatron's order of that group.
    """
    tensor = parallel_state.get_tensor_model_parallel_group()
    context = parallel_state.get_context_parallel_group()
    both = parallel_state.get_tensor_and_context_parallel_group()
    place = context.rank() * tensor.size() + tensor.rank()
    if both.rank() != place:
        raise RuntimeError(
            f"rank {dist.get_rank()} stands at place {both.rank()} of tensor x context parallel "
            f"ranks instead of {place}: Megatron orders that group otherwise"
        )
    return MetpGroups(
        tensor=tensor,
        weights=_second_group(tensor, timeout_seconds, "LONGSEQ_METP_WEIGHTS_GROUP"),
        gradients=_second_group(tensor, timeout_seconds, "LONGSEQ_METP_GRADIENTS_GROUP"),
        kv=_second_group(both, timeout_seconds, "LONGSEQ_METP_KV_GROUP"),
        kv_gradients=_second_group(both, timeout_seconds, "LONGSEQ_METP_KV_GRADIENTS_GROUP"),
        context=context if context.size() > 1 else None,
    )


@dataclass(frozen=True)
class LinearGroups:
    """The ranks among which states of linear attention pass.

    Attributes:
        context: Megatron's context-parallel group; ``None`` for one rank.
        ranks_per_node: consecutive ranks of it that share a node; ``None`` if all do, or none.
    """

    context: dist.ProcessGroup | None
    ranks_per_node: int | None


def linear_groups(tensor: int, ranks_per_node: int, timeout_seconds: float) -> LinearGroups:
    """The groups of linear attention of this rank. A collective call of each group.

    Args:
        tensor: ``--tensor-model-parallel-size``; so many ranks apart are neighbours of the group.
        ranks_per_node: of the whole job.
        timeout_seconds: limit of the wait.
    """
    context = parallel_state.get_context_parallel_group()
    if context.size() == 1:
        return LinearGroups(None, None)
    # NCCL wants all ranks in the first operation of a group, and states pass between two at a time.
    hello = Collectives(GroupPlace.of(context), "first contact", timeout_seconds)
    hello.sum(torch.ones(1, device=torch.cuda.current_device()))
    together, rest = divmod(ranks_per_node, tensor)
    nodes_divide = rest == 0 and 1 < together < context.size() and context.size() % together == 0
    return LinearGroups(context, together if nodes_divide else None)


def _second_group(
    group: dist.ProcessGroup, timeout_seconds: float, description: str
) -> dist.ProcessGroup:
    """Another group of the same ranks."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return _group_of(ranks, timeout_seconds, description)


def _group_of(mine: tuple[int, ...], timeout_seconds: float, description: str) -> dist.ProcessGroup:
    """The group of these ranks; every rank of the world makes those of all ranks in one order."""
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    own = None
    for ranks in sorted(set(everyone)):
        made = parallel_state.create_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_seconds),
            group_desc=description,
        )
        if ranks == mine:
            own = made
    assert own is not None
    return own
