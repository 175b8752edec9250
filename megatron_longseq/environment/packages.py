"""Which packages are installed, and which of them work."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tested import TESTED, in_range

FOUND, BROKEN, MISSING, OTHER, UNCHECKED = (
    "found",
    "broken",
    "missing",
    "another project",
    "found, not imported",
)


@dataclass(frozen=True)
class Wanted:
    """A package this one can make use of.

    Attributes:
        name: its distribution, as pip calls it.
        module: what is imported to see whether it works.
        use: what it is for.
        needed: without it nothing trains.
        imported: whether the import is tried; some take too long for a quick answer.
        install: the command that brings it, if not a plain ``pip install``.
    """

    name: str
    module: str
    use: str
    needed: bool = False
    imported: bool = True
    install: str | None = None

    def command(self) -> str:
        """The command that brings it."""
        return self.install or f"pip install '{self.name}{TESTED[self.name].supported}'"


@dataclass(frozen=True)
class Package:
    """What was found of a :class:`Wanted` package.

    Attributes:
        status: ``"found"``, ``"broken"``, ``"missing"``, ``"another project"`` or
            ``"found, not imported"``.
        version: of the files that an import finds; of the metadata where the files tell none.
        location: the folder of the files.
        note: the first line of the error, or what is odd about it.
    """

    name: str
    module: str
    use: str
    needed: bool
    status: str
    version: str | None
    location: str | None
    note: str | None
    supported: str
    in_range: bool
    tested_with: str | None
    used_in_tests: bool
    install: str

    @property
    def works(self) -> bool:
        """Says whether it can be used, as far as is known."""
        return self.status in (FOUND, UNCHECKED)


APEX_INSTALL = (
    "git clone https://github.com/NVIDIA/apex && cd apex && "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
)
UNDECLARED = "Megatron, whose wheel does not declare it"
FLASH_INSTALL = "pip install --no-build-isolation 'flash-attn>=2.7,<3'"


def wanted_packages(cuda_major: int) -> tuple[Wanted, ...]:
    """All of them.

    Args:
        cuda_major: of PyTorch's build; Transformer Engine comes in one build for each.
    """
    engine = f"transformer-engine[core_cu{cuda_major},pytorch]{TESTED['transformer-engine'][0]}"
    return (
        Wanted("torch", "torch", "everything", needed=True),
        Wanted("megatron-core", "megatron.core", "model and training", needed=True, imported=False),
        Wanted(
            "transformer-engine",
            "transformer_engine",
            "Megatron's layers on a GPU: attention, norm, GEMM, FP8, Adam",
            install=f"pip install --no-build-isolation '{engine}'",
        ),
        Wanted(
            "flash-attn", "flash_attn", "attention's block kernel on a GPU", install=FLASH_INSTALL
        ),
        Wanted("flash-linear-attention", "fla", "nothing in this release"),
        Wanted("triton", "triton", "torch.compile and kernels written in it"),
        Wanted("apex", "apex", "norm and Adam without Transformer Engine", install=APEX_INSTALL),
        Wanted("numpy", "numpy", "data", needed=True),
        *(
            Wanted(name, module, UNDECLARED, needed=True)
            for name, module in (
                ("einops", "einops"),
                ("pydantic", "pydantic"),
                ("pyyaml", "yaml"),
                ("regex", "regex"),
                ("six", "six"),
                ("psutil", "psutil"),
                ("tensorboard", "tensorboard"),
                ("packaging", "packaging"),
            )
        ),
    )


def describe(wanted: Wanted, answers: Mapping[str, Mapping[str, Any]]) -> Package:
    """What is installed of ``wanted``, given what :func:`.asking.ask` learnt by importing."""
    metadata = metadata_version(wanted.name)
    location = find_folder(wanted.module)
    answer = answers.get(f"import:{wanted.module}")
    version, note = metadata, None
    if location is None:
        status = MISSING
        if metadata is not None:
            status, note = BROKEN, f"installed, but no module {wanted.module} is found"
    elif answer is None:
        status = UNCHECKED
    elif "error" in answer:
        status, note = BROKEN, answer["error"]
    else:
        status = FOUND
        version = metadata or answer["facts"]["version"]
    if wanted.name == "megatron-core" and location is not None:
        version, note = _megatron(location, metadata, note)
    if wanted.name == "apex" and location is not None:
        status, note = _apex(location, status, note)
    tested = TESTED[wanted.name]
    return Package(
        name=wanted.name,
        module=wanted.module,
        use=wanted.use,
        needed=wanted.needed,
        status=status,
        version=version,
        location=str(location) if location else None,
        note=note,
        supported=tested.supported,
        in_range=version is None or in_range(version, tested.supported),
        tested_with=tested.version,
        used_in_tests=tested.used,
        install=wanted.command(),
    )


def metadata_version(name: str) -> str | None:
    """The version that pip knows, ``None`` if it knows no such package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception as error:  # metadata can be cut short like any file
        return f"unreadable ({type(error).__name__})"


def find_folder(module: str) -> Path | None:
    """The folder or file that an import of ``module`` would take, without importing it."""
    parent, _, name = module.rpartition(".")
    if parent:
        # Not find_spec(module): that imports the parent.
        root = importlib.util.find_spec(parent)
        for place in (root.submodule_search_locations or ()) if root else ():
            if (Path(place) / name / "__init__.py").exists():
                return Path(place) / name
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.origin not in ("built-in", "frozen", "namespace"):
        path = Path(spec.origin)
        return path.parent if path.name.startswith("__init__.") else path
    # A namespace: a folder without __init__.py, as a leftover of an uninstalled package is.
    return None


def _megatron(
    folder: Path, metadata: str | None, note: str | None
) -> tuple[str | None, str | None]:
    """The version of the files, which may be a checkout's, and how it differs from pip's."""
    version = megatron_version(folder)
    if version is None:
        return metadata, note
    if metadata is not None and metadata.split("+")[0] != version:
        note = f"pip knows {metadata}, but {folder} comes first on the path"
    elif metadata is None:
        note = f"not installed by pip: {folder}"
    return version, note


def megatron_version(folder: Path) -> str | None:
    """The version in ``megatron/core/package_info.py``, read and not run."""
    try:
        text = (folder / "package_info.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parts = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in _VERSION_PARTS]
    if not all(parts):
        return None
    release = re.search(r"""^PRE_RELEASE = ["'](.*)["']""", text, re.MULTILINE)
    return ".".join(part[1] for part in parts if part) + (release[1] if release else "")


_VERSION_PARTS = ("MAJOR", "MINOR", "PATCH")


def _apex(folder: Path, status: str, note: str | None) -> tuple[str, str | None]:
    """Tells NVIDIA Apex from the project of that name on the package index.

    NVIDIA's has ``apex.normalization`` and ``apex.optimizers``; the other one, a toolkit for web
    applications, has neither.
    """
    parts = [folder / "normalization", folder / "optimizers" / "fused_adam.py"]
    if not all(part.exists() for part in parts):
        what = "not NVIDIA Apex: it has no apex.normalization and apex.optimizers.FusedAdam"
        return (
            OTHER,
            f"{what}; {'importing it fails' if status == BROKEN else 'it can be imported'}",
        )
    if status == FOUND and importlib.util.find_spec("amp_C") is None:
        return BROKEN, "NVIDIA Apex built without its CUDA extensions: no module amp_C"
    return status, note
