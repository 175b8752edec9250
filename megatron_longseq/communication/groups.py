"""Where this process stands in a process group."""

from dataclasses import dataclass
from itertools import groupby

import torch.distributed as dist

from ..errors import UserError


@dataclass(frozen=True)
class GroupPlace:
    """A process group as one of its members sees it.

    Attributes:
        group: the process group; ``None`` for a single process on its own.
        ranks: global ranks of the members, in group order.
        position: index of this process in ``ranks``.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    position: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "GroupPlace":
        """Describes ``group``; ``None`` stands for this process alone.

        Raises:
            UserError: this process is not a member of the group.
        """
        if group is None:
            here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            return cls(None, (here,), 0)
        position = dist.get_rank(group)
        if position < 0:
            raise UserError(
                f"rank {dist.get_rank()} was given a process group it is not a member of; "
                "pass each rank the group that contains it"
            )
        return cls(group, tuple(dist.get_process_group_ranks(group)), position)

    def ranks_per_node(self, local_world_size: int) -> int | None:
        """How many of these ranks share a node, if as many do on each, and consecutive ones.

        Args:
            local_world_size: ranks of the whole job per node, with consecutive global ranks.
        """
        nodes = [rank // local_world_size for rank in self.ranks]
        members = [len(list(run)) for _, run in groupby(nodes)]
        even = len(set(members)) == 1 and len(members) == len(set(nodes))
        return members[0] if even else None

    @property
    def size(self) -> int:
        """Members of the group."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.ranks[self.position]
