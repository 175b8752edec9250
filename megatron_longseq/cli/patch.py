"""``longseq patch --megatron-path DIR {check,apply,revert}``: the two lines, put in and taken out.

Works on the text, not through git or patch(1): neither needs to be there, a second run changes
nothing, and what was edited by hand elsewhere in the file stays.
"""

import argparse
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Literal

from .. import compat
from ..checkout import FLAG, SCRIPT, Checkout, find_checkout
from ..errors import UserError
from ..hook import LINES

ANCHOR = b'if __name__ == "__main__":'
State = Literal["applied", "not applied"]
NOT_APPLIED_EXIT_CODE = 1


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "patch",
        help="give a Megatron-LM checkout's pretrain_gpt.py our flags",
        description=f"Adds two lines to a Megatron-LM checkout's {SCRIPT}, or takes them out "
        "again. check exits with 0 if they are there, 1 if they can be added, 2 if not.",
    )
    parser.add_argument(FLAG, required=True, metavar="DIR", help="the checkout")
    parser.add_argument(
        "--edited",
        action="store_true",
        help=f"accept a {SCRIPT} that was edited, or is none of those the patch was tested with",
    )
    parser.add_argument("action", choices=("check", "apply", "revert"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Does it; returns 0, or 1 for a check that finds the lines missing."""
    checkout = find_checkout(arguments.megatron_path)
    state, line = state_of(checkout.script, edited=arguments.edited)
    where = f"{checkout.script} (Megatron-LM {checkout.version})"
    if arguments.action == "check":
        print(f"{where}: {state}, {'at' if state == 'applied' else 'would be at'} line {line}")
        return 0 if state == "applied" else NOT_APPLIED_EXIT_CODE
    wanted: State = "applied" if arguments.action == "apply" else "not applied"
    if state == wanted:
        print(f"{where}: {state}, nothing to do")
        return 0
    change(checkout, wanted)
    print(f"{where}: {'two lines added at' if wanted == 'applied' else 'removed from'} line {line}")
    return 0


def state_of(script: Path, *, edited: bool = False) -> tuple[State, int]:
    """Whether the two lines are there, and at which line they are or would be.

    Args:
        edited: accept a file that is not one of the releases' own.

    Raises:
        UserError: the place for the lines is not clear, or the file is not as released.
    """
    text = script.read_bytes()
    lines = text.splitlines(keepends=True)
    anchors = [i for i, line in enumerate(lines) if line.rstrip() == ANCHOR]
    if len(anchors) != 1:
        raise UserError(
            f"{script}: {len(anchors) or 'no'} lines {ANCHOR.decode()}; the two lines go above the "
            f"only one: add them by hand: {' and '.join(LINES)}"
        )
    anchor = anchors[0]
    ours = [i for i, line in enumerate(lines) if b"megatron_longseq" in line]
    first = anchor - len(LINES)
    above = [line.rstrip().decode(errors="replace") for line in lines[max(first, 0) : anchor]]
    if above == list(LINES) and ours == [first]:
        state: State = "applied"
        bare = b"".join(lines[:first] + lines[anchor:])
    elif ours:
        shown = ", ".join(str(i + 1) for i in ours)
        raise UserError(
            f"{script}: megatron_longseq is used otherwise than by this patch, in line {shown}; "
            "take that out by hand, then apply the patch"
        )
    else:
        state, bare, first = "not applied", text, anchor
    if not edited and hashlib.sha256(bare).hexdigest() not in compat.SCRIPT_SHA256:
        raise UserError(
            f"{script}: was edited, or belongs to a release that the patch was not tested with; "
            f"the two lines go to line {first + 1}, and nothing else changes: add --edited "
            "to accept that"
        )
    return state, first + 1


def change(checkout: Checkout, wanted: State) -> None:
    """Puts the two lines in, or takes them out; the state must be the other one."""
    lines = checkout.script.read_bytes().splitlines(keepends=True)
    anchor = next(i for i, line in enumerate(lines) if line.rstrip() == ANCHOR)
    ending = lines[anchor][len(ANCHOR) :]
    if wanted == "applied":
        lines[anchor:anchor] = [line.encode() + ending for line in LINES]
    else:
        del lines[anchor - len(LINES) : anchor]
    write_atomically(checkout.script, b"".join(lines))


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file's content in one step, keeping its mode; a link stays a link.

    Raises:
        UserError: it cannot be written.
    """
    target = path.resolve()
    mode = stat.S_IMODE(target.stat().st_mode)
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error}") from error
