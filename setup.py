"""Packaging of megatron_longseq: what it needs, and the `longseq` command.

The ranges here say what the package works with; constraints.txt holds the exact versions that
the tests ran with.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """Returns ``__version__`` of the package without importing it, and so without torch."""
    text = (HERE / "megatron_longseq" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('megatron_longseq/__init__.py has no line __version__ = "..."')
    return match.group(1)


def read_readme() -> str:
    """Returns the README, or nothing in a tree that has none."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


RUNTIME = [
    "torch>=2.11",
    "megatron-core>=0.19,<0.20",
    "numpy",
    "packaging>=24.2",
    # The wheel of megatron-core does not declare these. Its code, or that of a Megatron-LM
    # checkout used beside it, imports them.
    "einops>=0.8",
    "psutil",
    "pydantic>=2",
    "pyyaml",
    "regex",
    "six",
    "tensorboard",
    # Reports of the command line: tables and figures.
    "matplotlib",
    "rich",
]

EXTRAS = {
    # Kernels for GPUs. Which build fits depends on the CUDA version of the machine, so
    # constraints.txt does not pin them; without them the same methods run on torch's kernels.
    "gpu": [
        "flash-attn>=2.7,<3",
        "flash-linear-attention>=0.4",
        "transformer-engine[core_cu13,pytorch]>=2.9,<3",
    ],
    # What the benchmarks compare with. `make setup-bench` installs it: DeepSpeed is built from
    # source, needs torch in the environment before that and DS_BUILD_OPS=0 to do without nvcc.
    "bench": [
        "deepspeed>=0.17",
        "flash-linear-attention>=0.4",
    ],
    "dev": [
        "hypothesis",
        "mypy",
        "pytest",
        "pytest-xdist",
        "ruff",
    ],
    "docs": [
        "mkdocs",
        "mkdocs-material",
    ],
}

setup(
    name="megatron_longseq",
    version=read_version(),
    description="Training Transformers on very long sequences with Megatron-LM",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_longseq*"]),
    package_data={"megatron_longseq": ["py.typed", "**/*.yaml", "**/*.json"]},
    install_requires=RUNTIME,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["longseq = megatron_longseq.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
