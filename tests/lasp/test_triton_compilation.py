"""The Triton kernels compile for a GPU, without one: types, shapes and shared memory fit.

What the interpreter lets pass and a compiler does not: a value that changes its type in a loop, a
product of tiles that no matrix unit takes, more shared memory than there is.
"""

import importlib.util
from unittest import mock

import pytest
import torch

from megatron_longseq.lasp.segments import Segments
from megatron_longseq.lasp.triton_kernels import TritonKernel

HAS_TRITON = importlib.util.find_spec("triton") is not None
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
# Of one program on the GPUs that have the least of it (compute capability 8.6, 8.9 and 12).
SHARED_MEMORY = 99 * 1024


def launches(decay: str) -> list[tuple]:
    """Every kernel that a forward and a backward in bf16 start, with its arguments."""
    from megatron_longseq.lasp.triton_kernels import calls

    shape = 1, 2, 96, 2
    inputs = [torch.zeros(*shape, 128, dtype=torch.bfloat16) for _ in range(3)]
    log_decay = torch.zeros(*shape, *((128,) if decay == "channel" else ()))
    segments = Segments(*inputs, log_decay, starts=torch.zeros(2, 96, dtype=torch.bool), scale=0.1)
    states = torch.zeros(segments.state_shape)
    started = []

    def record(kernel, grid, *arguments, num_warps=4, **meta):
        started.append((kernel, arguments, num_warps, meta))

    kernel = TritonKernel()
    with mock.patch.object(calls, "_launch", record):
        out, _ = kernel.intra(segments, dtype=torch.bfloat16, state=states)
        kernel.apply(segments, out, states)
        gradients = kernel.d_intra(segments, out, states, dtype=torch.bfloat16)
        kernel.d_apply(segments, gradients, states, states)
    return started


def compiled_shared_memory(decay: str) -> dict[str, int]:
    """Bytes of shared memory by kernel, compiled for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget

    shared: dict[str, int] = {}
    for kernel, arguments, num_warps, meta in launches(decay):
        signature = dict.fromkeys(kernel.arg_names, "constexpr")
        constants = dict(meta)
        aligned = {}
        for index, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            elif value is None or value == 1:
                constants[name] = value
                continue
            else:
                signature[name] = "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
        binary = triton.compile(
            triton.compiler.ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "num_stages": 2},
        )
        assert binary.asm["cubin"]
        shared[kernel.__name__] = max(shared.get(kernel.__name__, 0), binary.metadata.shared)
    return shared


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("decay, count", [("scalar", 5), ("channel", 8)])
def test_every_kernel_compiles_and_fits_into_the_least_shared_memory(ranks, decay, count):
    shared = ranks.run(compiled_shared_memory, world_size=1, args=(decay,), timeout_seconds=200)[0]
    assert len(shared) == count
    assert max(shared.values()) <= SHARED_MEMORY, shared
