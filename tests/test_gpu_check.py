"""The GPU check, run on a CPU with PyTorch alone; and that it would notice what is wrong."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_longseq.gpu_check import kernels
from megatron_longseq.gpu_check.__main__ import main
from megatron_longseq.gpu_check.dense import dense_with_gradients, random_tensors, relative_error
from megatron_longseq.gpu_check.plan import Check, judge_digests, make_plan, run_plan
from megatron_longseq.gpu_check.report import as_json, as_markdown
from megatron_longseq.gpu_check.rows import FAILED, NOT_RUN, OK, ON_CPU, ON_GPU, WRONG, Row
from megatron_longseq.softmax.reference_kernel import ReferenceKernel

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
# PyTorch and what importing it takes: nothing else of the environment is to be seen.
TORCH_ALONE = (
    *("torch", "torchgen", "functorch", "triton", "nvidia", "cuda", "numpy", "numpy.libs"),
    *("typing_extensions.py", "filelock", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("fsspec", "setuptools", "packaging"),
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(finished process, page, JSON) of the whole check on a CPU, seeing PyTorch alone."""
    folder = tmp_path_factory.mktemp("check")
    site = Path(torch.__file__).parents[1]
    for name in TORCH_ALONE:
        if (site / name).exists():
            (folder / "site").mkdir(exist_ok=True)
            (folder / "site" / name).symlink_to(site / name)
    python = getattr(sys, "_base_executable", sys.executable)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    page = folder / "out" / "page.md"
    command = [ROOT / "scripts/gpu_check.sh", "--device", "cpu", "--output", page]
    done = subprocess.run(
        command,
        env=environment | {"PYTHON": python, "PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode in (0, 1), done.stderr
    return done, page.read_text(), json.loads(page.with_suffix(".json").read_text())


def test_the_whole_check_agrees_on_a_cpu_with_pytorch_alone(outcome):
    done, page, result = outcome
    assert done.returncode == 0 and result["passed"], done.stdout
    assert "everything agrees" in done.stdout.splitlines()[-1]
    assert page.startswith("# Checked on a CPU") and result["verdict"] in page


def test_every_kernel_dtype_and_grid_was_compared(outcome):
    rows = outcome[2]["rows"]
    equal = {(row["check"].split(",")[0], row["case"]) for row in rows if row["status"] == "ok"}
    for name in ("aten", "reference"):
        for dtype in ("float64", "float32", "bfloat16", "float16"):
            for case in kernels.CASES:
                assert (f"kernel {name}", f"{dtype}, {case.name}") in equal
    grids = {case for check, case in equal if check == "2D attention"}
    for grid in (
        "1 head-parallel x 4 ring",
        "2 head-parallel x 2 ring",
        "4 head-parallel x 1 ring",
    ):
        assert {f"bfloat16, {grid}, causal", f"bfloat16, {grid}, full"} <= grids
    assert ("streams and pinned memory", "rank 1") in equal
    assert ("memory over repeated calls", "tensors") in equal
    called = [row["numbers"]["of"] for row in rows if row["case"].endswith("operators")]
    forward = "_scaled_dot_product_flash_attention_for_cpu"
    assert called == [[forward, f"{forward}_backward"]] * 4 + [[]] * 4
    speeds = [row for row in rows if row["check"].startswith("speed")]
    assert all(row["numbers"]["ratio"] > 0 for row in speeds) and len(speeds) == 6
    skipped = {row["check"] for row in rows if row["status"] == "skipped"}
    assert "2D attention, 2 GPUs over NCCL, bfloat16" in skipped


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so on a machine without a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_3(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 3
    assert "no GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_on_a_gpu_each_dtype_has_a_process_of_its_own_and_two_gpus_bring_nccl():
    checks, rows = make_plan("cuda", ON_GPU, gpus=2)
    names = [check.name for check in checks]
    assert {"kernel aten, float32", "kernel aten, bfloat16", "kernel reference, float64"} <= set(
        names
    )
    assert "kernel aten, float64" not in names  # PyTorch has no such operator on CUDA
    assert [check.backend for check in checks if "NCCL" in check.name] == ["nccl"]
    assert all("NCCL" not in row.check for row in rows)
    assert sum(check.seconds * len(check.environments) for check in checks) < 3600


class WrongKernel(ReferenceKernel):
    """The reference with one fault."""

    name = "wrong"

    def __init__(self, fault):
        self.fault = fault

    def forward(self, query, key, value, **options):
        out, lse = super().forward(query, key, value, **options)
        if self.fault == "lse to base 2":
            lse = lse / torch.log(torch.tensor(2.0))
        if self.fault == "0 where a row sees nothing":
            lse = lse.masked_fill(lse.isinf(), 0.0)
        if self.fault == "value":
            out = out * 1.001
        return out, lse

    def backward(self, out_gradient, query, key, value, out, lse, **options):
        if self.fault == "NaN gradients":
            return tuple(torch.full_like(tensor, torch.nan) for tensor in (query, key, value))
        if self.fault == "gradient by its own lse":
            _, lse = super().forward(query, key, value, **options)
        return super().backward(out_gradient, query, key, value, out, lse, **options)


@pytest.mark.parametrize(
    "fault, case, words",
    [
        ("lse to base 2", "full", "lse .*it is to base 2"),
        ("value", "causal", "out 1.0e-03"),
        ("0 where a row sees nothing", "mask with rows that see nothing", "lse inf"),
        ("NaN gradients", "full", "dq inf"),
    ],
)
def test_a_wrong_kernel_is_noticed(fault, case, words):
    (chosen,) = [c for c in kernels.CASES if c.name == case]
    row = kernels._compare(WrongKernel(fault), chosen, torch.float32, CPU, 40)
    assert row.status == WRONG
    assert re.search(words, row.detail), row.detail


def test_a_backward_that_ignores_the_final_lse_is_noticed():
    kernel = WrongKernel("gradient by its own lse")
    assert kernels._check_final_lse(kernel, torch.float32, CPU, 40).status == WRONG
    assert kernels._compare(kernel, kernels.CASES[0], torch.float32, CPU, 40).status == OK


def test_the_dense_reference_equals_pytorchs_own_attention():
    q, k, v, dout = random_tensors(((6, 2, 4, 8),) * 4, torch.float64, CPU, seed=3)
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    ours = dense_with_gradients(q, k, v, dout, visible, 0.3)
    leaves = [t.permute(1, 2, 0, 3).detach().requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
    theirs = (out, *torch.autograd.grad(out, leaves, dout.permute(1, 2, 0, 3)))
    for name, tensor in zip(("out", "dq", "dk", "dv"), theirs, strict=True):
        assert relative_error(tensor.permute(2, 0, 1, 3), ours[name]) < 1e-13


def raises():
    raise RuntimeError("CUDA error: an illegal memory access")


def hangs():
    time.sleep(60)


def agrees():
    return [Row("case", OK)]


def test_a_check_that_fails_or_hangs_does_not_stop_the_rest(ranks):
    checks = [
        Check("raises", raises, ()),
        Check("hangs", hangs, (), seconds=2.0),
        Check("agrees", agrees, ()),
    ]
    rows = run_plan(ranks, checks, deadline=time.monotonic() + 60, report=lambda *_: None)
    assert [(row.check, row.status) for row in rows] == [
        *(("raises", FAILED), ("hangs", FAILED), ("agrees", OK))
    ]
    assert "illegal memory access" in rows[0].detail and "within 2 s" in rows[1].detail
    facts = {"torch": "2.x", "compute_capability": "9.0"}
    assert not json.loads(as_json(rows, facts, 1.0))["passed"]
    page = as_markdown(rows, facts, 1.0)
    assert page.startswith("# What was checked on a GPU")
    assert "2 of 3 cases are off, in: raises; hangs" in page


def test_what_has_no_time_left_is_not_run_and_counts_as_off(ranks):
    checks = [Check("agrees", agrees, ())]
    (row,) = run_plan(ranks, checks, deadline=time.monotonic() + 1, report=lambda *_: None)
    assert row.status == NOT_RUN
    assert not json.loads(as_json([row], {}, 1.0))["passed"]


def test_bits_that_differ_between_runs_are_noticed():
    same = {"usual stream": "a", "stream of its own": "a"}
    assert [row.status for row in judge_digests([[same], [same]])] == [OK]
    late = same | {"stream of its own": "b"}
    assert [row.status for row in judge_digests([[same, late], [same, same]])] == [OK, WRONG]


def test_an_unknown_check_is_refused(capsys):
    assert main(["--device", "cpu", "--only", "nothing like it"]) == 2
    assert "no check has that" in capsys.readouterr().err


def test_sizes_on_a_cpu_split_over_four_ranks():
    for sizes in (ON_CPU, ON_GPU):
        assert sizes.sequence % 8 == 0 and sizes.rows % 2 == 1
