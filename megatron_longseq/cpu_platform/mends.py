"""Places in Megatron that cannot work as they are: without a GPU, Apex or TE, or from its wheel.

Each with its reason, and each a contract test: when Megatron repairs one, a test says so.
"""

import contextlib
import functools
import importlib
from pathlib import Path
from typing import Any

import torch


def mend_megatron() -> None:
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
    # PyTorch's FSDP asks the mesh where parameters live, and Megatron says on GPUs.
    sharded = importlib.import_module("megatron.core.distributed.torch_fully_sharded_data_parallel")
    sharded.DeviceMesh = _HostMesh


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


class _HostMesh:
    """``DeviceMesh`` where Megatron makes one of GPUs."""

    @staticmethod
    def from_group(group: Any, _device_type: str, **more: Any) -> Any:
        """A mesh of the host's memory."""
        from torch.distributed import DeviceMesh

        return DeviceMesh.from_group(group, "cpu", **more)


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
