"""How a context-parallel size is split into head-parallel x ring, and when it can be."""

from dataclasses import dataclass

from ..communication.all_to_all import even_shares, serving_shares
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
    query heads and the key/value heads (others let several ranks have the same of the latter, so
    that the rings together carry more), and keeps head-parallel x tensor-parallel ranks inside a
    node: the exchange of heads cannot be hidden, the ring can. Given, it need divide neither: some
    ranks then work on one head more than others.

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
    if head_parallel is not None:
        possible = [d for d in divisors(context_parallel) if d <= heads]
        if head_parallel not in possible:
            raise UserError(
                f"{HEAD_FLAG} {head_parallel}: must divide --context-parallel-size "
                f"{context_parallel} and be at most the {heads} query heads of a tensor-parallel "
                f"rank; nearest: {', '.join(map(str, nearest_values(head_parallel, possible)))}"
            )
        reason = "as given" + _notes(heads, kv_heads, head_parallel)
        return Factorisation(head_parallel, context_parallel // head_parallel, reason)
    fitting = [d for d in divisors(context_parallel) if heads % d == 0]
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


def _notes(heads: int, kv_heads: int, size: int) -> str:
    """What a head-parallel size costs beyond one that divides all heads."""
    shares = even_shares(heads, size)
    most, notes = max(map(len, shares)), ""
    if most * size > heads:
        busy = heads / (most * size)
        notes += f"; {most - 1} or {most} query heads on a rank, so ranks work {busy:.0%} of a step"
    carried = sum(map(len, serving_shares(shares, heads, kv_heads)))
    if carried > kv_heads:
        notes += f"; its rings carry {carried} key/value heads, {kv_heads} of them different"
    return notes
