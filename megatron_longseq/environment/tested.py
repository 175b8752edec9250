"""What is tested with what, in one table that a test compares with constraints.txt and setup.py.

A version here is one that the tests ran with. ``None`` means that nothing here has ever been run
with the package: the code that uses it was written from its documentation.
"""

from typing import NamedTuple

PYTHON = (3, 12)

# Lowest driver for an application built with this major CUDA release: NVIDIA's CUDA compatibility
# guide, "Minor Version Compatibility", table 1.
MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}

# Lowest compute capability of PyTorch's and flash-attn's flash kernels, and of bf16 in hardware.
MINIMUM_CAPABILITY = (8, 0)


class Tested(NamedTuple):
    """A distribution: the range that should work, the version pinned, and whether tests use it."""

    supported: str
    version: str | None
    used: bool = True


TESTED: dict[str, Tested] = {
    "torch": Tested(">=2.11", "2.13.0"),
    "megatron-core": Tested(">=0.19,<0.20", "0.19.2"),
    "transformer-engine": Tested(">=2.9,<3", None),
    "flash-attn": Tested(">=2.7,<3", None),
    "flash-linear-attention": Tested(">=0.4", "0.6.0", used=False),
    "triton": Tested("", "3.7.1"),
    "apex": Tested("", None),
    "nvidia-nccl-cu13": Tested("", "2.29.7", used=False),
    "numpy": Tested("", "2.5.5"),
    "einops": Tested(">=0.8", "0.8.2"),
    "pydantic": Tested(">=2", "2.14.4"),
    "pyyaml": Tested("", "6.0.4"),
    "regex": Tested("", "2026.11.19"),
    "six": Tested("", "1.17.0"),
    "psutil": Tested("", "7.2.2"),
    "tensorboard": Tested("", "2.21.0"),
    "packaging": Tested(">=24.2", "26.4"),
}


def in_range(version: str, supported: str) -> bool:
    """Says whether ``version`` lies in a range such as ``">=0.19,<0.20"``; numbers only.

    Written without the package ``packaging``, which may be what is missing. A pre-release or local
    suffix is ignored: ``2.13.0+cu130`` counts as 2.13.0.
    """
    found = numbers(version)
    for condition in filter(None, supported.split(",")):
        operator = condition.rstrip("0123456789.")
        bound = numbers(condition[len(operator) :])
        padded = found + (0,) * (len(bound) - len(found))
        if operator == ">=" and not padded >= bound:
            return False
        if operator == "<" and not padded[: len(bound)] < bound:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``(2, 7, 4)`` of ``2.7.4.post1``."""
    parts: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    return tuple(parts)
