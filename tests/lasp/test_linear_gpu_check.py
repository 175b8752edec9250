"""The GPU check of linear attention, on a CPU: what is right passes, what is wrong is noticed."""

import pytest
import torch

from megatron_longseq.gpu_check.linear_attention import (
    CASES,
    check_linear_kernel,
    compare,
    measure_linear_speed,
)
from megatron_longseq.gpu_check.rows import OK, ON_CPU, SKIPPED, WRONG
from megatron_longseq.lasp.torch_kernels import TorchKernel

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_passes_every_case(dtype):
    rows = [compare(TorchKernel(chunk=16), case, dtype, CPU, 20) for case in CASES]
    assert [(row.case, row.status) for row in rows] == [(case.name, OK) for case in CASES]
    assert sum("dg" in row.numbers for row in rows) == len(CASES) - 1


class WrongKernel(TorchKernel):
    """Plain torch that forgets part of what reaches a segment from outside."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def apply(self, segments, out, state):
        super().apply(segments, out, 0.99 * state if self.fault == "out" else state)

    def d_apply(self, segments, gradients, state, state_gradient):
        without = None if self.fault == "dg" else state
        super().d_apply(segments, gradients, without, state_gradient)
        if self.fault == "dv":
            gradients.value.mul_(float("nan"))


@pytest.mark.parametrize("fault", ["out", "dg", "dv"])
def test_a_wrong_kernel_is_noticed(fault):
    (case,) = [case for case in CASES if case.name == "decay per token"]
    row = compare(WrongKernel(fault), case, torch.float32, CPU, 20)
    assert row.status == WRONG and row.detail.startswith(f"{fault} ")


def test_a_kernel_that_cannot_be_used_is_skipped_with_its_reason():
    rows = check_linear_kernel("triton", ("float32", "bfloat16"), "cpu", 20)
    assert [row.status for row in rows] == [SKIPPED, SKIPPED]
    assert all(row.detail for row in rows)


def test_speed_is_a_ratio_to_plain_torch():
    rows = measure_linear_speed("torch", ("bfloat16",), "cpu", ON_CPU)
    assert [0.1 < row.numbers["ratio"] < 10 for row in rows] == [True, True]
