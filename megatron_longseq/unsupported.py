"""Options of Megatron that a method does not work with, as data.

Config checks and the flag table both read such entries, so that a command line and a config built
by hand are refused alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import UserError


@dataclass(frozen=True)
class Unsupported:
    """An option that a method does not work with.

    Attributes:
        name: in Megatron's arguments, and in its config where it has it.
        flag: as the user writes it.
        allowed: what it works with.
        reason: why, and what to do instead.
        refuses: which values are refused, where it is not all but the allowed one.
        config_only: no flag of Megatron's command line sets it.
    """

    name: str
    flag: str
    allowed: Any
    reason: str
    refuses: Callable[[Any], bool] | None = None
    config_only: bool = False

    def rejects(self, value: Any) -> bool:
        """Whether the method refuses this value."""
        if self.refuses is not None:
            return self.refuses(value)
        return value not in (self.allowed, None)


def unsupported(name: str, reason: str, allowed: Any = False, **more: Any) -> Unsupported:
    """An entry whose flag is the name with dashes, unless ``flag`` says otherwise."""
    flag = more.pop("flag", "--" + name.replace("_", "-"))
    return Unsupported(name, flag, allowed, reason, **more)


def check_unsupported(config: Any, entries: tuple[Unsupported, ...], method: str) -> None:
    """Checks a config, or arguments, against a method's entries.

    Raises:
        UserError: naming flag, value, method and what to do.
    """
    for entry in entries:
        value = getattr(config, entry.name, None)
        if entry.rejects(value):
            raise UserError(f"{entry.flag} {value}: not with {method}: {entry.reason}")
