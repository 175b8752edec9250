"""The CPU platform: what torch.cuda answers, and when it refuses to be installed."""

import subprocess
import sys

import pytest


def answers():
    import torch

    from megatron_longseq import cpu_platform

    before = torch.cuda.memory_allocated()
    block = torch.empty(1000, device="cuda")
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated()
    del block
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2, device="cuda:0").tolist()
    torch.cuda.set_rng_state(state)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        event = stream.record_event()
    return {
        "installed": cpu_platform.is_installed(),
        "available": torch.cuda.is_available(),
        "device": str(torch.zeros(1, device=torch.device("cuda", 0)).device),
        "moved": str(torch.zeros(1).to("cuda").device),
        "cuda method": torch.zeros(1).cuda().device.type,
        "held": held,
        "peak covers": peak >= before + held,
        "peak is reset": torch.cuda.max_memory_allocated() < peak,
        "stats": torch.cuda.memory_stats()["allocated_bytes.all.current"]
        == torch.cuda.memory_allocated(),
        "random numbers repeat": torch.rand(2, device="cuda").tolist() == first,
        "type name": torch.zeros(1).type(),
        "half type name": torch.zeros(1, dtype=torch.bfloat16).type(),
        "isinstance": isinstance(torch.zeros(1), (torch.FloatTensor, torch.cuda.FloatTensor)),
        "not half": isinstance(torch.zeros(1), torch.cuda.HalfTensor),
        "event": event.query(),
        "pinned": torch.zeros(1, pin_memory=True).is_pinned(),
        "dtype": str(torch.zeros(2, dtype=torch.float32).dtype),
        "cast": str(torch.zeros(2, dtype=torch.float64).float().dtype),
        "to": str(torch.zeros(2, dtype=torch.float16).to(torch.float32).dtype),
        "default": str(torch.ones(2).dtype),
    }


SINGLE = {
    "installed": True,
    "available": False,
    "device": "cpu",
    "moved": "cpu",
    "cuda method": "cpu",
    "held": 4000,
    "peak covers": True,
    "peak is reset": True,
    "stats": True,
    "random numbers repeat": True,
    "type name": "torch.cuda.FloatTensor",
    "half type name": "torch.cuda.BFloat16Tensor",
    "isinstance": True,
    "not half": False,
    "event": True,
    "pinned": False,
    "dtype": "torch.float32",
    "cast": "torch.float32",
    "to": "torch.float32",
    "default": "torch.float32",
}


def test_cuda_is_answered_from_the_cpu(megatron_ranks):
    assert megatron_ranks.run(answers, world_size=1)[0] == SINGLE


def test_double_precision_turns_every_float32_into_float64(megatron_ranks_fp64):
    double = dict.fromkeys(("dtype", "cast", "to", "default"), "torch.float64")
    # No tensor is of a single-precision type any more.
    expected = SINGLE | double | {"held": 8000, "isinstance": False}
    assert megatron_ranks_fp64.run(answers, world_size=1)[0] == expected


def is_available_by_count():
    import os

    import torch

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return torch.cuda.is_available()


def test_no_gpu_is_reported_however_pytorch_is_told_to_look_for_one(megatron_ranks):
    assert megatron_ranks.run(is_available_by_count, world_size=1) == [False]


SCRIPT = """
import sys, types
import torch
from megatron_longseq import cpu_platform
from megatron_longseq.errors import UserError
{before}
try:
    cpu_platform.CpuPlatform().install()
except (UserError, RuntimeError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "torch.cuda.is_initialized = lambda: True",
            "UserError --longseq-device cpu: this process",
        ),
        (
            "sys.modules['megatron.core.tensor_parallel.random'] = types.ModuleType('x')",
            "RuntimeError the CPU platform must be installed before Megatron",
        ),
    ],
)
def test_it_is_never_installed_beside_a_gpu_or_after_megatron(before, expected):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True
    )
    assert result.stdout.startswith(expected), result.stderr[-500:]


def test_asking_for_a_gpu_where_there_is_none_is_an_error():
    import torch

    from megatron_longseq.cpu_platform import should_use
    from megatron_longseq.errors import UserError

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert should_use("auto") and should_use("cpu")
    with pytest.raises(UserError, match="--longseq-device cuda"):
        should_use("cuda")
