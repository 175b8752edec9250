"""Which implementation each feature uses here, asked of the code that chooses it.

The block kernel is chosen by ``softmax.block_kernels.choose_kernel``; norm and optimizer by
Megatron, whose order of imports :mod:`.probe` repeats (a test compares it with Megatron itself,
which is too slow to import for every report).
"""

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .packages import Package
from .probe import DTYPES

Answers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Missing:
    """Something better that is not here, and how to get it (``None``: not by installing)."""

    name: str
    why: str
    install: str | None


@dataclass(frozen=True)
class Feature:
    """One line of the report.

    Attributes:
        uses: the implementation; ``None`` if nothing here can do it.
        device: ``"cpu"``, ``"cuda"``, or ``"any"``.
        here: whether this machine has that device and PyTorch can use it.
    """

    name: str
    device: str
    here: bool
    uses: str | None
    missing: tuple[Missing, ...] = ()


def describe_features(
    packages: Mapping[str, Package], answers: Answers, gpu_usable: bool
) -> list[Feature]:
    """All features, for the CPU and for GPUs alike: a login node is often asked for both."""
    torch_answer = facts(answers, "ask:torch_facts")
    features = block_kernel_features(packages, answers, gpu_usable)
    features += [
        *layer_features(packages, answers),
        optimizer_feature(packages, answers),
        data_helpers_feature(packages),
        Feature(
            "messages between ranks", "cpu", True, "gloo" if torch_answer.get("gloo") else None
        ),
        Feature(
            "messages between ranks",
            "cuda",
            gpu_usable,
            f"NCCL {torch_answer['nccl']}; over gloo groups: staged through pinned host memory"
            if torch_answer.get("nccl")
            else ("gloo, staged through host memory" if torch_answer.get("gloo") else None),
            ()
            if torch_answer.get("nccl") or not torch_answer
            else (Missing("NCCL", "this build of PyTorch has none", packages["torch"].install),),
        ),
    ]
    return features


def facts(answers: Answers, step: str) -> Mapping[str, Any]:
    """The facts of a step; empty if it failed."""
    return answers.get(step, {}).get("facts", {})


def block_kernel_features(
    packages: Mapping[str, Package], answers: Answers, gpu_usable: bool
) -> list[Feature]:
    """The attention of one block, by device and dtype; dtypes with equal answers share a line."""
    choices = facts(answers, "ask:block_kernels")
    features = []
    for device in ("cpu", "cuda"):
        lines: dict[tuple[str | None, tuple[Missing, ...]], list[str]] = {}
        for dtype in DTYPES:
            choice = choices.get(f"{device} {dtype}")
            if choice is None:
                lines.setdefault((None, ()), []).append(dtype)
                continue
            uses, missing = choice["auto"], _missing_kernels(choice, packages, dtype, device)
            if uses == "flash" and "error" in answers.get("ask:flash_interface", {}):
                # It is installed in a version that fits, so it is chosen, and fails when called.
                broken = answers["ask:flash_interface"]["error"]
                uses = "flash, which fails; choose --longseq-attention-kernel aten"
                missing = (Missing("flash", broken, packages["flash-attn"].install),)
            lines.setdefault((uses, missing), []).append(dtype)
        features += [
            Feature(f"attention block, {', '.join(dtypes)}", device, here, uses, missing)
            for (uses, missing), dtypes in lines.items()
            for here in [device == "cpu" or gpu_usable]
        ]
    return features


def _missing_kernels(
    choice: Mapping[str, Any], packages: Mapping[str, Package], dtype: str, device: str
) -> tuple[Missing, ...]:
    """The kernels ``auto`` would rather have taken and that installing something would bring."""
    missing = []
    for name, why in choice["unusable"].items():
        if name == choice["auto"]:
            break
        if name == "flash" and device == "cuda" and dtype in ("bfloat16", "float16"):
            missing.append(Missing(name, why, packages["flash-attn"].install))
    return tuple(missing)


def layer_features(packages: Mapping[str, Package], answers: Answers) -> list[Feature]:
    """Megatron's layers, and the norm in local ones and at the end."""
    engine, apex = packages["transformer-engine"], packages["apex"]
    no_engine = () if engine.works else (Missing(engine.name, why(engine), engine.install),)
    no_apex = () if apex.works else (Missing(apex.name, why(apex), apex.install),)
    chosen = facts(answers, "ask:norm")
    names = {
        "transformer_engine": "Transformer Engine's",
        "apex": "Apex's FusedLayerNorm",
        "torch": "megatron_longseq's SequenceParallelNorm, on PyTorch's kernels",
    }
    layers: str | None = "local ones alone: --transformer-impl local"
    if not packages["megatron-core"].works:
        layers = None
    elif engine.works:
        layers = "Transformer Engine's on a GPU (Megatron's default), or local ones"
    return [
        Feature("layers", "any", True, layers, no_engine),
        Feature("norm in local layers", "any", True, names.get(chosen.get("local", "")), no_apex),
        Feature("norm at the end", "any", True, names.get(chosen.get("final", "")), no_engine),
    ]


def optimizer_feature(packages: Mapping[str, Package], answers: Answers) -> Feature:
    """The Adam of Megatron's optimizers."""
    module = facts(answers, "ask:optimizer").get("module")
    names = {
        "transformer_engine.pytorch.optimizers": "Transformer Engine's FusedAdam",
        "apex.optimizers": "Apex's FusedAdam",
        "torch.optim": "PyTorch's AdamW (Adam in the distributed optimizer)",
    }
    missing = []
    if module == "torch.optim":
        missing = [
            Missing(package.name, why(package), package.install)
            for package in (packages["transformer-engine"], packages["apex"])
        ]
    return Feature("Adam", "any", True, names.get(str(module)), tuple(missing))


def data_helpers_feature(packages: Mapping[str, Package]) -> Feature:
    """Megatron's C++ helpers that build sample indices: shipped in a wheel, or to be compiled."""
    name = "indices of the data set"
    megatron = packages["megatron-core"]
    if megatron.location is None:
        return Feature(name, "any", True, None)
    folder = Path(megatron.location) / "datasets"
    compiled = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    if compiled.exists():
        uses: str | None = f"Megatron's C++ helpers, compiled: {compiled.name}"
    elif (folder / "Makefile").exists():
        uses = "Megatron's C++ helpers, compiled by the first run (needs make, g++ and pybind11)"
    else:
        why_not = "its extension was built for another Python, and there is no Makefile"
        return Feature(
            name, "any", True, None, (Missing("helpers_cpp", why_not, megatron.install),)
        )
    return Feature(name, "any", True, uses)


def why(package: Package) -> str:
    """Why a package cannot be used, in a few words."""
    if package.status == "missing":
        return "not installed"
    return f"{package.status}: {package.note}" if package.note else package.status


def nothing_for(features: Sequence[Feature], device: str) -> list[Feature]:
    """The features that this device, or any, would need and that nothing here can do."""
    return [f for f in features if f.uses is None and f.device in (device, "any")]
