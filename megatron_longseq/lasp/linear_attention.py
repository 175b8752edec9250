"""Linear attention over a sequence split among ranks (LASP, LASP-2, ZeCO), for layers with gates.

    S_i = T_i S_{i-1} + write_i        o_i = scale q_i S_i

| gates | T_i | write_i |
|---|---|---|
| ``log_decay`` g per head, token or key channel | ``exp(g_i)`` | ``k_i^T v_i`` |
| and ``beta`` (delta rule) | ``exp(g_i) (I - beta_i k_i^T k_i)`` | ``beta_i k_i^T v_i`` |

Each rank keeps its tokens and summarises them in a state of ``d x e`` per head; an exclusive scan
of these summaries along the chain of segments gives every segment the state that enters it. What
moves does not depend on the length of the sequence. Kept for backward: the inputs, those states,
and, with documents, a boolean per token.

Sources: LASP, arXiv 2404.02882; LASP-2, 2502.07563; ZeCO, 2507.01004. Derivations of the gradients
are in ``docs/lasp-operator.md``.
"""

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.agreement import GridAgreement
from ..communication.collectives import Collectives
from ..communication.groups import GroupPlace
from ..communication.scan import Scan, ScheduleName
from ..communication.transport import DEFAULT_TIMEOUT_SECONDS
from ..document_boundaries import boundaries_of, describe_boundaries
from ..errors import UserError, divisors
from ..token_layout import Layout, SegmentChain
from .bidirectional import BidirectionalFunction
from .chunk_kernels import ChunkKernel, choose_kernel
from .documents import Documents
from .inputs import Inputs
from .normalizer import divide_by_last, with_ones
from .passes import LinearAttentionFunction, Plan
from .segments import Segments


class LinearAttentionOperator:
    """Linear attention over a fixed group, with its buffers.

    One object serves all layers; calls may be in flight at the same time. All ranks of the group
    make it, every call and every backward together and in the same order.

    Args:
        group: the ranks that share the sequence, in order of their positions; ``None`` for one.
        layout: which tokens a rank holds, see :class:`~megatron_longseq.token_layout.SegmentChain`:
            ``"zigzag"``, Megatron's, two segments per rank; or ``"contiguous"``, one.
        schedule: of the scan, see :mod:`megatron_longseq.communication.scan`.
        backend: kernel of this rank's part, see :mod:`.chunk_kernels`: a name, ``"auto"``, or a
            kernel.
        node_size: for ``two_level``: ranks of the group per node, consecutive ones. If not given,
            found by ``LOCAL_WORLD_SIZE``, torchrun's number of ranks per node.
        scan: one made for this group and layout, with options of its own, in place of ``schedule``
            and ``node_size``.
        timeout_seconds: limit of every wait. NCCL waits on the GPU, not on the host: there the
            limit given to the process group when it was made applies.
        check_agreement: compare shapes and options across the ranks at every call.
        check_values: look for decays outside (0, 1]; on a GPU this waits for their computation.

    Over NCCL the first operation of a group wants all of its ranks: the comparison is one. Without
    it, make another before the first call. On a GPU each comparison makes the host wait for what
    has been issued before; in training, where all ranks have read the same flags, leave it out.

    Raises:
        UserError: an unknown layout or schedule, nodes that the ranks do not fill, a scan of
            another group or layout or besides a schedule, or a time limit that is not positive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        layout: Layout = "zigzag",
        schedule: ScheduleName | Literal["auto"] = "auto",
        node_size: int | None = None,
        backend: str | ChunkKernel = "auto",
        scan: Scan | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        check_agreement: bool = True,
        check_values: bool = True,
    ) -> None:
        if not timeout_seconds > 0:
            raise UserError(f"timeout_seconds={timeout_seconds} must be a positive number")
        self.place = GroupPlace.of(group)
        self.layout = layout
        chain = SegmentChain(self.place.size, layout)
        if scan is not None and (scan.chain != chain or scan.place != self.place):
            raise UserError(
                f"scan over the ranks {list(scan.place.ranks)} in {scan.chain.layout} layout: the "
                f"operator has the ranks {list(self.place.ranks)} in {layout} layout; they must "
                "be the same"
            )
        if scan is not None and (schedule != "auto" or node_size is not None):
            raise UserError(
                f"schedule={schedule!r} and node_size={node_size} beside a scan, which has "
                f"{scan.schedule!r} and {scan.node_size}: give the scan its own, or no scan"
            )
        if schedule == "two_level" and node_size is None and self.place.size > 1:
            node_size = _node_size(self.place)
        # One rank has the whole sequence: one segment, whatever the layout.
        self.chain = chain if self.place.size > 1 else SegmentChain(1, "contiguous")
        self.scan = scan or Scan(
            group,
            layout=layout,
            schedule=schedule,
            node_size=node_size,
            timeout_seconds=timeout_seconds,
            # The inputs are compared here, and what is scanned follows from them.
            check_agreement=False,
        )
        self._backend = backend
        self._collectives = Collectives(self.place, "linear attention states", timeout_seconds)
        self._agreement = GridAgreement(GroupPlace.of(None), self.place, timeout_seconds)
        self._check_agreement = check_agreement
        self._check_values = check_values

    def __deepcopy__(self, _memo: dict[int, Any]) -> "LinearAttentionOperator":
        # Copies of a model share groups and buffers, which cannot be copied.
        return self

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        scale: float = 1.0,
        normalize: bool = False,
        causal: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Linear attention of this rank's tokens; see :func:`linear_attention`."""
        inputs = Inputs(
            query,
            key,
            value,
            log_decay,
            beta,
            initial_state,
            output_final_state,
            cu_seqlens,
            scale,
            normalize,
            causal,
        )
        return self._attend(inputs, None)

    def _attend(self, inputs: Inputs, problem: UserError | None) -> tuple[Tensor, Tensor | None]:
        kernel, boundaries = self._prepare(inputs, problem)
        # Sums are in fp32: autocast must not turn their products into 16 bits.
        with torch.autocast(inputs.query.device.type, enabled=False):
            return self._run(inputs, kernel, boundaries)

    def _run(
        self, inputs: Inputs, kernel: ChunkKernel, boundaries: list[int] | None
    ) -> tuple[Tensor, Tensor | None]:
        value = with_ones(inputs.value) if inputs.normalize else inputs.value
        final: Tensor | None = None
        if not inputs.causal:
            out = self._both_ways(inputs, value, kernel, boundaries)
        else:
            dtype = inputs.sum_dtype if inputs.normalize else inputs.query.dtype
            out, final = self._one_way(inputs, value, kernel, boundaries, dtype)
        if inputs.normalize:
            out = divide_by_last(out, inputs.query.dtype)
        return out.to(inputs.query.dtype), final

    def _one_way(
        self,
        inputs: Inputs,
        value: Tensor,
        kernel: ChunkKernel,
        boundaries: list[int] | None,
        out_dtype: torch.dtype,
        *,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass along the chain, in time or against it."""
        chain, position = self.chain, self.place.position
        total, device = inputs.key.shape[1] * self.place.size, inputs.key.device
        documents = Documents.of(boundaries, chain, position, total, device, reverse=reverse)
        positions = chain.positions(position)
        holder, _ = chain.holder(chain.length - 1)
        plan = Plan(
            kernel=kernel,
            scan=self.scan if documents.connected else None,
            collectives=self._collectives,
            segments=chain.segments_per_rank,
            first=positions.index(0) if 0 in positions else None,
            last=positions.index(chain.length - 1) if position == holder else None,
            last_holder=holder,
            starts=documents.starts,
            scale=inputs.scale,
            reverse=reverse,
            out_dtype=out_dtype,
            output_final_state=inputs.output_final_state,
        )
        return LinearAttentionFunction.apply(
            inputs.query,
            inputs.key,
            value,
            inputs.log_decay,
            inputs.beta,
            inputs.initial_state,
            plan,
        )

    def _both_ways(
        self, inputs: Inputs, value: Tensor, kernel: ChunkKernel, boundaries: list[int] | None
    ) -> Tensor:
        """The output in the dtype of the sums."""
        dtype = inputs.sum_dtype
        if inputs.log_decay is None and len(set(boundaries or ())) <= 2:  # one document
            return BidirectionalFunction.apply(
                inputs.query, inputs.key, value, self._collectives, inputs.scale, dtype
            )
        forward, _ = self._one_way(inputs, value, kernel, boundaries, dtype)
        backward, _ = self._one_way(inputs, value, kernel, boundaries, dtype, reverse=True)
        # Both ways count a token's own write.
        return forward + backward - _own_write(inputs, value)

    def _prepare(
        self, inputs: Inputs, problem: UserError | None
    ) -> tuple[ChunkKernel, list[int] | None]:
        """Checks the inputs, here and across the ranks; all ranks raise or none does."""
        boundaries: list[int] | None = None
        kernel: ChunkKernel | None = None
        if problem is None:
            try:
                inputs.check(self.chain, values=self._check_values)
                if inputs.cu_seqlens is not None:
                    total = inputs.key.shape[1] * self.place.size
                    boundaries = boundaries_of(inputs.cu_seqlens, total)
                kernel = self._choose(inputs)
            except UserError as error:
                problem = error
        if self._check_agreement:
            backend = self._backend if isinstance(self._backend, str) else self._backend.name
            options = {
                "layout": self.layout,
                "schedule": self.scan.schedule,
                "node_size": self.scan.node_size,
                "cu_seqlens": describe_boundaries(boundaries),
                "backend": kernel.name if kernel else backend,
                "problem": problem or "none",
            }
            self._agreement.verify(inputs.describe() | options)
        if problem is not None:
            raise problem
        assert kernel is not None
        return kernel, boundaries

    def _choose(self, inputs: Inputs) -> ChunkKernel:
        def cut(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.dim() == 1:
                return tensor
            return tensor.unflatten(1, (self.chain.segments_per_rank, -1))

        names = ("query", "key", "value", "log_decay", "beta")
        tensors: dict[str, Any] = {name: cut(getattr(inputs, name)) for name in names}
        return choose_kernel(self._backend, Segments(**tensors))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    schedule: ScheduleName | Literal["auto"] = "auto",
    scale: float = 1.0,
    normalize: bool = False,
    causal: bool = True,
    backend: str = "auto",
    node_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention over a sequence split among the ranks of a group.

    A collective call: all ranks of the group make it, forward and backward; a rank that does not
    use its output gives it a zero gradient. For repeated calls keep a
    :class:`LinearAttentionOperator`.

    Args:
        q: ``[b, n, hq, d]``: batch, this rank's tokens, heads, width; feature map and norms already
            applied. fp64, fp32, bf16 or fp16.
        k: ``[b, n, hk, d]``. For the delta rule of unit length, or beta small enough.
        v: ``[b, n, hv, e]``. Either ``hq = hk`` divides hv (grouped values) or ``hk = hv`` divides
            hq (grouped queries); a state is kept per pair of key and value heads, ``h`` in all.
        log_decay: natural logarithm of the decay, finite and <= 0: ``None`` for none, ``[h]`` per
            head, ``[b, n, h]`` per token (Mamba-2), ``[b, n, h, d]`` per key channel (GLA). Best in
            fp32.
        beta: ``[b, n, h]``: the delta rule's write strength (DeltaNet, GDN, KDA).
        initial_state: ``[b, h, d, e]``, before the first token; all ranks pass one, that of the
            rank with the first token counts. With documents it enters the first that has tokens.
        output_final_state: return the state after the last token, of the last document that has
            tokens.
        group: the ranks that share the sequence, equally long parts each; ``None`` for one process.
        layout: ``"zigzag"``: rank r of P holds pieces r and 2P - 1 - r of 2P, in this order;
            ``"contiguous"``: piece r of P. Never guessed.
        cu_seqlens: boundaries of packed documents, integers from 0 to the tokens of all ranks, the
            same list on every rank; batch 1. Any lengths, empty ones included.
        schedule: how states travel; see :mod:`megatron_longseq.communication.scan`.
        scale: factor of the output. There is no default ``d ** -0.5``.
        normalize: divide by the sum of the weights, ``q_i . sum_j decayed k_j``, plus 1e-6. For
            feature maps > 0. States have one more column, that of the denominator: ``e + 1``.
        causal: a token sees itself and what comes before it; otherwise all of its document, decayed
            by the distance on either side. A state can enter or leave causal attention only.
        backend: ``"torch"``, ``"triton"`` or ``"auto"``, which is ``"torch"`` on any device;
            see :mod:`.chunk_kernels`.
        node_size: of ``schedule="two_level"``: ranks of the group per node, consecutive ones; by
            ``LOCAL_WORLD_SIZE`` if not given.

    Returns:
        The output ``[b, n, max(hq, hv), e]`` in the dtype of q, and the final state
        ``[b, h, d, e]`` in fp32 (fp64 for fp64), or ``None``. The final state is on every rank and
        differentiable on the one that has the last token: rank 0 on zigzag, the last one on
        contiguous. Gradients are exact, that of a learnable decay included; ``initial_state`` has
        its gradient on the rank with the first token, zero elsewhere. So where the final state of
        one piece of a sequence is the initial one of the next, gradients flow on between pieces on
        the zigzag, where one rank has both; on contiguous parts they end there. They cannot be
        differentiated again.

    Raises:
        UserError: the inputs do not fit, here or on another rank; on every rank alike.
        CommunicationError: a transfer failed or took too long.

    Source:
        LASP, arXiv 2404.02882; LASP-2, arXiv 2502.07563; see ``docs/lasp-operator.md``.
    """
    inputs = Inputs(
        q,
        k,
        v,
        log_decay,
        beta,
        initial_state,
        output_final_state,
        cu_seqlens,
        scale,
        normalize,
        causal,
    )
    problem: UserError | None = None
    try:
        operator = LinearAttentionOperator(
            group, layout=layout, schedule=schedule, node_size=node_size, backend=backend
        )
    except UserError as error:
        # The other ranks may know nothing of it: tell them where they compare their inputs.
        problem, operator = error, LinearAttentionOperator(group)
    return operator._attend(inputs, problem)


def _node_size(place: GroupPlace) -> int:
    """Ranks of the group per node, by torchrun's environment."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    found = place.ranks_per_node(int(local)) if local.isdecimal() and int(local) > 0 else None
    if found is None:
        raise UserError(
            "schedule 'two_level' needs node_size, the ranks of the group per node: "
            f"LOCAL_WORLD_SIZE={local or None} does not tell it for the ranks "
            f"{list(place.ranks)}; pass node_size, one of {divisors(place.size)}, or another "
            "schedule"
        )
    return found


def _own_write(inputs: Inputs, value: Tensor) -> Tensor:
    """``scale (q_i . k_i) v_i``, in the dtype of the sums."""
    heads = max(inputs.query.shape[2], value.shape[2])
    query, key, value = (
        tensor.to(inputs.sum_dtype).repeat_interleave(heads // tensor.shape[2], 2)
        for tensor in (inputs.query, inputs.key, value)
    )
    return inputs.scale * (query * key).sum(-1, keepdim=True) * value
