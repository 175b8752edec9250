"""A checkout of Megatron-LM: recognising one, and importing Megatron from it.

Imports neither torch nor Megatron, so that a checkout is looked at before anything of it runs.
"""

import argparse
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from . import compat
from .errors import NodeError

FLAG = "--megatron-path"
SCRIPT = "pretrain_gpt.py"
_PACKAGE_INFO = Path("megatron", "core", "package_info.py")


@dataclass(frozen=True)
class Checkout:
    """A folder with Megatron-LM in it.

    Attributes:
        path: absolute.
        version: of its ``megatron.core``, read from its text.
    """

    path: Path
    version: str

    @property
    def script(self) -> Path:
        """Its ``pretrain_gpt.py``."""
        return self.path / SCRIPT


def add_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--megatron-path``; an ``extra_args_provider`` of Megatron's."""
    parser.add_argument(
        FLAG,
        metavar="DIR",
        help="A Megatron-LM checkout: import Megatron from there, and take the data and loss "
        f"functions of its {SCRIPT} instead of this package's.",
    )
    return parser


def find_checkout(folder: str | Path) -> Checkout:
    """Recognises a checkout of a supported release.

    Raises:
        NodeError: there is none, or it is of another release.
    """
    path = Path(folder).absolute()
    for needed in (_PACKAGE_INFO, Path(SCRIPT), Path("megatron", "training")):
        if not (path / needed).exists():
            what = (
                "no such folder" if not path.is_dir() else f"no Megatron-LM checkout: no {needed}"
            )
            raise NodeError(
                f"{FLAG} {folder}: {what}; name the folder that holds {SCRIPT} and megatron/"
            )
    version = _read_version(path / _PACKAGE_INFO)
    if not compat.is_supported(version):
        raise NodeError(
            f"{FLAG} {folder}: Megatron-LM {version}; this release supports "
            f"{compat.SUPPORTED}.x: check out {compat.SUPPORTED_BRANCH} there"
        )
    return Checkout(path, version)


def _read_version(package_info: Path) -> str:
    """Reads the version out of the text: importing it would import all of ``megatron.core``."""
    text = package_info.read_text()
    parts = [re.search(rf"^{name} = (.+)$", text, re.MULTILINE) for name in _VERSION_PARTS]
    found = [part.group(1).strip("'\" ") if part else "?" for part in parts]
    return ".".join(found[:3]) + found[3]


_VERSION_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


def import_from(checkout: Checkout) -> None:
    """Puts the checkout before every other place that Megatron could be imported from.

    Raises:
        NodeError: this process has imported another Megatron already.
    """
    check_imported(checkout)
    # Where it stands already, it may stand behind another one.
    sys.path[:] = [str(checkout.path), *(p for p in sys.path if p != str(checkout.path))]
    importlib.invalidate_caches()


def check_imported(checkout: Checkout) -> None:
    """Checks that what was imported of Megatron, if anything, is the checkout's.

    Raises:
        NodeError: it is not.
    """
    for name in ("megatron.core", "megatron.training"):
        module = sys.modules.get(name)
        if module is None or not module.__file__:
            continue
        found = Path(module.__file__).absolute().parents[2]
        if not _is_same(found, checkout.path):
            raise NodeError(
                f"{FLAG} {checkout.path}: this process imports Megatron from {found}; start it as "
                f"torchrun .. -m megatron_longseq.pretrain_gpt {FLAG} {checkout.path} .., and "
                "uninstall a megatron-core that was installed with pip install -e"
            )


def _is_same(one: Path, other: Path) -> bool:
    return one == other or one.resolve() == other.resolve()


def import_script(checkout: Checkout) -> ModuleType:
    """Imports the checkout's ``pretrain_gpt.py``; Megatron must come from there already.

    Raises:
        NodeError: another Megatron is imported, or the script lacks what is needed of it.
    """
    # A forked rank may have got its launcher's path; the script imports what stands beside it.
    import_from(checkout)
    script = importlib.import_module(Path(SCRIPT).stem)
    if not script.__file__ or not _is_same(Path(script.__file__), checkout.script):
        raise NodeError(
            f"{FLAG} {checkout.path}: {SCRIPT} was imported from {script.__file__}; "
            "remove that folder from PYTHONPATH"
        )
    missing = [name for name in compat.SCRIPT_FUNCTIONS if not hasattr(script, name)]
    if missing:
        raise NodeError(
            f"{FLAG} {checkout.path}: its {SCRIPT} defines no {' and no '.join(missing)}, "
            f"which that of Megatron-LM {compat.SUPPORTED}.x does; restore these names, or leave "
            f"{FLAG} out"
        )
    return script
