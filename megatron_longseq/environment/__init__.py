"""Facts about the environment: packages, GPUs, limits, which kernel runs where, what is wrong.

:func:`inspect_environment` uses the standard library alone and imports nothing it reports on: that
happens in a process of its own (:mod:`.asking`), so that a broken package is a line of the report.
"""

import dataclasses
import platform
import sys
from dataclasses import dataclass
from typing import Any

from .. import __version__
from .asking import STEP_SECONDS, ask
from .features import Feature, Missing, describe_features, facts
from .machine import Gpu, Machine, Space, describe_machine
from .packages import UNDECLARED, Package, Wanted, describe, find_folder, wanted_packages
from .problems import Problem, find_problems, gpu_usable, verdict
from .tested import numbers

__all__ = [
    "SCHEMA",
    "UNDECLARED",
    "Environment",
    "Feature",
    "Gpu",
    "Machine",
    "Missing",
    "Package",
    "Problem",
    "Space",
    "inspect_environment",
]

# Of the JSON form; raised when a key changes its meaning or goes.
SCHEMA = 1
QUESTIONS = ("torch_facts", "block_kernels", "flash_interface", "norm", "optimizer")
# Which CUDA the commands for packages with one build per CUDA are given for, if torch is silent.
DEFAULT_CUDA = "13"


@dataclass(frozen=True)
class Environment:
    """Everything found.

    Attributes:
        torch: what PyTorch says of its own build: CUDA, NCCL, gloo, devices.
        can_train: whether training can run here; ``verdict`` says so in one line.
    """

    python: str
    executable: str
    longseq: str
    packages: tuple[Package, ...]
    torch: dict[str, Any]
    machine: Machine
    features: tuple[Feature, ...]
    problems: tuple[Problem, ...]
    can_train: bool
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; ``schema`` names the form."""
        return {"schema": SCHEMA} | dataclasses.asdict(self)


def inspect_environment(
    *, thorough: bool = False, step_seconds: float = STEP_SECONDS
) -> Environment:
    """Looks at this environment; takes as long as importing PyTorch and its optional packages.

    Args:
        thorough: import Megatron too, which takes several times as long.
        step_seconds: limit of each import.
    """
    wanted = wanted_packages(int(DEFAULT_CUDA))
    imports = [w.module for w in wanted if (w.imported or thorough) and find_folder(w.module)]
    if thorough and find_folder("megatron.training"):
        imports.append("megatron.training")
    # Megatron last: it imports the others itself.
    imports.sort(key=lambda module: module.startswith("megatron"))
    steps = [f"import:{module}" for module in imports if module == "torch"]
    steps += [f"ask:{name}" for name in QUESTIONS if _can_be_asked(name, imports)]
    steps += [f"import:{module}" for module in imports if module != "torch"]
    answers = ask(steps, step_seconds)
    torch_facts = dict(facts(answers, "ask:torch_facts"))
    cuda_major = numbers(torch_facts.get("cuda") or DEFAULT_CUDA)[0]
    packages = {}
    for package in (describe(w, answers) for w in wanted_packages(cuda_major)):
        packages[package.name] = package
        if package.name == "megatron-core":
            packages["megatron-training"] = describe_training(package, answers)
    machine = describe_machine()
    features = describe_features(packages, answers, gpu_usable(machine, torch_facts))
    problems = find_problems(packages, features, machine, answers)
    can_train, line = verdict(problems, machine, torch_facts)
    return Environment(
        python=platform.python_version(),
        executable=sys.executable,
        longseq=__version__,
        packages=tuple(packages.values()),
        torch=torch_facts,
        machine=machine,
        features=tuple(features),
        problems=tuple(problems),
        can_train=can_train,
        verdict=line,
    )


def describe_training(core: Package, answers: dict[str, dict[str, Any]]) -> Package:
    """``megatron.training``: part of the wheel of megatron-core, or of a checkout."""
    wanted = Wanted("megatron-core", "megatron.training", core.use, needed=True, imported=False)
    found = describe(wanted, answers)
    return dataclasses.replace(
        found,
        name="megatron-training",
        # A missing one is a problem of its own, named once; see problems.package_problems.
        needed=found.location is not None,
        version=core.version if found.location else None,
        note=found.note if found.status == "broken" else None,
        in_range=True,
    )


def _can_be_asked(question: str, imports: list[str]) -> bool:
    if question == "flash_interface":
        return "flash_attn" in imports
    return "torch" in imports
