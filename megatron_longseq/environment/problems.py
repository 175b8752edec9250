"""What is wrong with an environment, and whether training can run in it."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .features import Feature, facts, nothing_for
from .machine import Machine
from .packages import BROKEN, OTHER, Package
from .tested import MINIMUM_CAPABILITY, MINIMUM_DRIVER, PYTHON, numbers

STOPS, WARNING, HINT = "stops", "warning", "hint"
GIB = 1 << 30
# Sockets and shared-memory files of a rank, and the files a checkpoint's writers hold open.
FEW_OPEN_FILES = 4096
# NCCL takes some ten MiB per pair of GPUs of a host there, PyTorch's data loader whole batches.
SMALL_SHARED_MEMORY = GIB
LITTLE_DISK = 10 * GIB


@dataclass(frozen=True)
class Problem:
    """Something to know, with what to do about it.

    Attributes:
        severity: ``"stops"``: nothing trains here before it is solved; ``"warning"``: something
            will fail or be slow; ``"hint"``: worth knowing.
    """

    severity: str
    what: str
    remedy: str


def find_problems(
    packages: Mapping[str, Package],
    features: list[Feature],
    machine: Machine,
    answers: Mapping[str, Mapping[str, Any]],
) -> list[Problem]:
    """All problems, what stops first."""
    torch_facts = facts(answers, "ask:torch_facts")
    problems = [
        *python_problems(),
        *package_problems(packages),
        *apex_problems(packages, answers),
        *gpu_problems(machine, torch_facts),
        *feature_problems(packages, features, answers, gpu_usable(machine, torch_facts)),
        *network_problems(machine),
        *limit_problems(machine),
        *variable_problems(machine, torch_facts),
    ]
    order = (STOPS, WARNING, HINT)
    return sorted(problems, key=lambda problem: order.index(problem.severity))


def gpu_usable(machine: Machine, torch_facts: Mapping[str, Any]) -> bool:
    """Says whether PyTorch sees a GPU that this machine has."""
    return bool(torch_facts.get("cuda_available")) and torch_facts.get("device_count", 0) > 0


def python_problems() -> Iterator[Problem]:
    """Versions of Python other than the one tested."""
    version = numbers(platform.python_version())[:2]
    if version < PYTHON:
        needed = ".".join(map(str, PYTHON))
        yield Problem(
            STOPS,
            f"Python {platform.python_version()}",
            f"megatron_longseq needs {needed} or newer",
        )


def package_problems(packages: Mapping[str, Package]) -> Iterator[Problem]:
    """What is missing, broken or of an unsupported release."""
    for package in packages.values():
        if package.needed and not package.works:
            what = f"{package.name} is {package.status}" + (
                f": {package.note}" if package.note else ""
            )
            yield Problem(STOPS, what, package.install)
        elif package.status == BROKEN:
            yield Problem(
                WARNING,
                f"{package.name} is found but broken: {package.note}",
                f"reinstall it ({package.install}) or remove it (pip uninstall {package.name})",
            )
        elif not package.in_range:
            yield Problem(
                STOPS if package.needed else WARNING,
                f"{package.name} {package.version} is installed; this release supports "
                f"{package.supported}",
                package.install,
            )
    megatron = packages["megatron-core"]
    if megatron.works and megatron.note:
        yield Problem(WARNING, f"megatron-core {megatron.version}: {megatron.note}", "keep one")
    if megatron.works and packages["megatron-training"].location is None:
        yield Problem(
            STOPS, "there is megatron.core but no megatron.training beside it", megatron.install
        )


def apex_problems(
    packages: Mapping[str, Package], answers: Mapping[str, Mapping[str, Any]]
) -> Iterator[Problem]:
    """The other project of that name, which Megatron takes for NVIDIA's."""
    apex = packages["apex"]
    if apex.status != OTHER:
        return
    imported = "facts" in answers.get("import:apex", {})
    chosen = facts(answers, "ask:norm")
    error = answers.get("import:apex", {}).get("error", "")
    handled = error.split(":")[0] in ("ImportError", "ModuleNotFoundError")
    if imported and "apex" in chosen.values():
        what = (
            "an unrelated package named apex is installed; Megatron takes it for NVIDIA Apex and "
        )
        where = "local layers then fail" if chosen["final"] != "apex" else "every model then fails"
        severity = STOPS if chosen["final"] == "apex" else WARNING
        yield Problem(severity, what + where, "pip uninstall apex")
    elif imported or handled:
        yield Problem(
            WARNING, "the installed apex is not NVIDIA Apex; it is not used", "pip uninstall apex"
        )
    else:
        what = (
            f"an unrelated package named apex is installed and fails in Megatron's import: {error}"
        )
        yield Problem(STOPS, what, "pip uninstall apex")


def gpu_problems(machine: Machine, torch_facts: Mapping[str, Any]) -> Iterator[Problem]:
    """GPUs that PyTorch cannot use, and why."""
    build, driver = torch_facts.get("cuda"), machine.driver
    if machine.gpu_note is not None:
        yield Problem(
            WARNING, f"the GPUs could not be listed: {machine.gpu_note}", "check the driver"
        )
    if not torch_facts or not (machine.gpus or driver):
        return
    if build is None:
        if machine.gpus:
            yield Problem(
                STOPS,
                f"{_count(machine.gpus)}, but this PyTorch is built without CUDA",
                "install a CUDA build of torch, or run with --longseq-device cpu",
            )
        return
    needed = MINIMUM_DRIVER.get(numbers(build)[0])
    too_old = bool(driver and needed and numbers(driver)[0] < needed)
    if too_old:
        yield Problem(
            WARNING if torch_facts["cuda_available"] else STOPS,
            f"driver {driver} is too old for this PyTorch, built for CUDA {build}",
            f"driver {needed} or newer, NVIDIA's forward-compatibility package, or a build of "
            "torch for an older CUDA",
        )
    if machine.gpus and not torch_facts["cuda_available"] and not too_old:
        hidden = machine.variables.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
        yield Problem(
            STOPS,
            f"{_count(machine.gpus)}, but PyTorch finds no CUDA device{why}",
            "check CUDA_VISIBLE_DEVICES and the driver, or run with --longseq-device cpu",
        )
    yield from _capability_problems(machine, torch_facts)


def _count(gpus: tuple[Any, ...]) -> str:
    return f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"


def _capability_problems(machine: Machine, torch_facts: Mapping[str, Any]) -> Iterator[Problem]:
    built_for = [name for name in torch_facts.get("built_for", ()) if name.startswith("sm_")]
    for capability in sorted({g.compute_capability for g in machine.gpus if g.compute_capability}):
        shown = ".".join(map(str, capability))
        if capability < MINIMUM_CAPABILITY:
            yield Problem(
                WARNING,
                f"a GPU of compute capability {shown}: flash attention and bf16 need "
                f"{'.'.join(map(str, MINIMUM_CAPABILITY))}",
                "run in fp32, or in fp16 with --longseq-attention-kernel reference",
            )
        majors = {int(name[3:].rstrip("af")) // 10 for name in built_for}
        if majors and capability[0] not in majors:
            yield Problem(
                WARNING,
                f"a GPU of compute capability {shown}, but this PyTorch holds code for "
                f"{', '.join(built_for)}",
                "install a build of torch for this GPU",
            )


def feature_problems(
    packages: Mapping[str, Package],
    features: list[Feature],
    answers: Mapping[str, Mapping[str, Any]],
    gpu: bool,
) -> Iterator[Problem]:
    """What nothing here can do, unless a package that is missing anyway explains it."""
    if any(package.needed and not package.works for package in packages.values()):
        return
    # Megatron expects an ImportError of a package that is not there; any other ends its import.
    asked = {"ask:norm": "norm", "ask:optimizer": "Adam", "ask:block_kernels": "attention block"}
    failed = [name for name in asked if "error" in answers.get(name, {})]
    for name in failed:
        what = f"asking which {asked[name]} is used fails: {answers[name]['error']}"
        yield Problem(STOPS, what, "reinstall or remove the package that the error names")
    for feature in nothing_for(features, "cuda" if gpu else "cpu"):
        if any(feature.name.startswith(asked[name]) for name in failed):
            continue
        why = feature.missing[0].why if feature.missing else "no implementation is found"
        remedy = feature.missing[0].install if feature.missing else None
        yield Problem(
            STOPS, f"{feature.name}: nothing here can do it ({why})", remedy or "see above"
        )
    for feature in features:
        if feature.here and feature.uses and "fails" in feature.uses:
            yield Problem(
                WARNING,
                f"{feature.name}: flash would be chosen and fails: {feature.missing[0].why}",
                "--longseq-attention-kernel aten",
            )


def network_problems(machine: Machine) -> Iterator[Problem]:
    """Names and interfaces that gloo and NCCL will look for."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = machine.variables.get(variable)
        if value is None or not machine.interfaces:
            continue
        # NCCL: a list of prefixes; ^ turns it round, = asks for whole names.
        names = value.lstrip("^=").split(",")
        whole = variable.startswith("GLOO") or value.startswith("=")
        found = any(
            interface == name if whole else interface.startswith(name)
            for interface in machine.interfaces
            for name in names
        )
        if not found and not value.startswith("^"):
            yield Problem(
                WARNING,
                f"{variable}={value} names no network interface of this machine",
                f"one of {', '.join(machine.interfaces)}",
            )
    if "GLOO_SOCKET_IFNAME" in machine.variables:
        return
    if not machine.addresses:
        yield Problem(
            WARNING,
            f"the host's own name {machine.hostname} does not resolve: gloo fails to connect under "
            "torchrun",
            "export GLOO_SOCKET_IFNAME=lo (one machine) or the cluster's interface (several)",
        )
    elif all(a.startswith("127.") or a == "::1" for a in machine.addresses):
        yield Problem(
            HINT,
            f"the host's own name {machine.hostname} resolves to loopback: gloo works on this "
            "machine alone",
            "for several machines: export GLOO_SOCKET_IFNAME=<the cluster's interface>",
        )


def limit_problems(machine: Machine) -> Iterator[Problem]:
    """Open files, shared memory and disks."""
    soft, hard = machine.open_files
    if 0 <= soft < FEW_OPEN_FILES:
        allowed = "unlimited" if hard < 0 else str(hard)
        wanted = FEW_OPEN_FILES * 16
        yield Problem(
            HINT,
            f"at most {soft} open files per process: few for many ranks and checkpoint writers",
            f"ulimit -n {wanted if hard < 0 else min(hard, wanted)} (the hard limit is {allowed})",
        )
    for space in machine.spaces:
        free = f"{space.free_bytes / GIB:.1f} GiB free in {space.path}"
        if space.path == "/dev/shm" and space.free_bytes < SMALL_SHARED_MEMORY:
            yield Problem(
                WARNING,
                f"{free}: NCCL and the data loader's workers share memory there",
                "mount it larger (docker run --shm-size 16g, or --ipc host)",
            )
        elif space.path != "/dev/shm" and space.free_bytes < LITTLE_DISK:
            yield Problem(HINT, f"{free}: little for checkpoints", "write them elsewhere")


def variable_problems(machine: Machine, torch_facts: Mapping[str, Any]) -> Iterator[Problem]:
    """Environment variables that Megatron insists on."""
    value = machine.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    capabilities = [g.compute_capability for g in machine.gpus if g.compute_capability]
    old = any(capability < (10, 0) for capability in capabilities)
    if gpu_usable(machine, torch_facts) and old and value != "1":
        shown = "is not set" if value is None else f"is {value}"
        yield Problem(
            HINT,
            f"CUDA_DEVICE_MAX_CONNECTIONS {shown}: before Blackwell, Megatron refuses tensor and "
            "context parallelism unless it is 1 (FSDP: unless it is not 1)",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        )


def verdict(
    problems: list[Problem], machine: Machine, torch_facts: Mapping[str, Any]
) -> tuple[bool, str]:
    """(whether training can run here, the line that says so)."""
    stops = [problem for problem in problems if problem.severity == STOPS]
    if stops:
        more = f" (and {len(stops) - 1} more)" if len(stops) > 1 else ""
        return False, f"training cannot run here: {stops[0].what}{more}"
    if gpu_usable(machine, torch_facts):
        count = torch_facts["device_count"]
        return True, f"training can run here, on {count} GPU{'s' if count > 1 else ''}"
    return True, "training can run here, on the CPU over gloo (no GPU found)"
