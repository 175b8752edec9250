"""How a context-parallel size is split into head-parallel x ring, and when it can be."""

from dataclasses import dataclass
from math import lcm

from ..errors import UserError, divisors, nearest_values

HEAD_FLAG = "--longseq-head-parallel-size"


@dataclass(frozen=True)
class Factorisation:
    """A head-parallel size, the ring size beside it, and why."""

    head_parallel: int
    ring: int
    reason: str


def factorise(
    *,
    context_parallel: int,
    heads: int,
    kv_heads: int,
    tensor_parallel: int,
    ranks_per_node: int,
    head_parallel: int | None = None,
) -> Factorisation:
    """Chooses or checks the head-parallel size.

    Without one given, it is the largest divisor of the context-parallel size that divides the
    query heads and the key/value heads (others replicate the latter, and with them what the ring
    carries), and keeps head-parallel x tensor-parallel ranks inside a node: the exchange of heads
    cannot be hidden, the ring can.

    Args:
        context_parallel: ``--context-parallel-size``.
        heads: query heads of one tensor-parallel rank.
        kv_heads: key/value heads of one tensor-parallel rank.
        tensor_parallel: ``--tensor-model-parallel-size``.
        ranks_per_node: ranks of one node.
        head_parallel: the size given by the user, if any.

    Raises:
        UserError: the given size does not fit.
    """
    fitting = [d for d in divisors(context_parallel) if heads % d == 0]
    if head_parallel is not None:
        if head_parallel not in fitting:
            raise UserError(
                f"{HEAD_FLAG} {head_parallel}: must divide --context-parallel-size "
                f"{context_parallel} and the {heads} query heads of a tensor-parallel rank; "
                f"nearest: {', '.join(map(str, nearest_values(head_parallel, fitting)))}"
            )
        copies = lcm(kv_heads, head_parallel) // kv_heads
        note = f"; each key/value head counts {copies} times" if copies > 1 else ""
        return Factorisation(head_parallel, context_parallel // head_parallel, "as given" + note)
    inside = max(1, ranks_per_node // tensor_parallel)
    chosen = max(d for d in fitting if kv_heads % d == 0 and d <= inside)
    larger = [d for d in fitting if d > chosen]
    reason = f"the largest that divides {context_parallel} ranks and {heads} heads"
    if larger:
        limit = (
            f"it would replicate the {kv_heads} key/value heads"
            if kv_heads % larger[0]
            else f"{larger[0]} x {tensor_parallel} ranks would leave a node of {ranks_per_node}"
        )
        reason = f"{larger[0]} would fit too, but {limit}"
    return Factorisation(chosen, context_parallel // chosen, reason)
