"""Where the ring of 2D attention is a double one: windows that fit the nodes, and why."""

from dataclasses import dataclass

from ..communication.schedule import DoubleRing, interleaved
from ..errors import UserError, divisors, nearest_values

WINDOW_FLAG = "--longseq-ring-window-size"


@dataclass(frozen=True)
class RingWindows:
    """The schedule of a ring: a double ring, or ``None`` for a single one; and why."""

    schedule: DoubleRing | None
    reason: str


def choose_windows(
    *,
    ring: int,
    head_parallel: int,
    tensor_parallel: int,
    ranks_per_node: int,
    context_first: bool,
    cards_per_node: int | None = None,
    window: int | None = None,
) -> RingWindows:
    """Chooses or checks the window of a double ring.

    Without one given, it is the ring's members on a node. Where the head group fills the node every
    rank has a ring of its own between the nodes, on which all of the node's network cards work
    already; where a node holds the whole ring there is nothing to leave.

    Args:
        ring: its size.
        head_parallel, tensor_parallel: ranks between neighbours of the ring, head-first.
        ranks_per_node: of the whole job.
        context_first: rings lie on neighbouring ranks, head groups across.
        cards_per_node: network cards; as many as ranks if not given. Windows are interleaved where
            there are fewer and a window does not fill the node.
        window: given by the user, if any.

    Raises:
        UserError: the given window does not divide the ring.
    """
    apart = tensor_parallel * (1 if context_first else head_parallel)
    members, uneven = max(1, ranks_per_node // apart), ranks_per_node % apart and apart > 1
    if window is not None:
        if window < 1 or ring % window:
            raise UserError(
                f"{WINDOW_FLAG} {window}: must divide the ring of {ring} ranks; nearest: "
                f"{', '.join(map(str, nearest_values(window, divisors(ring))))}"
            )
        if window in (1, ring):
            return RingWindows(None, f"windows of {window} in a ring of {ring}, as given")
        reason = f"windows of {window}, as given"
    else:
        if ring == 1:
            return RingWindows(None, "no ring")
        if uneven and apart < ranks_per_node:
            return RingWindows(
                None, f"{apart} ranks between neighbours do not divide a node of {ranks_per_node}"
            )
        if members >= ring:
            return RingWindows(None, "a node holds the whole ring")
        if members == 1:
            why = (
                "a rank's neighbours in the ring are on other nodes"
                if head_parallel == 1 or context_first
                else "the head group fills the node"
            )
            return RingWindows(None, f"{why}: each rank's own ring crosses nodes already")
        if ring % members:
            return RingWindows(None, f"{members} members on a node do not divide a ring of {ring}")
        window = members
        reason = f"windows of {window}, the ring's members on a node"
    order = None
    if cards_per_node is not None and cards_per_node < ranks_per_node:
        order = interleaved(ring, members, window)
        reason += (
            f", interleaved for {cards_per_node} network cards"
            if order is not None
            else f"; all {cards_per_node} network cards work without interleaving"
        )
    return RingWindows(DoubleRing(window, order), reason)
