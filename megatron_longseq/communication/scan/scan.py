"""The state at the first token of every segment, for a chain of segments spread over ranks.

    scan = Scan(group, layout="zigzag")              # once; layers share it
    handle = scan.start([front, back])               # pairs (A, X) of this rank's segments
    ...                                              # work that does not need the states
    front_state, back_state = handle.wait().states   # S_in of each

Each pair is an affine map ``S_out = A S_in + X``; see
:class:`megatron_longseq.lasp.recurrence.Affine`. In backward the same object scans ``(A^T, Y)`` in
reverse. Sources: LASP (arXiv 2404.02882) for ``ring``, LASP-2 (2502.07563) for ``all_gather``, ZeCO
(2507.01004) for ``all_scan``. What each schedule sends, and how long it takes: :mod:`.costs`.

Who carries a scan on while the caller computes: over NCCL, nobody has to. The whole scan is issued
at start() on a CUDA stream of its own, and wait() only orders the caller's stream behind it. A
gather over gloo is carried on by gloo. For the schedules that take several hops over gloo a thread
waits for what comes and passes it on (see :mod:`.carriers` for why nothing less would do); it sends
and receives with a tag of its own and makes no collective call, as the order of those must be the
same on every rank and the caller makes others meanwhile.

For fixed groups, schedule and shapes, results are the same bits in every run: what is composed with
what is fixed by the schedule, not by what arrives first.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UserError, check_at_least_one, divisors, nearest_values
from ...token_layout import Layout, SegmentChain
from ..agreement import GridAgreement
from ..buffers import BufferPool
from ..groups import GroupPlace
from ..transport import DEFAULT_TIMEOUT_SECONDS, Channel, Staging, Stream
from .broadcast import Broadcast
from .carriers import AtOnce, Carrier, OnCaller, Worker
from .costs import (
    SCHEDULES,
    LinkCosts,
    ScanShape,
    ScheduleName,
    best_blocks,
    choose_schedule,
    scan_steps,
)
from .gather import GatherScan
from .job import Job, ScanResult, StateScan, Total
from .local import LocalScan
from .log_scan import LogScan
from .mailbox import Mailbox, holds_host
from .pair import Course, Pair
from .serial import SerialScan
from .side_stream import SideStream
from .two_level import TwoLevelScan

SCAN = Stream("scan of states", 4)

ACROSS: tuple[ScheduleName, ...] = ("ring", "all_scan", "log_scan")


SeveralHops = SerialScan | LogScan


class ScanHandle:
    """A scan under way.

    Attributes:
        wait_seconds: how long wait() held its caller. Over NCCL it holds nobody.
    """

    def __init__(self, job: Job, carrier: Carrier) -> None:
        self._job = job
        self._carrier = carrier
        self.wait_seconds = 0.0

    def wait(self) -> ScanResult:
        """The states that enter this rank's segments, and the total where it was asked for.

        May be called again, for the same result.

        Raises:
            CommunicationError: a transfer failed or took too long; names the step and the peer.
        """
        started = time.perf_counter()
        try:
            self._carrier.finish(self._job)
            return self._job.result()
        finally:
            self.wait_seconds += time.perf_counter() - started


class Scan:
    """Exclusive scans along the chain of segments of a group. Make one and share it.

    All ranks of the group start the same scans in the same order. Several may be under way; they
    are carried out one after another, and so are those of several objects on one group: give each a
    group of its own if they are to run side by side. (Scans of several objects on one group that
    the caller carries must not be under way at once: nothing keeps their messages apart.)

    Args:
        group: the ranks that share a sequence, in its order; ``None`` for a single process.
        layout: which segments a rank holds: ``"zigzag"``, positions r and 2 P - 1 - r of the
            chain, or ``"contiguous"``, position r.
        schedule: ``"ring"``, ``"all_gather"``, ``"log_scan"``, ``"all_scan"``, ``"two_level"``, or
            ``"auto"``, which picks one from ``costs`` for the sizes at hand.
        blocks: into how many blocks ``all_scan`` cuts a state; from ``costs`` if not given.
        node_size: ranks per node, consecutive ones, for ``two_level``. ``auto`` takes that schedule
            where this is given and the group is larger.
        across: the schedule between nodes: ``"ring"``, ``"all_scan"`` or ``"log_scan"``.
        costs: what choices are based on, the same on every rank.
        timeout_seconds, staging: see :class:`~..transport.Channel`.
        check_agreement: compare shapes and options across the ranks at every start, so that all
            raise the same error if they differ. Costs one small reduction over the group; without
            it the caller answers for them. (NCCL wants all ranks in the first operation of a group,
            which that reduction is; without it, make another before the first scan.)
        carried_by: who carries scans of several hops on where a wait holds the host: a
            ``"thread"``, or the ``"caller"`` inside wait(). The latter hides nothing, but all
            operations happen on the caller's thread, where dispatch modes such as
            :class:`megatron_longseq.measurement.TrafficCounter` see them.

    Raises:
        UserError: an option that is not one, or that does not fit the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        layout: Layout = "zigzag",
        schedule: ScheduleName | Literal["auto"] = "auto",
        blocks: int | None = None,
        node_size: int | None = None,
        across: ScheduleName = "ring",
        costs: LinkCosts | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        staging: Staging = "auto",
        check_agreement: bool = True,
        carried_by: Literal["thread", "caller"] = "thread",
    ) -> None:
        self.place = GroupPlace.of(group)
        self.chain = SegmentChain(self.place.size, layout)
        self.schedule = schedule
        self.node_size = node_size
        self.across = across
        self.costs = costs or LinkCosts()
        # Scans have a stream of their own on a GPU, and so buffers of their own.
        self.buffers = BufferPool()
        self._blocks = blocks
        self._check_options()
        self._channel = Channel(
            self.place, SCAN, self.buffers, timeout_seconds=timeout_seconds, staging=staging
        )
        self._agreement = GridAgreement(GroupPlace.of(None), self.place, timeout_seconds)
        self._check_agreement = check_agreement
        self._side = SideStream()
        self._carrier: Carrier = OnCaller()
        if carried_by == "thread":
            self._carrier = Worker(SCAN.name, self.place)
        self._late_errors: list[BaseException] = []

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Scan":
        # Copies of a model share groups, buffers and the thread, which cannot be copied.
        return self

    @property
    def holds_first(self) -> bool:
        """Whether this rank holds the chain's first segment, and so reads ``initial_state``."""
        return self.chain.holder(0)[0] == self.place.position

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the chain's last segment, and so has the total of the chain."""
        return self.chain.holder(self.chain.length - 1)[0] == self.place.position

    def start(
        self,
        pairs: Sequence[Pair],
        *,
        reverse: bool = False,
        initial_state: Tensor | None = None,
        total: Total = "none",
        hidden_seconds: float | None = None,
    ) -> ScanHandle:
        """Starts a scan; a collective call.

        Args:
            pairs: of this rank's segments, in its local order (two on the zigzag, front and back);
                of the same shapes everywhere. Left alone until wait() has returned; gradients do
                not flow through a scan.
            reverse: scan against the chain: what enters a segment comes from those after it.
            initial_state: the state before the chain, in the shape of X; in reverse, that behind
                its end. Read on the rank that holds the first segment (in reverse: the last), where
                ``None`` stands for zeros, and ignored elsewhere.
            total: who gets the state after the whole chain: ``"none"``, its ``"owner"``, the rank
                that holds the last segment (in reverse: the first), or all, ``"everywhere"``.
            hidden_seconds: as in :class:`~.costs.LinkCosts`, if it differs from call to call.

        Raises:
            UserError: pairs, state or options do not fit, here or on another rank; on every rank
                alike.
            CommunicationError: posting failed, or sending in an earlier scan.
        """
        if self._late_errors:
            raise self._late_errors.pop()
        course = Course.of(self.place, self.chain.layout, reverse=reverse)
        enters_here = course.chain.holder(0)[0] == course.place
        entering = initial_state.detach() if enters_here and initial_state is not None else None
        problem = self._problem(pairs, entering, total)
        chosen = None if problem else self._chosen(pairs[0], hidden_seconds)
        if self._check_agreement:
            self._agreement.verify(_described(pairs, reverse, total, chosen, problem))
        if problem is not None:
            raise problem
        assert chosen is not None
        with torch.no_grad():
            return self._launch(pairs, course, entering, total, *chosen)

    def shape(self, pair: Pair, hidden_seconds: float | None = None) -> ScanShape:
        """The scan of pairs like this one, as the formulas of :mod:`.costs` take it."""
        state, transition = pair.state, pair.transition
        shape = ScanShape(
            size=self.place.size,
            layout=self.chain.layout,
            state_bytes=state.numel() * state.element_size(),
            transition_bytes=transition.numel() * transition.element_size(),
            composes_cheaply=pair.composes_cheaply,
            split_transition=pair.splits_transition,
            node_size=self.node_size,
            across=self.across,
        )
        blocks = self._blocks or best_blocks(shape, self._costs(hidden_seconds), pair.block_limit)
        return replace(shape, blocks=blocks)

    # Before a scan

    def _check_options(self) -> None:
        known = (*SCHEDULES, "auto")
        if self.schedule not in known:
            raise UserError(f"schedule {self.schedule!r}: must be one of {_listed(known)}")
        if self.across not in ACROSS:
            raise UserError(f"across {self.across!r}: must be one of {_listed(ACROSS)}")
        check_at_least_one("blocks", self._blocks)
        check_at_least_one("node_size", self.node_size)
        size = self.place.size
        if self.node_size is not None and size % self.node_size:
            raise UserError(
                f"node_size {self.node_size}: must divide the {size} ranks of the group; nearest: "
                f"{nearest_values(self.node_size, divisors(size))}"
            )
        if self.schedule == "two_level" and self.node_size is None and size > 1:
            raise UserError("schedule 'two_level' needs node_size, the ranks per node")

    def _problem(
        self, pairs: Sequence[Pair], entering: Tensor | None, total: str
    ) -> UserError | None:
        """What is wrong with the arguments on this rank."""
        if len(pairs) != self.chain.segments_per_rank:
            return UserError(
                f"{len(pairs)} pairs: the {self.chain.layout} layout has "
                f"{self.chain.segments_per_rank} per rank"
            )
        first = pairs[0]
        for pair in pairs[1:]:
            if _form(pair) != _form(first):
                return UserError(f"the pairs of a rank differ: {_form(first)} and {_form(pair)}")
        if entering is not None and (
            entering.shape != first.state.shape or entering.dtype != first.state.dtype
        ):
            return UserError(
                f"initial_state {list(entering.shape)} in {entering.dtype}: must be as the states "
                f"of the pairs, {list(first.state.shape)} in {first.state.dtype}"
            )
        if self._blocks is not None and self._blocks > first.block_limit:
            return UserError(
                f"blocks {self._blocks}: a state of this scan has at most {first.block_limit}"
            )
        if total not in get_args(Total):
            return UserError(f"total {total!r}: must be one of {_listed(get_args(Total))}")
        return None

    def _chosen(self, pair: Pair, hidden_seconds: float | None) -> tuple[ScheduleName, ScanShape]:
        shape = self.shape(pair, hidden_seconds)
        if self.schedule != "auto":
            return self.schedule, shape
        return choose_schedule(shape, self._costs(hidden_seconds)), shape

    def _costs(self, hidden_seconds: float | None) -> LinkCosts:
        if hidden_seconds is None:
            return self.costs
        return replace(self.costs, hidden_seconds=hidden_seconds)

    # A scan

    def _launch(
        self,
        pairs: Sequence[Pair],
        course: Course,
        entering: Tensor | None,
        total: Total,
        name: ScheduleName,
        shape: ScanShape,
    ) -> ScanHandle:
        like = pairs[0]
        holds = course.size > 1 and holds_host(like.state, self.place)
        broadcast: Broadcast | None = None
        last = course.chain.holder(course.chain.length - 1)[0]
        # What is received into belongs to the stream that receives: the allocator must not give it
        # away by the order of the caller's.
        with self._side.after(self._side.now(like.state.device), [like.state]):
            mailbox = Mailbox(self._channel, self.buffers, like.state, receive_early=holds)
            try:
                schedule = self._schedule(name, mailbox, course, like, shape, total)
                steps = schedule.steps
                if total == "everywhere" and course.size > 1 and name != "all_gather":
                    broadcast = Broadcast(mailbox, course, last, like.state, steps)
                    steps += broadcast.steps
                mailbox.open(steps)
            except BaseException:
                mailbox.close()
                raise
        job = Job(
            schedule,
            mailbox,
            pairs[::-1] if course.swapped else pairs,
            entering=entering,
            swapped=course.swapped,
            holds_last=last == course.place,
            total=total,
            broadcast=broadcast,
            side=self._side,
            late_errors=self._late_errors,
        )
        carrier: Carrier = AtOnce()
        if holds:
            carrier = OnCaller() if name == "all_gather" else self._carrier
        if carrier.idle:
            job.begin()
        carrier.submit(job)
        return ScanHandle(job, carrier)

    def _schedule(
        self,
        name: ScheduleName,
        mailbox: Mailbox,
        course: Course,
        like: Pair,
        shape: ScanShape,
        total: Total,
    ) -> StateScan:
        def several_hops(name: ScheduleName, course: Course, first_step: int) -> SeveralHops:
            if name == "log_scan":
                return LogScan(mailbox, course, like, first_step=first_step)
            blocks = shape.blocks if name == "all_scan" else 1
            return SerialScan(mailbox, course, like, blocks=blocks, first_step=first_step)

        if course.size == 1:
            return LocalScan()
        if name == "all_gather":
            return GatherScan(self._channel, course, like, with_total=total == "everywhere")
        if name != "two_level":
            return several_hops(name, course, 0)
        assert self.node_size is not None
        return TwoLevelScan(
            mailbox,
            course,
            like,
            node_size=self.node_size,
            across=lambda nodes, first_step: several_hops(self.across, nodes, first_step),
            across_steps=scan_steps(self.across, shape.with_size(course.size // self.node_size)),
        )


def _described(
    pairs: Sequence[Pair],
    reverse: bool,
    total: str,
    chosen: tuple[ScheduleName, ScanShape] | None,
    problem: UserError | None,
) -> dict[str, object]:
    """What must be equal on all ranks."""
    fields: dict[str, object] = {"pairs": "; ".join(map(_form, pairs))}
    fields |= {"reverse": reverse, "total": total, "problem": problem or "none"}
    if chosen is not None:
        name, shape = chosen
        fields |= {"schedule": name, "layout": shape.layout, "blocks": shape.blocks}
        fields |= {"node_size": shape.node_size, "across": shape.across}
    return fields


def _form(pair: Pair) -> str:
    state, transition = pair.state, pair.transition
    dtype = str(state.dtype).removeprefix("torch.")
    return f"transition {list(transition.shape)}, state {list(state.shape)}, {dtype}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
