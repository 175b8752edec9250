"""What PyTorch answers about CUDA on a machine that has none; see the package's description."""

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..measurement import LiveBytes

# The counter of live tensors, once there is one.
Counter = Callable[[], LiveBytes | None]


class Stream:
    """A stream of a machine that does everything in order: nothing to wait for."""

    def __init__(self, *_args, **_kwargs) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def wait_stream(self, _stream) -> None: ...

    def wait_event(self, _event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event=None):
        return event if event is not None else _Event()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...


class _Event:
    """An event that has always happened."""

    def __init__(self, *_args, **_kwargs) -> None: ...

    def record(self, *_args) -> None: ...

    def wait(self, *_args) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other) -> float:
        return 0.0


class _TensorType(type):
    """``torch.cuda.FloatTensor`` and its kin: Megatron puts them into ``isinstance`` tuples.

    They must be classes, and no tensor may be an instance: the CPU's own type stands in the same
    tuples and matches.
    """

    dtype: torch.dtype

    def __instancecheck__(cls, _instance) -> bool:
        return False

    def __call__(cls, *args):
        return torch.tensor(*args, dtype=cls.dtype) if args else torch.empty(0, dtype=cls.dtype)


class _Host(str):
    """The current device: a name that PyTorch takes as it is, inside of backward too.

    In a text it is a number, as a GPU would be: Megatron-FSDP makes names of devices from it.
    """

    __slots__ = ()

    def __format__(self, _spec: str) -> str:
        return "0"


class _Generators:
    """``torch.cuda.default_generators``: any index is the CPU's generator."""

    def __getitem__(self, _index):
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def answer_for_cuda(live_bytes: Counter) -> None:
    """Makes ``torch.cuda`` answer from the CPU; memory figures are those of ``live_bytes()``."""
    cuda: Any = torch.cuda

    def nothing(*_args, **_kwargs) -> None: ...

    def seed(value: int) -> None:
        # Not torch.manual_seed, which calls this function.
        torch.default_generator.manual_seed(int(value))

    def get_state(*_args, **_kwargs):
        return torch.default_generator.get_state()

    def set_state(state, *_args, **_kwargs) -> None:
        torch.default_generator.set_state(state)

    for name, dtype in {
        "FloatTensor": torch.float32,
        "DoubleTensor": torch.float64,
        "HalfTensor": torch.float16,
        "BFloat16Tensor": torch.bfloat16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
        "ByteTensor": torch.uint8,
        "BoolTensor": torch.bool,
    }.items():
        setattr(cuda, name, _TensorType(name, (), {"dtype": dtype}))
    cuda.current_device = lambda: _Host("cpu")
    cuda.device_count = lambda: 1
    # Said outright: PyTorch may be told to answer it by the count above.
    cuda.is_available = lambda: False
    cuda.set_device = cuda.synchronize = cuda.empty_cache = cuda.ipc_collect = nothing
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.is_initialized = lambda: True
    cuda._lazy_init = nothing
    cuda.get_device_name = lambda *_: "cpu"
    # Compared with minimum versions of kernels; the kernels themselves are switched off above.
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=9, minor=0, name="cpu", multi_processor_count=1, total_memory=_physical_memory()
    )
    cuda.is_current_stream_capturing = lambda: False

    cuda.Stream, cuda.Event = Stream, _Event
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.set_stream = nothing

    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.random.manual_seed = cuda.random.manual_seed_all = seed
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    cuda.default_generators = _Generators()

    cuda.memory_allocated = cuda.memory_reserved = lambda *_: _live(live_bytes())["current"]
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: _live(live_bytes())["peak"]
    cuda.reset_peak_memory_stats = lambda *_: (
        counter.reset_peak() if (counter := live_bytes()) else None
    )
    cuda.memory_stats = lambda *_: _memory_stats(live_bytes())
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


def _live(counter: LiveBytes | None) -> dict[str, int]:
    if counter is None:
        return {"current": 0, "peak": 0}
    return {"current": counter.current(), "peak": counter.peak()}


def _memory_stats(counter: LiveBytes | None) -> dict[str, int]:
    """The keys of ``torch.cuda.memory_stats`` that Megatron logs, in bytes of live tensors."""
    live = _live(counter)
    return {
        f"{kind}_bytes.all.{when}": live[when]
        for kind in ("allocated", "active", "reserved", "requested")
        for when in ("current", "peak")
    } | {
        "allocation.all.current": len(counter.alive()) if counter else 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class OnCpu(TorchFunctionMode):
    """Turns ``cuda`` into ``cpu`` in every call, and ``float32`` into ``float64`` if asked."""

    def __init__(self, double_precision: bool) -> None:
        super().__init__()
        self._double = double_precision

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs) if kwargs else {}
        if function is torch.Tensor.pin_memory:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if function in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(_to_cpu(argument) for argument in args)
        if self._double:
            function, args, kwargs = _to_double(function, args, kwargs)
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            # Megatron's optimizers compare with the names of CUDA's types.
            result = result.replace("torch.", "torch.cuda.")
            if self._double:
                result = result.replace("DoubleTensor", "FloatTensor")
        return result


def _to_cpu(value):
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _to_double(function, args, kwargs):
    if function is torch.Tensor.float:
        return torch.Tensor.double, args, kwargs
    if kwargs.get("dtype") is torch.float32:
        kwargs["dtype"] = torch.float64
    if function in (torch.Tensor.to, torch.Tensor.type) or function is torch.Tensor.view:
        args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
    return function, args, kwargs
