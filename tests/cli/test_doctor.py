"""``longseq doctor``: on this environment, and on broken ones made of fake packages."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_longseq.cli.doctor import print_report
from megatron_longseq.environment import inspect_environment
from megatron_longseq.environment.asking import ask
from megatron_longseq.environment.features import describe_features
from megatron_longseq.environment.machine import Gpu, list_gpus
from megatron_longseq.environment.packages import megatron_version
from megatron_longseq.environment.problems import (
    STOPS,
    feature_problems,
    gpu_problems,
    network_problems,
    verdict,
)
from megatron_longseq.environment.tested import TESTED, in_range

ROOT = Path(__file__).parents[2]
BROKEN_FLASH = 'raise ImportError("libcudart.so.12: cannot open shared object file\\nmore lines")\n'
OLD_MEGATRON = 'MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ""\n'


def doctor(*flags, path=None):
    """Runs the command; its exit status and output."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, "-P", "-m", "megatron_longseq.cli", "doctor", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def distribution(folder, name, version, summary=""):
    """Metadata as pip leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    (info / "METADATA").write_text(text)


def module(folder, name, text=""):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)


@pytest.fixture(scope="module")
def here():
    return inspect_environment()


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """(exit status, JSON) with another apex, a flash-attn that cannot load, and an old Megatron."""
    path = tmp_path_factory.mktemp("packages")
    distribution(path, "apex", "0.9.10.dev0", "Pyramid toolkit")
    module(path, "apex")
    distribution(path, "flash_attn", "2.8.1")
    module(path, "flash_attn", BROKEN_FLASH)
    distribution(path, "megatron_core", "0.16.1")
    module(path, "megatron/core")
    (path / "megatron/core/package_info.py").write_text(OLD_MEGATRON)
    status, output = doctor("--json", path=path)
    report = json.loads(output)
    report["by_name"] = {package["name"]: package for package in report["packages"]}
    return status, report


def test_this_environment_can_train_and_the_last_line_says_so():
    status, output = doctor()
    assert status == 0
    assert output.splitlines()[-1].startswith("training can run here")
    for word in ("torch", "megatron-core", "transformer-engine", "NCCL", "never run", "gloo"):
        assert word in output


def test_with_no_package_at_all_it_still_reports_in_plain_lines():
    command = [sys._base_executable, "-S", "-m", "megatron_longseq.cli", "doctor"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert "  stops | torch is missing | pip install 'torch>=2.11'" in lines
    assert lines[-1].startswith("training cannot run here: torch is missing (and ")


def test_versions_and_kernels_are_those_that_run(here):
    import torch

    from megatron_longseq.softmax import choose_kernel

    found = {package.name: package for package in here.packages}
    assert found["torch"].version == torch.__version__.split("+")[0]
    assert found["torch"].status == "found" and found["megatron-core"].works
    assert here.torch["cuda"] == torch.version.cuda
    kernels = {
        (f.name.split(", ")[1], f.device): f.uses for f in here.features if "block" in f.name
    }
    assert kernels["float64", "cuda"] == "reference"
    for device in ("cpu", "cuda"):
        expected = choose_kernel("auto", torch.bfloat16, torch.device(device)).name
        lines = [f for f in here.features if f.device == device and "bfloat16" in f.name]
        assert [line.uses for line in lines] == [expected]


def test_json_is_plain_and_its_keys_are_known(here):
    report = json.loads(json.dumps(here.as_json()))
    assert report["schema"] == 1
    assert set(report) == {
        *("schema", "python", "executable", "longseq", "packages", "torch", "machine"),
        *("features", "problems", "can_train", "verdict"),
    }
    assert set(report["packages"][0]) == {
        *("name", "module", "use", "needed", "status", "version", "location", "note"),
        *("supported", "in_range", "tested_with", "used_in_tests", "install"),
    }
    assert set(report["features"][0]) == {"name", "device", "here", "uses", "missing"}
    assert {problem["severity"] for problem in report["problems"]} <= {"stops", "warning", "hint"}
    assert report["machine"]["cpus"] > 0 and report["machine"]["open_files"][0] != 0


def test_commands_to_copy_are_not_wrapped(here, capsys):
    print_report(here)
    lines = capsys.readouterr().out.splitlines()
    for feature in here.features:
        for missing in feature.missing:
            assert any(line.endswith(missing.install) for line in lines)


def test_another_project_named_apex_is_recognised_and_stops(broken):
    status, report = broken
    assert status == 1 and not report["can_train"]
    assert report["by_name"]["apex"]["status"] == "another project"
    assert report["by_name"]["apex"]["version"] == "0.9.10.dev0"
    stops = [p for p in report["problems"] if p["severity"] == "stops"]
    assert any("takes it for NVIDIA Apex" in p["what"] for p in stops)
    assert any(p["remedy"] == "pip uninstall apex" for p in stops)


def test_a_broken_import_is_found_but_broken_with_its_first_line(broken):
    flash = broken[1]["by_name"]["flash-attn"]
    assert (flash["status"], flash["version"]) == ("broken", "2.8.1")
    assert flash["note"] == "ImportError: libcudart.so.12: cannot open shared object file"
    (line,) = [
        f for f in broken[1]["features"] if "bfloat16" in f["name"] and f["device"] == "cuda"
    ]
    assert "flash, which fails" in line["uses"]


def test_an_old_megatron_is_named_with_the_range_that_works(broken):
    megatron = broken[1]["by_name"]["megatron-core"]
    assert megatron["version"] == "0.16.1" and not megatron["in_range"]
    (problem,) = [p for p in broken[1]["problems"] if p["what"].startswith("megatron-core 0.16.1")]
    assert problem["severity"] == "stops" and ">=0.19,<0.20" in problem["what"]
    assert problem["remedy"] == "pip install 'megatron-core>=0.19,<0.20'"


def test_a_package_that_ends_or_hangs_the_interpreter_is_named_and_the_rest_is_asked(
    tmp_path, monkeypatch
):
    module(tmp_path, "killer", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    module(tmp_path, "sleeper", "import time\ntime.sleep(60)\n")
    module(tmp_path, "leaver", "raise SystemExit(3)\n")
    module(tmp_path, "noisy", "print('hello', flush=True)\n__version__ = '1.2'\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("killer", "sleeper", "leaver", "noisy")
    answers = ask([f"import:{name}" for name in names], step_seconds=3)
    assert "killed by SIGSEGV" in answers["import:killer"]["error"]
    assert answers["import:sleeper"]["error"] == "did not finish within 3 s"
    assert answers["import:leaver"]["error"] == "SystemExit: 3"
    assert answers["import:noisy"]["facts"]["version"] == "1.2"


def test_the_table_equals_constraints_and_setup():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in lines if "==" in line and line[0] != "#")
    for name, tested in TESTED.items():
        assert tested.version == pinned.get(name), name
    text = (ROOT / "setup.py").read_text()
    strings = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)]
    ranges = {}
    for string in filter(lambda s: isinstance(s, str), strings):
        name = string.split(">=")[0].split("[")[0]
        if ">=" in string and name in TESTED:
            ranges.setdefault(name, set()).add(string[string.index(">=") :])
    assert {name: {tested.supported} for name, tested in TESTED.items() if name in ranges} == ranges
    assert {"torch", "megatron-core", "flash-attn", "transformer-engine"} <= set(ranges)


@pytest.mark.parametrize(
    "version, supported, inside",
    [
        ("2.13.0+cu130", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("0.19.2", ">=0.19,<0.20", True),
        ("0.20.0rc1", ">=0.19,<0.20", False),
        ("0.18.9", ">=0.19,<0.20", False),
        ("2.7.4.post1", ">=2.7,<3", True),
        ("3", ">=2.7,<3", False),
        ("1.0", "", True),
    ],
)
def test_ranges_compare_numbers(version, supported, inside):
    assert in_range(version, supported) is inside


def test_a_version_file_is_read_and_not_run(tmp_path):
    (tmp_path / "package_info.py").write_text(OLD_MEGATRON.replace('""', '"rc1"') + "1/0\n")
    assert megatron_version(tmp_path) == "0.16.1rc1"
    (tmp_path / "package_info.py").write_text("nothing")
    assert megatron_version(tmp_path) is None


def with_gpu(here, driver, **changes):
    import dataclasses

    gpu = Gpu(0, "Some GPU", 80_000, 79_000, (9, 0))
    return dataclasses.replace(here.machine, gpus=(gpu,), driver=driver, **changes)


def test_gpus_are_read_from_the_drivers_own_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    lines = [
        "0, NVIDIA H200, 580.159.03, 143771, 143000, 9.0",
        "1, Odd, 580.159.03, [N/A], 5, [N/A]",
    ]
    tool.write_text("#!/bin/sh\n" + "\n".join(f"echo '{line}'" for line in lines) + "\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (first, second), driver, note = list_gpus()
    assert first == Gpu(0, "NVIDIA H200", 143771, 143000, (9, 0))
    assert (second.memory_mib, second.compute_capability) == (None, None)
    assert (driver, note) == ("580.159.03", None)
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert list_gpus()[0] == () and list_gpus()[2] == "nvidia-smi: NVIDIA-SMI has failed"


def test_a_package_whose_error_megatron_does_not_expect_stops(here):
    packages = {package.name: package for package in here.packages}
    answers = {"ask:norm": {"error": "RuntimeError: no libcuda"}}
    features = describe_features(packages, answers, gpu_usable=False)
    problems = list(feature_problems(packages, features, answers, False))
    assert [p.severity for p in problems if "RuntimeError: no libcuda" in p.what] == [STOPS]
    assert not any(p.what.startswith("norm") for p in problems)


def test_a_driver_too_old_for_this_torch_stops_and_says_which_would_do(here):
    machine = with_gpu(here, "535.104")
    torch_facts = {"cuda": "13.0", "cuda_available": False, "device_count": 0, "built_for": []}
    (problem,) = gpu_problems(machine, torch_facts)
    assert problem.severity == STOPS and "driver 535.104 is too old" in problem.what
    assert "driver 580 or newer" in problem.remedy
    can_train, line = verdict([problem], machine, torch_facts)
    assert not can_train and line.startswith("training cannot run here: driver 535.104")


def test_gpus_hidden_or_without_code_for_them_are_problems(here):
    facts = {"cuda": "13.0", "cuda_available": False, "device_count": 0, "built_for": []}
    hidden = with_gpu(here, "580.1", variables={"CUDA_VISIBLE_DEVICES": ""})
    (problem,) = gpu_problems(hidden, facts)
    assert "CUDA_VISIBLE_DEVICES=''" in problem.what
    facts |= {"cuda_available": True, "device_count": 1, "built_for": ["sm_75", "sm_120a"]}
    (problem,) = gpu_problems(hidden, facts)
    assert "holds code for sm_75, sm_120a" in problem.what
    facts["built_for"] = ["sm_80", "sm_90"]
    assert list(gpu_problems(hidden, facts)) == []
    (problem,) = gpu_problems(hidden, facts | {"cuda": None, "cuda_available": False})
    assert problem.severity == STOPS and "built without CUDA" in problem.what


def test_interfaces_and_names_that_gloo_and_nccl_look_for(here):
    import dataclasses

    def found(variables, addresses=("10.0.0.5",)):
        machine = dataclasses.replace(
            here.machine, variables=variables, addresses=addresses, interfaces=("lo", "ib0", "eth0")
        )
        return [problem.what for problem in network_problems(machine)]

    assert found({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}) == []
    assert found({"NCCL_SOCKET_IFNAME": "^lo,docker"}) == []
    assert found({"GLOO_SOCKET_IFNAME": "ib"}) == [
        "GLOO_SOCKET_IFNAME=ib names no network interface of this machine"
    ]
    assert "=bond0 names no" in found({"NCCL_SOCKET_IFNAME": "=bond0"})[0]
    assert "does not resolve" in found({}, addresses=())[0]
    assert "resolves to loopback" in found({}, addresses=("127.0.1.1",))[0]
