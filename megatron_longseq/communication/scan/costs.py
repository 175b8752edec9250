"""What each schedule sends and how long it takes, as formulas; and the choice made from them.

With P ranks, S and A bytes of a state and of a transition, K blocks, latency a and b seconds per
byte; on the zigzag of two segments per rank, ``2`` stands for them, else read 1:

    ring         (P - 1) (a + b S)                             state first, one hop after the other
    all_scan     (P + K - 2) (a + b S / K)                     blocks in flight one behind the other
    all_gather   a log2 P + (P - 1) b 2 (S + A)                one collective
    log_scan     log2(2 P) (a + b 2 (S + A))
    two_level    the nodes' gather and broadcast, and any of the others between n nodes

A serial schedule on the zigzag (see :mod:`.serial`) sends pairs where it sent states, and takes
``log2 P`` hops more for the broadcast, or, for matrix transitions, doubles its hops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from ...token_layout import Layout, SegmentChain
from .broadcast import children, rounds
from .serial import serial_steps

ScheduleName = Literal["ring", "all_gather", "log_scan", "all_scan", "two_level"]
SCHEDULES: tuple[ScheduleName, ...] = (
    "ring",
    "all_gather",
    "log_scan",
    "all_scan",
    "two_level",
)


@dataclass(frozen=True)
class LinkCosts:
    """What a choice of schedule is based on: constants, equal on all ranks, never measured there.

    The defaults are nominal, for one 200 Gbit/s port per rank between nodes and 400 GB/s within:
    pass a planner's constants where the choice matters.

    Attributes:
        latency_seconds: of a message between ranks; between nodes if the group spans several.
        seconds_per_byte: likewise.
        node_latency_seconds, node_seconds_per_byte: of a message within a node.
        hidden_seconds: the work of the caller beside which a scan runs; ``None``: as each start
            says, or else nothing.
        flops_per_second: of that work, for a caller that predicts it, as linear attention does.
    """

    latency_seconds: float = 20e-6
    seconds_per_byte: float = 1 / 25e9
    node_latency_seconds: float = 10e-6
    node_seconds_per_byte: float = 1 / 400e9
    hidden_seconds: float | None = None
    flops_per_second: float = 50e12


@dataclass(frozen=True)
class ScanShape:
    """A scan, as far as its costs depend on it.

    Attributes:
        size: ranks, P.
        layout: of the chain.
        state_bytes: of one state, S.
        transition_bytes: of one transition, A.
        composes_cheaply: A is no matrix.
        split_transition: A splits into blocks with the state (it is diagonal), instead of going
            with each of them.
        blocks: K of ``all_scan``.
        node_size: ranks per node of ``two_level``; None if the group is not known to span nodes.
        across: schedule between nodes.
    """

    size: int
    layout: Layout
    state_bytes: int
    transition_bytes: int
    composes_cheaply: bool
    split_transition: bool = False
    blocks: int = 1
    node_size: int | None = None
    across: ScheduleName = "ring"

    @property
    def chain(self) -> SegmentChain:
        """The chain of segments."""
        return SegmentChain(self.size, self.layout)

    @property
    def pair_bytes(self) -> int:
        """Of one pair."""
        return self.state_bytes + self.transition_bytes

    @property
    def from_both_ends(self) -> bool:
        """Whether a serial schedule scans pairs down the back segments meanwhile."""
        return self.layout == "zigzag" and self.composes_cheaply

    def with_size(self, size: int) -> "ScanShape":
        """The same scan of another number of ranks."""
        return ScanShape(**(vars(self) | {"size": size}))


def scan_seconds(schedule: ScheduleName, shape: ScanShape, costs: LinkCosts) -> float:
    """Predicted time of a scan from its start to the last state, alone on its links."""
    if shape.size == 1:
        return 0.0
    latency, per_byte = costs.latency_seconds, costs.seconds_per_byte
    pairs = shape.chain.segments_per_rank * shape.pair_bytes
    if schedule == "all_gather":
        return rounds(shape.size) * latency + (shape.size - 1) * per_byte * pairs
    if schedule == "log_scan":
        return rounds(shape.chain.length) * (latency + per_byte * pairs)
    if schedule == "two_level":
        members = _node_size(shape)
        states = shape.chain.segments_per_rank * shape.state_bytes
        within = 2 * costs.node_latency_seconds
        within += (members - 1) * costs.node_seconds_per_byte * (pairs + states)
        nodes = shape.with_size(shape.size // members)
        return within + scan_seconds(shape.across, nodes, costs)
    blocks = shape.blocks if schedule == "all_scan" else 1
    message = (shape.pair_bytes if shape.from_both_ends else shape.state_bytes) / blocks
    return scan_steps(schedule, shape) * (latency + per_byte * message)


def scan_steps(schedule: ScheduleName, shape: ScanShape) -> int:
    """Messages that wait for one another in a scan; a collective counts as one."""
    if shape.size == 1:
        return 0
    if schedule == "all_gather":
        return 1
    if schedule == "log_scan":
        return rounds(shape.chain.length)
    if schedule == "two_level":
        return 2 + scan_steps(shape.across, shape.with_size(shape.size // _node_size(shape)))
    return serial_steps(
        shape.size,
        shape.blocks if schedule == "all_scan" else 1,
        zigzag=shape.layout == "zigzag",
        cheap=shape.composes_cheaply,
    )


def best_blocks(shape: ScanShape, costs: LinkCosts, limit: int) -> int:
    """K of ``all_scan`` that takes least time: ``sqrt((hops - 1) b S / a)``, from 1 to ``limit``.

    Args:
        limit: the most blocks a state splits into.
    """
    hops = scan_steps("ring", shape)
    message = shape.pair_bytes if shape.from_both_ends else shape.state_bytes
    transfer = costs.seconds_per_byte * message
    best = isqrt(round(max(hops - 1, 0) * transfer / max(costs.latency_seconds, 1e-12)))
    return max(1, min(best, limit))


def choose_schedule(shape: ScanShape, costs: LinkCosts) -> ScheduleName:
    """The schedule whose time beside the caller's work is least; of about equal ones, fewest steps.

    A group that spans nodes takes ``two_level``. The same on every rank that passes the same.
    """
    if shape.node_size is not None and 1 < shape.node_size < shape.size:
        return "two_level"
    candidates: Sequence[ScheduleName] = ("all_gather", "log_scan", "ring", "all_scan")
    hidden = costs.hidden_seconds or 0.0
    seen = {name: max(0.0, scan_seconds(name, shape, costs) - hidden) for name in candidates}
    # No constant of a planner is better known than to a tenth.
    limit = 1.1 * min(seen.values())
    return min(
        (name for name in candidates if seen[name] <= limit),
        key=lambda name: (scan_steps(name, shape), seen[name]),
    )


@dataclass(frozen=True)
class ScanTraffic:
    """What one rank sends in one scan. A gather counts as that of a ring."""

    messages: int
    bytes: int

    def __add__(self, other: "ScanTraffic") -> "ScanTraffic":
        return ScanTraffic(self.messages + other.messages, self.bytes + other.bytes)


def scan_traffic(
    schedule: ScheduleName,
    shape: ScanShape,
    position: int,
    *,
    reverse: bool = False,
    total_everywhere: bool = False,
) -> ScanTraffic:
    """What the rank at a position of the group sends in one scan.

    Args:
        position: of the rank in the group.
        reverse: the scan runs against the chain.
        total_everywhere: its total is broadcast; a gather has it everywhere anyway.
    """
    mirrored = reverse and shape.layout == "contiguous"
    place = shape.size - 1 - position if mirrored else position
    traffic = _sent(schedule, shape, place) if shape.size > 1 else ScanTraffic(0, 0)
    if total_everywhere and schedule != "all_gather":
        owner = shape.chain.holder(shape.chain.length - 1)[0]
        receivers = len(children((place - owner) % shape.size, shape.size))
        traffic += ScanTraffic(receivers, receivers * shape.state_bytes)
    return traffic


def _sent(schedule: ScheduleName, shape: ScanShape, place: int) -> ScanTraffic:
    if schedule == "all_gather":
        others = shape.size - 1
        pairs = shape.chain.segments_per_rank * shape.pair_bytes
        return ScanTraffic(others, others * pairs)
    if schedule == "log_scan":
        return _sent_by_doubling(shape, place)
    if schedule == "two_level":
        return _sent_in_two_levels(shape, place)
    return _sent_in_turn(shape, place, shape.blocks if schedule == "all_scan" else 1)


def _sent_in_turn(shape: ScanShape, place: int, blocks: int) -> ScanTraffic:
    """One state forward unless last; on the zigzag also one message back unless first."""
    front = int(place < shape.size - 1)
    if shape.layout == "contiguous":
        return ScanTraffic(front * blocks, front * shape.state_bytes)
    back = int(place > 0)
    if not shape.composes_cheaply:
        return ScanTraffic((front + back) * blocks, (front + back) * shape.state_bytes)
    transitions = shape.transition_bytes * (1 if shape.split_transition else blocks)
    receivers = len(children(shape.size - 1 - place, shape.size))
    return ScanTraffic(
        (front + back + receivers) * blocks,
        (front + back + receivers) * shape.state_bytes + back * transitions,
    )


def _sent_by_doubling(shape: ScanShape, place: int) -> ScanTraffic:
    """A pair per round and segment that has another one that far behind it on another rank."""
    chain, messages = shape.chain, 0
    for position in chain.positions(place):
        for turn in range(rounds(chain.length)):
            after = position + (1 << turn)
            messages += after < chain.length and chain.holder(after)[0] != place
    return ScanTraffic(messages, messages * shape.pair_bytes)


def _sent_in_two_levels(shape: ScanShape, place: int) -> ScanTraffic:
    members = _node_size(shape)
    segments, others = shape.chain.segments_per_rank, members - 1
    traffic = ScanTraffic(others, others * segments * shape.pair_bytes)
    if place % members == 0:
        nodes = shape.with_size(shape.size // members)
        traffic += _sent(shape.across, nodes, place // members)
        traffic += ScanTraffic(others, others * segments * shape.state_bytes)
    return traffic


def _node_size(shape: ScanShape) -> int:
    if shape.node_size is None:
        raise ValueError("two_level needs the number of ranks per node")
    return shape.node_size
