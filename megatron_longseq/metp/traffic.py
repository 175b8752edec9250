"""What METP's operators send, exactly: the formulas the counters are compared with.

Per rank, with p ranks, n tokens each, micro-batch b, g key/value heads of widths d and dv, m weight
shards per outer step, S elements in one rank's shard of T tensors, e bytes per element and e' per
element of a gradient on its way:

    ring of weights     chain, loss, lookup    (p - 1) S e              (p - 1) T messages
    its gradients                              p S e'                   p T
    broadcast           attention's weights    (p - 1) S e              (p - 1) T
    sums at the owner                          (p - 1) S e'             (p - 1) T
    K and V             all head groups        (p - 1) n b g (d+dv) e   2 (p - 1) p / m
    dK and dV                                  p n b g (d+dv) e'        2 p p / m
    losses              gathered to [b, s]     (p - 1) n b e'           p - 1

Forward and backward each move the weights, K and V once; backward alone moves gradients. A lookup's
backward moves gradients only, the losses are gathered in forward only. A broadcast or a sum counts
as in :mod:`megatron_longseq.measurement.operations`: each rank passes every shard on but once.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StreamTraffic:
    """What one rank sends of one kind of data."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: "StreamTraffic") -> "StreamTraffic":
        return StreamTraffic(self.messages + other.messages, self.bytes + other.bytes)


@dataclass(frozen=True)
class PassTraffic:
    """What one rank sends in one forward or one backward; passes add up to layers and models.

    Attributes:
        weight_ring, weight_gradients: of the matmul chain, the vocabulary loss or the lookup.
        weight_broadcast, weight_sums: of attention's weights and of their gradients.
        key_value_ring, key_value_gradients: of attention.
        losses: of all tokens.
    """

    weight_ring: StreamTraffic = field(default_factory=StreamTraffic)
    weight_gradients: StreamTraffic = field(default_factory=StreamTraffic)
    weight_broadcast: StreamTraffic = field(default_factory=StreamTraffic)
    weight_sums: StreamTraffic = field(default_factory=StreamTraffic)
    key_value_ring: StreamTraffic = field(default_factory=StreamTraffic)
    key_value_gradients: StreamTraffic = field(default_factory=StreamTraffic)
    losses: StreamTraffic = field(default_factory=StreamTraffic)

    def __add__(self, other: "PassTraffic") -> "PassTraffic":
        return PassTraffic(*(a + b for a, b in zip(self._streams(), other._streams(), strict=True)))

    @property
    def bytes(self) -> int:
        """Of all streams together."""
        return sum(stream.bytes for stream in self._streams())

    @property
    def messages(self) -> int:
        """Of all streams together."""
        return sum(stream.messages for stream in self._streams())

    def _streams(self) -> tuple[StreamTraffic, ...]:
        return (
            self.weight_ring,
            self.weight_gradients,
            self.weight_broadcast,
            self.weight_sums,
            self.key_value_ring,
            self.key_value_gradients,
            self.losses,
        )


def matmul_chain_traffic(
    *,
    ranks: int,
    hidden: int,
    ffn: int,
    out: int | None = None,
    gated: bool = False,
    bias: bool = False,
    element_bytes: int,
    gradient_bytes: int,
    backward: bool,
    trained: bool = True,
) -> PassTraffic:
    """What one rank sends in one pass of :class:`.matmul_chain.RingMatmulChain`.

    Args:
        hidden, ffn, out: columns of the input, of the inner values, and of the output (``hidden``
            if not given), over all ranks.
        gated: f takes a gate and a value per inner column (SwiGLU, GeGLU).
        bias: of the first product; it travels with its weight.
        element_bytes, gradient_bytes: per element of the weights and of their gradients on the way.
        trained: some weight or bias needs a gradient; otherwise no gradient moves.
    """
    first = ffn // ranks * (2 if gated else 1)
    shard = first * hidden + ffn // ranks * (hidden if out is None else out)
    tensors = 2
    if bias:
        shard, tensors = shard + first, 3
    return PassTraffic(
        weight_ring=_hops(ranks - 1, tensors, shard * element_bytes),
        weight_gradients=_gradient_hops(ranks, tensors, shard * gradient_bytes, backward, trained),
    )


def head_group_traffic(
    *,
    ranks: int,
    tokens: int,
    batch: int,
    hidden: int,
    query_heads: int,
    key_heads: int,
    width: int,
    value_width: int | None = None,
    bias: bool = False,
    per_step: int = 1,
    element_bytes: int,
    gradient_bytes: int,
    backward: bool,
    trained: bool = True,
) -> PassTraffic:
    """What one rank sends in one pass of :class:`.head_groups.HeadGroupAttention`.

    Args:
        tokens: on this rank; the same ranks share weights and tokens.
        hidden: columns of the input and of the output.
        width, value_width: of queries and keys, and of values (``width`` if not given).
        bias: of query, key and value.
        per_step: weight shards per outer step.
        element_bytes: per element of weights, keys and values.
        gradient_bytes: per element of weight gradients and of dK and dV on their way.
        trained: some weight or bias needs a gradient.
    """
    value_width = width if value_width is None else value_width
    mixed = (query_heads + key_heads) * width + key_heads * value_width
    shard = (mixed * (hidden + bias) + query_heads * value_width * hidden) // ranks
    tensors = 3 if bias else 2
    steps = ranks // per_step
    key_value = tokens * batch * key_heads * (width + value_width)
    return PassTraffic(
        weight_broadcast=_hops(ranks - 1, tensors, shard * element_bytes),
        weight_sums=_hops(ranks - 1, tensors, shard * gradient_bytes)
        if backward and trained
        else StreamTraffic(),
        key_value_ring=_hops(ranks - 1, 2 * steps, key_value * element_bytes),
        key_value_gradients=_gradient_hops(
            ranks, 2 * steps, key_value * gradient_bytes, backward, True
        ),
    )


def vocabulary_loss_traffic(
    *,
    ranks: int,
    tokens: int,
    batch: int,
    hidden: int,
    vocabulary: int,
    element_bytes: int,
    gradient_bytes: int,
    loss_bytes: int = 4,
    backward: bool,
    trained: bool = True,
) -> PassTraffic:
    """What one rank sends in one pass of :func:`.vocab_loss.ring_cross_entropy`.

    Args:
        tokens: on this rank.
        vocabulary: rows of the output embedding, padding included.
        element_bytes, gradient_bytes: per element of the weight and of its gradient on the way.
        loss_bytes: per loss: 4, or 8 if everything is fp64.
        trained: the weight needs a gradient.
    """
    shard = vocabulary // ranks * hidden
    gathered = tokens * batch * loss_bytes
    return PassTraffic(
        weight_ring=_hops(ranks - 1, 1, shard * element_bytes),
        weight_gradients=_gradient_hops(ranks, 1, shard * gradient_bytes, backward, trained),
        losses=StreamTraffic() if backward else _hops(ranks - 1, 1, gathered),
    )


def embedding_traffic(
    *,
    ranks: int,
    hidden: int,
    vocabulary: int,
    element_bytes: int,
    gradient_bytes: int,
    backward: bool,
    trained: bool = True,
) -> PassTraffic:
    """What one rank sends in one pass of :func:`.embedding.ring_embedding`; arguments as above."""
    shard = vocabulary // ranks * hidden
    if backward:
        return PassTraffic(
            weight_gradients=_gradient_hops(ranks, 1, shard * gradient_bytes, True, trained)
        )
    return PassTraffic(weight_ring=_hops(ranks - 1, 1, shard * element_bytes))


def _hops(hops: int, tensors: int, bytes_per_hop: int) -> StreamTraffic:
    return StreamTraffic(hops * tensors, hops * bytes_per_hop)


def _gradient_hops(
    ranks: int, tensors: int, bytes_per_hop: int, backward: bool, trained: bool
) -> StreamTraffic:
    """One hop per rank, the last of which brings the sum home; none if it has not far to go."""
    if ranks == 1 or not backward or not trained:
        return StreamTraffic()
    return _hops(ranks, tensors, bytes_per_hop)
