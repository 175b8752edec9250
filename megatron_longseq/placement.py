"""Which rank runs where: head groups or rings on neighbouring ranks of a node.

The logical order of context-parallel ranks, ``i = c hp + h`` for ring position c and place h, never
changes: Megatron cuts batches, RoPE and losses by it. What changes is the hardware under it.

    N = 8, hp = 2, ring = 4     physical ranks of head groups       of rings
    head-first                  [0 1] [2 3] [4 5] [6 7]             [0 2 4 6] [1 3 5 7]
    context-first               [0 4] [1 5] [2 6] [3 7]             [0 1 2 3] [4 5 6 7]

Context-first is a permutation of the variable ``RANK``, in blocks of the tensor-parallel size,
before any process group exists. Nothing else knows of it.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import UserError

Placement = Literal["head-first", "context-first"]
FLAG = "--longseq-placement"
# "physical:logical", so that a rank is permuted once.
PHYSICAL_RANK = "MEGATRON_LONGSEQ_PHYSICAL_RANK"


@dataclass(frozen=True)
class Grid:
    """The ranks that a placement permutes.

    Attributes:
        tensor: ``--tensor-model-parallel-size``.
        head: head-parallel size.
        ring: ring size.
    """

    tensor: int
    head: int
    ring: int

    def logical(self, physical: int) -> int:
        """The rank that a process takes, context-first, from the one it was started with."""
        block, place = divmod(physical, self.tensor * self.head * self.ring)
        context, tensor = divmod(place, self.tensor)
        head, ring = divmod(context, self.ring)
        there = (ring * self.head + head) * self.tensor + tensor
        return block * self.tensor * self.head * self.ring + there


def permute_rank(placement: str, grid: Grid) -> None:
    """Gives this process the rank of its place: before Megatron reads it. Once, however often.

    Args:
        placement: ``--longseq-placement``.
        grid: of 2D attention.
    """
    if placement != "context-first":
        return
    rank = os.environ.get("RANK", "0")
    # A process that another one started, with other ranks, may have inherited the variable.
    if os.environ.get(PHYSICAL_RANK, "").endswith(f":{rank}"):
        return
    os.environ["RANK"] = str(grid.logical(int(rank)))
    os.environ[PHYSICAL_RANK] = f"{rank}:{os.environ['RANK']}"


def node_of_this_process() -> str:
    """What tells this machine from others: torchrun's or Slurm's number of it, or its name."""
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if variable in os.environ:
            return os.environ[variable]
    return socket.gethostname()


def check_nodes(
    nodes: Sequence[str], groups: Sequence[Sequence[int]], placement: Placement
) -> None:
    """Checks that each group that should lie close together does.

    Args:
        nodes: of every rank.
        groups: ranks of head groups, or context-first of rings, together with the tensor-parallel
            ranks between them.

    Raises:
        UserError: a group has ranks on more nodes than it must.
    """
    kind = "head group" if placement == "head-first" else "ring"
    per_node = max(1, min(nodes.count(node) for node in set(nodes)))
    for ranks in groups:
        there = sorted({nodes[rank] for rank in ranks})
        least = -(-len(ranks) // per_node)
        # Where groups and nodes do not divide each other one more node is nobody's mistake.
        if per_node % len(ranks) and len(ranks) % per_node:
            least += 1
        if len(there) > least:
            raise UserError(
                f"{FLAG} {placement}: the {kind} of ranks {' '.join(map(str, ranks))} lies on "
                f"{len(there)} nodes ({', '.join(there)}) and fits on {least}: ranks are not "
                "numbered node by node; start them with torchrun, or with Slurm's "
                "--distribution=block"
            )


def placement_lines(
    nodes: Sequence[str],
    head_groups: Sequence[Sequence[int]],
    rings: Sequence[Sequence[int]],
    windows: Sequence[Sequence[int]],
    shown: int = 4,
) -> list[str]:
    """Who sits where: a line for each of the first groups.

    Args:
        nodes: of every rank.
        head_groups, rings: of ranks.
        windows: ring positions of each window of a double ring.
        shown: groups of a kind.
    """
    lines = []
    for kind, groups in (("head group", head_groups), ("ring", rings)):
        for number, ranks in enumerate(groups[:shown]):
            where = ", ".join(f"{rank} on {nodes[rank]}" for rank in ranks[:16])
            more = " .." if len(ranks) > 16 else ""
            line = f"{kind} {number}: {where}{more}"
            if kind == "ring" and windows:
                inner = [" ".join(str(ranks[place]) for place in window) for window in windows]
                line += "; windows " + " ".join(f"[{window}]" for window in inner[:shown])
            lines.append(line)
        if len(groups) > shown:
            lines.append(f"and {len(groups) - shown} more {kind}s")
    return lines
