"""Bytes and messages a rank sends, by process group, operation, stream and peer.

:class:`TrafficCounter` counts what any process sends over groups of any backend, while active:

    with TrafficCounter(streams={1: "weights", 2: "gradients"}) as counter:
        for batch in batches:
            before = counter.traffic.snapshot()
            train_step(batch)
            rows = (counter.traffic - before).rows()

It sees every call that goes through PyTorch's dispatcher, which is how the process groups of
PyTorch call their backends: from Python, from C++ (DDP), functional collectives, and in backward.
It costs each operator of the process the few microseconds of a dispatch mode. It cannot see how
long a rank waits; for that, and for counting without any cost to computation, make the groups
with :class:`megatron_longseq.measurement.MeasuredTransport`, which keeps the same
:class:`Traffic`.

What is counted for which operation is in :mod:`megatron_longseq.measurement.operations`.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from . import operations as ops
from .operations import Place, Transfer


class Flow(NamedTuple):
    """What is counted together.

    Attributes:
        group: the process group's description (``group_desc``).
        stream: the name of a send's or receive's tag; empty for tag 0 and for collectives.
        peer: the other rank of a send or receive, within the group; None for collectives.
        exact: whether bytes and messages hold for every implementation, or are a ring's.
    """

    group: str
    group_size: int
    operation: str
    stream: str
    peer: int | None
    exact: bool


@dataclass(frozen=True)
class Counts:
    """Sums over the calls of one or more flows.

    Attributes:
        payload_bytes: bytes of the buffers handed to the calls.
        bytes_sent: bytes this rank sent, by the formula of the operation.
        wait_seconds: time this rank was blocked until the calls completed; 0 if not measured.
    """

    calls: int = 0
    messages: int = 0
    payload_bytes: int = 0
    bytes_sent: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.calls + other.calls,
            self.messages + other.messages,
            self.payload_bytes + other.payload_bytes,
            self.bytes_sent + other.bytes_sent,
            self.wait_seconds + other.wait_seconds,
        )

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(
            self.calls - other.calls,
            self.messages - other.messages,
            self.payload_bytes - other.payload_bytes,
            self.bytes_sent - other.bytes_sent,
            self.wait_seconds - other.wait_seconds,
        )


class Traffic:
    """The communication of one rank, added up by :class:`Flow`. Safe to use from any thread.

    Args:
        streams: names for the tags of sends and receives. A tag without a name is called
            ``tag 7``, and 0, PyTorch's default, nothing.
        waits_measured: whether anyone reports waits; if not, rows say None and not 0.
    """

    def __init__(
        self, streams: Mapping[int, str] | None = None, *, waits_measured: bool = False
    ) -> None:
        self._streams = dict(streams or {})
        self._waits_measured = waits_measured
        self._counts: dict[Flow, Counts] = {}
        self._lock = threading.Lock()

    def record(self, group: dist.ProcessGroup, transfer: Transfer) -> Flow:
        """Adds one call; returns the flow to which its wait belongs."""
        named = group.group_desc and group.group_desc != "undefined"
        flow = Flow(
            group=group.group_desc if named else f"group {group.group_name}",
            group_size=group.size(),
            operation=transfer.operation,
            stream=self._stream(transfer.tag),
            peer=transfer.peer,
            exact=transfer.exact,
        )
        self._add(
            flow, Counts(1, transfer.messages, transfer.payload_bytes, transfer.bytes_sent, 0.0)
        )
        return flow

    def record_wait(self, flow: Flow, seconds: float) -> None:
        """Adds time a rank was blocked until a call of this flow completed."""
        self._add(flow, Counts(wait_seconds=seconds))

    def total(self, **where: Any) -> Counts:
        """Sums the flows whose attributes equal all of ``where``.

        ``traffic.total(group="CONTEXT_PARALLEL_GROUP", operation="send").bytes_sent``
        """
        unknown = set(where) - set(Flow._fields)
        if unknown:
            raise TypeError(f"{sorted(unknown)}: a flow has only {', '.join(Flow._fields)}")
        result = Counts()
        for flow, counts in self._items():
            if all(getattr(flow, name) == value for name, value in where.items()):
                result += counts
        return result

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict per flow, in the order of their names, for tables and JSON."""
        rows = []
        for flow, counts in sorted(self._items(), key=lambda item: _sort_key(item[0])):
            row = flow._asdict() | vars(counts)
            if not self._waits_measured:
                row["wait_seconds"] = None
            rows.append(row)
        return rows

    def snapshot(self) -> "Traffic":
        """A copy that no longer changes."""
        return self._with(dict(self._items()))

    def reset(self) -> None:
        """Forgets everything counted so far."""
        with self._lock:
            self._counts.clear()

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        """What was added since ``earlier``, a snapshot of this object."""
        before = dict(earlier._items())
        differences = {flow: counts - before.get(flow, Counts()) for flow, counts in self._items()}
        return self._with({flow: c for flow, c in differences.items() if c != Counts()})

    def _with(self, counts: dict[Flow, Counts]) -> "Traffic":
        copy = Traffic(self._streams, waits_measured=self._waits_measured)
        copy._counts = counts
        return copy

    def _items(self) -> list[tuple[Flow, Counts]]:
        with self._lock:
            return list(self._counts.items())

    def _add(self, flow: Flow, counts: Counts) -> None:
        with self._lock:
            self._counts[flow] = self._counts.get(flow, Counts()) + counts

    def _stream(self, tag: int) -> str:
        return self._streams.get(tag, f"tag {tag}" if tag else "")


class TrafficCounter(TorchDispatchMode):
    """Counts all communication of this process while active; see the module's description.

    Args:
        streams: as for :class:`Traffic`.
    """

    def __init__(self, streams: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self.traffic = Traffic(streams)
        self._readers = _readers()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of :attr:`traffic`."""
        return self.traffic.rows()

    def reset(self) -> None:
        """Resets :attr:`traffic`."""
        self.traffic.reset()

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for kind in types:
            # A wrapper such as DTensor unfolds into operators that this mode is to see.
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        reader = self._readers.get(func)
        if reader is not None:
            for group, transfer in reader(args):
                self.traffic.record(group, transfer)
        return func(*args, **kwargs) if kwargs else func(*args)


_Read = Callable[[Place, Any], Transfer]
_Reader = Callable[[tuple[Any, ...]], list[tuple[dist.ProcessGroup, Transfer]]]


def _readers() -> dict[Any, _Reader]:
    """How to read the arguments of each communication operator this PyTorch has."""
    # For c10d operators: their arguments without the process group among them.
    c10d: dict[str, _Read] = {
        "send": lambda place, a: ops.send(place, a[0], a[1], a[2]),
        "recv_": lambda place, a: ops.receive(place, a[0], a[1], a[2]),
        "recv_any_source_": lambda place, a: ops.receive(place, a[0], None, a[1]),
        "allreduce_": lambda place, a: ops.all_reduce(place, a[0]),
        "allreduce_coalesced_": lambda place, a: ops.all_reduce(place, a[0]),
        "allgather_": lambda place, a: ops.all_gather(place, a[1]),
        "allgather_coalesced_": lambda place, a: ops.all_gather(place, a[1]),
        "_allgather_base_": lambda place, a: ops.all_gather(place, a[1]),
        "allgather_into_tensor_coalesced_": lambda place, a: ops.all_gather(place, a[1]),
        "reduce_scatter_": lambda place, a: ops.reduce_scatter(place, a[1]),
        "_reduce_scatter_base_": lambda place, a: ops.reduce_scatter(place, a[1]),
        "reduce_scatter_tensor_coalesced_": lambda place, a: ops.reduce_scatter(place, a[1]),
        "broadcast_": lambda place, a: ops.broadcast(place, a[0], a[1]),
        "reduce_": lambda place, a: ops.reduce(place, a[0], a[2]),
        "gather_": lambda place, a: ops.gather(place, a[1], a[2]),
        "scatter_": lambda place, a: ops.scatter(place, a[1], a[2]),
        "alltoall_": lambda place, a: ops.all_to_all(place, a[1]),
        "alltoall_base_": lambda place, a: ops.all_to_all_single(place, a[1], a[3]),
        "barrier": lambda place, a: ops.barrier(place),
        "monitored_barrier_": lambda place, a: ops.barrier(place),
    }
    # For functional collectives, which call c10d where this mode cannot see it. Group last.
    functional: dict[str, _Read] = {
        "all_reduce": lambda place, a: ops.all_reduce(place, a[0]),
        "all_reduce_": lambda place, a: ops.all_reduce(place, a[0]),
        "all_reduce_coalesced": lambda place, a: ops.all_reduce(place, a[0]),
        "all_reduce_coalesced_": lambda place, a: ops.all_reduce(place, a[0]),
        "all_gather_into_tensor": lambda place, a: ops.all_gather(place, a[0]),
        "all_gather_into_tensor_out": lambda place, a: ops.all_gather(place, a[0]),
        "all_gather_into_tensor_coalesced": lambda place, a: ops.all_gather(place, a[0]),
        "reduce_scatter_tensor": lambda place, a: ops.reduce_scatter(place, a[0]),
        "reduce_scatter_tensor_out": lambda place, a: ops.reduce_scatter(place, a[0]),
        "reduce_scatter_tensor_coalesced": lambda place, a: ops.reduce_scatter(place, a[0]),
        "all_to_all_single": lambda place, a: ops.all_to_all_single(place, a[0], a[2]),
        "broadcast": lambda place, a: ops.broadcast(place, a[0], a[1]),
        "broadcast_": lambda place, a: ops.broadcast(place, a[0], a[1]),
        "isend": lambda place, a: ops.send(place, a[0], a[1], a[2]),
        "irecv": lambda place, a: ops.receive(place, a[0], a[1], a[2]),
    }
    readers: dict[Any, _Reader] = {}
    for namespace, reads in (("c10d", c10d), ("_c10d_functional", functional)):
        for name, read in reads.items():
            packet = getattr(getattr(torch.ops, namespace), name, None)
            if packet is not None:
                readers[packet.default] = _one_call(read)
    batch = getattr(torch.ops._c10d_functional, "batch_p2p_ops", None)
    if batch is not None:
        readers[batch.default] = _read_batch
    return readers


def _one_call(read: _Read) -> _Reader:
    def reader(args: tuple[Any, ...]) -> list[tuple[dist.ProcessGroup, Transfer]]:
        boxes = [a for a in args if isinstance(a, torch.ScriptObject)]
        # c10d takes the group first among its objects (a reduction's operator is another).
        handle = boxes[0] if boxes else args[-1]
        group = _process_group(handle)
        place = Place(group.rank(), group.size())
        return [(group, read(place, [a for a in args if a is not handle]))]

    return reader


def _read_batch(args: tuple[Any, ...]) -> list[tuple[dist.ProcessGroup, Transfer]]:
    kinds, peers, tags, tensors, name = args
    group = _process_group(name)
    place = Place(group.rank(), group.size())
    return [
        (group, (ops.send if kind == "isend" else ops.receive)(place, tensor, peer, tag))
        for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True)
    ]


def _process_group(handle: Any) -> dist.ProcessGroup:
    if isinstance(handle, str):
        return dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(handle))
    if isinstance(handle, torch.ScriptObject):
        return dist.ProcessGroup.unbox(handle)
    return handle


def _sort_key(flow: Flow) -> tuple:
    return tuple("" if field is None else str(field) for field in flow)
