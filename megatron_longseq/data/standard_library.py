"""Python's standard library as the corpus that is on every machine."""

import os
import sys
import sysconfig
from pathlib import Path

from megatron_longseq.data.documents import Input, Package
from megatron_longseq.errors import UserError

_NOT_LIBRARY = frozenset(
    # Installed packages, tests and build files: they differ from machine to machine.
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload", "__pycache__")
)
_NOT_MODULES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def standard_library(folder: Path | None = None) -> Input:
    """Returns the standard library of the running Python: megabytes of code on every machine.

    A package is one document, its files one after the other in the order of their paths, so that
    documents of hundreds of kilobytes exist; a module that is a single file is a document.

    Args:
        folder: Where the library is; the running Python's by default.

    Raises:
        UserError: There is no source code in it (some systems pack it in an archive).
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"standard library of Python {version}"
    sources = []
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(
            f"no INPUT, and the {name} can't be read at {folder}: {error.strerror}; name an INPUT"
        ) from error
    for entry in entries:
        path = folder / entry
        if entry.endswith(".py") and path.is_file():
            paths = [] if entry.startswith(_NOT_MODULES) else [path]
        elif path.is_dir() and entry.isidentifier() and entry not in _NOT_LIBRARY:
            paths = _python_files(path)
        else:
            continue
        size = sum(found.stat().st_size for found in paths)
        if size > 0:
            sources.append(Package(entry, paths, size))
    if not sources:
        raise UserError(f"no INPUT, and the {name} at {folder} holds no source code; name an INPUT")
    return Input(name, sources)


def _python_files(package: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(package):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(package).parts)
