"""Lets unmodified Megatron-LM run on a CPU, over gloo.

Megatron asks for CUDA in a few hundred places. On a machine without a GPU this module answers them:

* a :class:`torch.overrides.TorchFunctionMode` over the whole process turns the device ``cuda`` into
  ``cpu`` in every PyTorch call;
* ``torch.cuda`` answers what a single device would, with streams and events that do nothing (on a
  CPU everything is in order), the CPU's random generator, and memory figures that are counted
  exactly from live tensors;
* the few places in Megatron that cannot work without a GPU, Apex or Transformer Engine are
  mended (:meth:`CpuPlatform.mend_megatron`, each with its reason). All of them are contract tests:
  when Megatron repairs one, a test says so.

This is the one module of the package that replaces names in other libraries. It does so only when
asked, before Megatron is imported, and refuses when a GPU is in use; :func:`mend_wheel` alone is
for every device.

With ``double_precision=True`` every ``float32`` that Megatron asks for becomes ``float64``, so that
two layouts can be compared to 1e-10 and better although Megatron casts to ``float32`` by name.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .errors import UserError
from .measurement import LiveBytes

# What Megatron must be told on a CPU: option name -> value. The entry point makes them the
# defaults and prints them; a contrary value given by the user is refused.
ARGUMENTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    # Worker processes of the data loader would compete with the ranks for the same cores.
    "num_workers": 0,
}

# Flags of Megatron's that ask a GPU or its driver for something.
NEEDS_GPU = (
    "fp8",
    "fp4",
    "tp_comm_overlap",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "log_device_memory_used",
    "profile",
    "record_memory_history",
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
    "optimizer_cpu_offload",
    "cpu_offloading_num_layers",
)


class CpuPlatform:
    """Megatron on a CPU; see the module's docstring.

    Args:
        double_precision: compute in ``float64`` wherever Megatron asks for ``float32``.

    Use :meth:`install` before Megatron is imported and :meth:`mend_megatron` after.
    """

    def __init__(self, double_precision: bool = False) -> None:
        self.double_precision = double_precision
        self.live_bytes: LiveBytes | None = None
        self._mode: TorchFunctionMode | None = None

    def install(self) -> None:
        """Makes ``torch.cuda`` answer from the CPU, for the rest of this process.

        Raises:
            UserError: a GPU is in use.
            RuntimeError: Megatron has been imported already and holds the real ``torch.cuda``.
        """
        if torch.cuda.is_initialized():
            raise UserError(
                "--longseq-device cpu: this process already uses a GPU; start a process of its own"
            )
        if "megatron.core.tensor_parallel.random" in sys.modules:
            raise RuntimeError("the CPU platform must be installed before Megatron is imported")
        # Read by Megatron's argument checks; a CPU has one queue, so its value changes nothing.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Says at import that a CUDA toolkit has no driver; on a CPU that is as it should be.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        # Files every function of torch.cuda by identity when it is first imported, which
        # Megatron's import does: it must see the real functions.
        importlib.import_module("torch._dynamo")
        _answer_for_cuda(self)
        # The mode stays entered: this process computes on the CPU until its end.
        self._mode = _OnCpu(self.double_precision)
        self._mode.__enter__()
        if self.double_precision:
            torch.set_default_dtype(torch.float64)

    def count_memory(self) -> None:
        """Starts counting live tensors; from here on ``torch.cuda``'s memory figures are exact."""
        if self.live_bytes is None:
            self.live_bytes = LiveBytes()
            self.live_bytes.__enter__()

    def mend_megatron(self) -> None:
        """Replaces the few functions of Megatron that cannot work without a GPU, Apex or TE."""
        training = importlib.import_module("megatron.training.training")
        initialize = importlib.import_module("megatron.training.initialize")
        # `pretrain()` has no argument for it, and asserts that CUDA is available.
        training.initialize_megatron = functools.partial(
            initialize.initialize_megatron, allow_no_cuda=True
        )
        # Warms up fused kernels that a CPU does not have, and draws random numbers for it: with
        # sizes that depend on the layout, so that equal seeds would no longer give equal runs.
        training.set_jit_fusion_options = lambda tp_size=None: None
        # The wheel ships the compiled helpers but no Makefile; compiling again ends the process. A
        # fresh checkout has the Makefile alone, and there Megatron compiles them.
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.core.datasets.helpers_cpp")
            importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
        # Converts the token counts of experts only if they are on a GPU; the exchange that reads
        # them takes no tensors.
        dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        dispatcher.maybe_move_tensor_to_cpu = _to_host
        training.build_train_valid_test_data_iterators = _without_drawing(
            training.build_train_valid_test_data_iterators
        )
        # Compiles a C++ function at the first recomputation, for which a CPU machine may have no
        # compiler.
        random = importlib.import_module("megatron.core.tensor_parallel.random")
        random._share_storage_ext = _StorageSharing()
        _mend_distributed_optimizer()


def mend_wheel() -> None:
    """Lets Megatron start from its wheel, and without Transformer Engine: a GPU needs this too.

    Megatron compiles its data set helpers at start-up. The wheel ships them compiled, without a
    Makefile, and the attempt ends the process. A checkout, which has one, is left alone.
    """
    utils = importlib.import_module("megatron.core.datasets.utils")
    if not (Path(utils.__file__).parent / "Makefile").exists():
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        utils.compile_helpers = lambda: None
    _mend_norm_recompute()


def is_installed() -> bool:
    """Says whether this process runs under the CPU platform."""
    return torch.cuda.Stream is _Stream


def should_use(device: str) -> bool:
    """Decides for ``--longseq-device {auto,cpu,cuda}``.

    Raises:
        UserError: ``cuda`` was asked for and there is none.
    """
    if device == "cpu":
        return True
    if torch.cuda.is_available() and not is_installed():
        return False
    if device == "cuda":
        raise UserError(
            "--longseq-device cuda: PyTorch finds no CUDA device here; "
            "use auto or cpu, or check the driver with nvidia-smi"
        )
    return True


# --- torch.cuda -------------------------------------------------------------------------------


class _Stream:
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


class _Generators:
    """``torch.cuda.default_generators``: any index is the CPU's generator."""

    def __getitem__(self, _index):
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _answer_for_cuda(platform: CpuPlatform) -> None:
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")

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
    cuda.current_device = lambda: cpu
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

    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.set_stream = nothing

    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.random.manual_seed = cuda.random.manual_seed_all = seed
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    cuda.default_generators = _Generators()

    cuda.memory_allocated = cuda.memory_reserved = lambda *_: _live(platform)["current"]
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: _live(platform)["peak"]
    cuda.reset_peak_memory_stats = lambda *_: (
        platform.live_bytes.reset_peak() if platform.live_bytes else None
    )
    cuda.memory_stats = lambda *_: _memory_stats(platform)
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


def _live(platform: CpuPlatform) -> dict[str, int]:
    counter = platform.live_bytes
    if counter is None:
        return {"current": 0, "peak": 0}
    return {"current": counter.current(), "peak": counter.peak()}


def _memory_stats(platform: CpuPlatform) -> dict[str, int]:
    """The keys of ``torch.cuda.memory_stats`` that Megatron logs, in bytes of live tensors."""
    live = _live(platform)
    return {
        f"{kind}_bytes.all.{when}": live[when]
        for kind in ("allocated", "active", "reserved", "requested")
        for when in ("current", "peak")
    } | {
        "allocation.all.current": len(platform.live_bytes.alive()) if platform.live_bytes else 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _OnCpu(TorchFunctionMode):
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


# --- Megatron ---------------------------------------------------------------------------------


def _without_drawing(build: Any) -> Any:
    """Keeps the random numbers of the data loaders apart from those of dropout.

    A new iterator of a data loader draws one number from the CPU's generator. On a GPU dropout has
    a generator of its own; here it is the same one, and a run that resumes, whose iterators are
    made after the generator's state was loaded, would drop other activations.
    """

    @functools.wraps(build)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        state = torch.default_generator.get_state()
        try:
            return build(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)

    return wrapped


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron's ``maybe_move_tensor_to_cpu`` does with a tensor on a GPU."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.cpu().numpy() if as_numpy else tensor.cpu()


class _StorageSharing:
    """What Megatron's compiled extension does, by a copy: refills a storage that was freed."""

    @staticmethod
    def share_storage(freed: torch.Tensor, recomputed: torch.Tensor) -> None:
        """Gives ``freed``, and all that views its storage, the values of ``recomputed``."""
        source, target = recomputed.untyped_storage(), freed.untyped_storage()
        target.resize_(source.nbytes())
        target.copy_(source)
        # The values are there once: what recomputed them only keeps its place in the graph.
        recomputed.data = freed.detach().view_as(recomputed)


def _mend_norm_recompute() -> None:
    """Recomputing norms (``--recompute-modules layernorm``) without Transformer Engine.

    ``CheckpointWithoutOutput`` takes ``fp8=False`` for a wish for fp8, because it is not None, and
    then calls functions of TE. Without TE there is no fp8 to ask about.
    """
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    if module.HAVE_TE:
        return
    checkpoint = module.CheckpointWithoutOutput
    start = checkpoint.__init__

    def start_without_fp8(self, fp8=False):
        start(self, fp8=fp8)
        self.fp8 = False

    checkpoint.__init__ = start_without_fp8


def _mend_distributed_optimizer() -> None:
    """Makes a run that resumes with the distributed optimizer equal one that never stopped.

    Without Apex and TE, megatron-core 0.19.2 (``core/optimizer/distrib_optimizer.py``) does not:

    1. ``state_dict`` asserts that all parameters agree on Adam's ``step``, which none has before
       the first step, so that nothing can be loaded into a new optimizer;
    2. ``_set_main_param_and_optimizer_states`` copies into parameters that require gradients
       without ``no_grad``, and
    3. misses the key ``step`` in what the fully reshardable format hands it;
    4. ``load_state_dict`` gives all parameters one and the same ``step`` tensor, which Adam then
       counts up once per parameter: silently wrong from the second step on.
    """
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if module.HAVE_APEX_OR_TE:
        return
    adam = (torch.optim.Adam, torch.optim.AdamW)
    optimizer_class = module.DistributedOptimizer
    state_dict = optimizer_class.state_dict
    set_states = optimizer_class._set_main_param_and_optimizer_states
    load_state_dict = optimizer_class.load_state_dict

    def state_dict_of_new_optimizer(self):
        for group in self.optimizer.param_groups if isinstance(self.optimizer, adam) else ():
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
        return state_dict(self)

    def set_states_without_gradients(self, model_param, tensors):
        with torch.no_grad():
            return set_states(self, model_param, {"step": None, **tensors})

    def load_state_dict_with_own_steps(self, state):
        result = load_state_dict(self, state)
        for entry in self.optimizer.state.values():
            entry["step"] = entry["step"].clone()
        return result

    optimizer_class.state_dict = state_dict_of_new_optimizer
    optimizer_class._set_main_param_and_optimizer_states = set_states_without_gradients
    optimizer_class.load_state_dict = load_state_dict_with_own_steps
