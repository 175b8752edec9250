"""A communication backend that counts, times and, if asked, delays what it carries.

    transport = MeasuredTransport(streams={1: "weights"}, latency_seconds=0.005)
    torch.distributed.init_process_group(transport.register(), ...)
    ...
    rows = transport.traffic.rows()  # with the seconds this rank waited, by group and stream

Groups made with the backend's name, or made later without naming one, work like groups of gloo,
which does the work, for all of ``torch.distributed`` but ``monitored_barrier``, which PyTorch
reserves to groups called gloo. A single measured group in a process that uses another backend is
``torch.distributed.new_group(ranks, backend=transport.register(), group_desc=..)``.

Built as a subclass of :class:`torch.distributed.ProcessGroup`, PyTorch's way of writing one in
Python: nothing is patched, operators that compute pay nothing, and the calls of C++ (DDP,
functional collectives) are seen too. It adds about 25 microseconds to a call. For groups of
another backend than gloo, such as NCCL, see :class:`TrafficCounter`.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from . import operations as ops
from .latency import Arrival, Latency, Seconds
from .operations import Place, Transfer
from .traffic import Traffic

_NO_TIMEOUT = timedelta(0)
_CPU = torch.device("cpu")


class MeasuredTransport:
    """What the groups of one measured backend share.

    Attributes:
        traffic: what this rank has sent through them, and how long it waited. A wait belongs to
            the operation that was waited for: for point-to-point messages mostly the receive.

    Args:
        streams: names for the tags of sends and receives, see :class:`Traffic`.
        latency_seconds: of every link, or a function ``(source, target)`` of global ranks, the
            same on all ranks. With 0 nothing is delayed and no rank is sent a clock. What it
            means is in :mod:`megatron_longseq.measurement.latency`. A received tensor changes
            only when its receive completes, so that reading it before waiting, which on a fast
            link may go unnoticed, gives the old values. (That takes a buffer per receive, which
            is hidden from :class:`LiveBytes`.)
        ring_collectives: with latency, let gathers, reductions and broadcasts take their hops one
            after the other, as the ring algorithms do whose bytes are counted, instead of
            reaching every rank after one latency.
    """

    def __init__(
        self,
        *,
        streams: Mapping[int, str] | None = None,
        latency_seconds: float | Seconds = 0.0,
        ring_collectives: bool = False,
    ) -> None:
        self.traffic = Traffic(streams, waits_measured=True)
        self._ring = ring_collectives
        self._latency: Seconds | None = None
        if callable(latency_seconds):
            self._latency = latency_seconds
        elif latency_seconds > 0:
            constant = float(latency_seconds)
            self._latency = lambda _source, _target: constant
        elif latency_seconds < 0:
            raise ValueError(f"latency_seconds {latency_seconds}: a latency cannot be negative")

    def register(self, name: str = "longseq_measured") -> str:
        """Makes the backend known to PyTorch by this name, in this process; returns the name.

        The same name again means this transport from then on; groups that exist stay as they are.
        """
        dist.Backend.register_backend(
            name, lambda options, _: self._group(options), extended_api=True, devices=["cpu"]
        )
        return name

    def _group(self, options: Any) -> "MeasuredProcessGroup":
        latency = None
        if self._latency is not None:
            # The default group comes with an empty list.
            ranks = options.global_ranks_in_group or range(options.group_size)
            seconds = self._latency
            latency = Latency(
                dist.ProcessGroupGloo(
                    dist.PrefixStore("companions/", options.store),
                    options.group_rank,
                    options.group_size,
                    options.timeout,
                ),
                Place(options.group_rank, options.group_size),
                lambda source, target: seconds(ranks[source], ranks[target]),
                self._ring,
            )
        return MeasuredProcessGroup(options, self.traffic, latency)


def _collective(name: str, read: Callable[[Place, tuple], Transfer]) -> Any:
    """The method of a collective: counts it by its arguments, then hands them to gloo."""

    def method(self: "MeasuredProcessGroup", *args: Any, **kwargs: Any) -> dist.Work:
        transfer = read(self._place, args)
        arrival = None
        if self._latency is not None:
            arrival = self._latency.collective(transfer.operation, transfer.root)
        return self._call(transfer, lambda: getattr(self._inner, name)(*args, **kwargs), arrival)

    method.__name__ = name
    return method


def _root(options: Any) -> int:
    return options if isinstance(options, int) else options.rootRank


def _per_call(inputs: Any, outputs: Any) -> Any:
    """The inputs as one list per output, as where outputs are lists."""
    return [inputs] if isinstance(outputs, torch.Tensor) else inputs


class MeasuredProcessGroup(dist.ProcessGroup):
    """A process group over gloo; made by :class:`MeasuredTransport`, never directly."""

    def __init__(self, options: Any, traffic: Traffic, latency: Latency | None) -> None:
        store, rank, size = options.store, options.group_rank, options.group_size
        # The one constructor PyTorch has for subclasses; its type hints do not know it.
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        gloo = dist.ProcessGroupGloo(store, rank, size, options.timeout)
        gloo._set_sequence_number_for_group()
        self._inner = dist.ProcessGroup(store, rank, size)
        self._inner._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        self._inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        # Timeouts, names and device types are asked of the backend registered here.
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._store = store
        self._place = Place(rank, size)
        self._traffic = traffic
        self._latency = latency

    # The group itself

    def get_group_store(self) -> dist.Store:
        return self._store

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._inner._set_group_desc(desc)

    # Point to point

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:
        companion = self._latency.sent(dstRank, tag) if self._latency else None
        return self._call(
            ops.send(self._place, tensors, dstRank, tag),
            lambda: self._inner.send(tensors, dstRank, tag),
            companion=companion,
        )

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:
        transfer = ops.receive(self._place, tensors, srcRank, tag)
        if self._latency is None:
            return self._call(transfer, lambda: self._inner.recv(tensors, srcRank, tag))
        arrival = self._latency.receives(srcRank, tag)
        with torch._C._DisableTorchDispatch():
            buffers = [torch.empty_like(tensor) for tensor in tensors]

        def receive() -> dist.Work:
            with torch._C._DisableTorchDispatch():
                return self._inner.recv(buffers, srcRank, tag)

        def deliver() -> None:
            with torch._C._DisableTorchDispatch():
                for tensor, buffer in zip(tensors, buffers, strict=True):
                    # Of `data`: to autograd a receive is no in-place operation.
                    tensor.data.copy_(buffer)

        return self._call(transfer, receive, arrival, deliver=deliver)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        if self._latency is not None:
            raise NotImplementedError(
                "a receive from any source over links with latency: name the source, or set "
                "latency_seconds to 0"
            )
        return self._call(
            ops.receive(self._place, tensors, None, tag),
            lambda: self._inner.recv_anysource(tensors, tag),
        )

    # Collectives. PyTorch calls some by different names in different releases, and has overloads
    # in which tensors are not in lists and the root stands in the place of the options.

    allreduce: Any = _collective("allreduce", lambda p, a: ops.all_reduce(p, a[0]))
    allreduce_coalesced: Any = _collective(
        "allreduce_coalesced", lambda p, a: ops.all_reduce(p, a[0])
    )
    allgather: Any = _collective("allgather", lambda p, a: ops.all_gather(p, a[1]))
    allgather_coalesced: Any = _collective(
        "allgather_coalesced", lambda p, a: ops.all_gather(p, a[1])
    )
    all_gather_single: Any = _collective("all_gather_single", lambda p, a: ops.all_gather(p, a[1]))
    all_gather_single_coalesced: Any = _collective(
        "all_gather_single_coalesced", lambda p, a: ops.all_gather(p, a[1])
    )
    _allgather_base: Any = _collective("_allgather_base", lambda p, a: ops.all_gather(p, a[1]))
    allgather_into_tensor_coalesced: Any = _collective(
        "allgather_into_tensor_coalesced", lambda p, a: ops.all_gather(p, a[1])
    )
    reduce_scatter: Any = _collective(
        "reduce_scatter", lambda p, a: ops.reduce_scatter(p, _per_call(a[1], a[0]))
    )
    reduce_scatter_single: Any = _collective(
        "reduce_scatter_single", lambda p, a: ops.reduce_scatter(p, a[1])
    )
    reduce_scatter_single_coalesced: Any = _collective(
        "reduce_scatter_single_coalesced", lambda p, a: ops.reduce_scatter(p, a[1])
    )
    _reduce_scatter_base: Any = _collective(
        "_reduce_scatter_base", lambda p, a: ops.reduce_scatter(p, a[1])
    )
    reduce_scatter_tensor_coalesced: Any = _collective(
        "reduce_scatter_tensor_coalesced", lambda p, a: ops.reduce_scatter(p, a[1])
    )
    alltoall: Any = _collective("alltoall", lambda p, a: ops.all_to_all(p, a[1]))
    all_to_all_single: Any = _collective(
        "all_to_all_single", lambda p, a: ops.all_to_all_single(p, a[1], a[3])
    )
    alltoall_base: Any = _collective(
        "alltoall_base", lambda p, a: ops.all_to_all_single(p, a[1], a[3])
    )
    broadcast: Any = _collective("broadcast", lambda p, a: ops.broadcast(p, a[0], _root(a[1])))
    reduce: Any = _collective("reduce", lambda p, a: ops.reduce(p, a[0], _root(a[1])))
    gather: Any = _collective("gather", lambda p, a: ops.gather(p, a[1], _root(a[2])))
    scatter: Any = _collective(
        "scatter", lambda p, a: ops.scatter(p, _per_call(a[1], a[0]), _root(a[2]))
    )
    barrier: Any = _collective("barrier", lambda p, a: ops.barrier(p))

    def _call(
        self,
        transfer: Transfer,
        call: Callable[[], dist.Work],
        arrival: Arrival | None = None,
        companion: dist.Work | None = None,
        deliver: Callable[[], None] | None = None,
    ) -> "MeasuredWork":
        flow = self._traffic.record(self, transfer)
        traffic = self._traffic
        return MeasuredWork(
            call(), lambda seconds: traffic.record_wait(flow, seconds), arrival, companion, deliver
        )


class MeasuredWork(dist.Work):
    """A call under way: times who waits for it, and completes when its data may be seen."""

    def __init__(
        self,
        inner: dist.Work,
        waited: Callable[[float], None],
        arrival: Arrival | None,
        companion: dist.Work | None,
        deliver: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._waited = waited
        self._arrival = arrival
        self._companion = companion
        self._deliver = deliver

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        start = time.perf_counter()
        try:
            success = self._inner.wait(timeout) if timeout else self._inner.wait()
            if self._companion is not None:
                self._companion.wait()
                self._companion = None
            if self._arrival is not None:
                self._arrival.wait()
            self._finish()
            return success
        finally:
            self._waited(time.perf_counter() - start)

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._arrival is not None and not self._arrival.has_come():
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner._source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        if self._arrival is not None:
            raise NotImplementedError(
                "the future of a call over links with latency: wait() for the call instead, or "
                "set latency_seconds to 0"
            )
        return self._inner.get_future()

    def _finish(self) -> None:
        if self._deliver is not None:
            self._deliver()
            self._deliver = None
