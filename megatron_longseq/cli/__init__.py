"""``longseq``: the command line of this package.

Each subcommand is a module with ``add_parser(subparsers)``, which registers a function
``run(arguments) -> int`` (an exit status). A user's error ends in one line and status 2.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..errors import UserError

COMMANDS = ("train", "generate", "prepare_data", "verify", "demo", "doctor", "patch")
USER_ERROR_EXIT_CODE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="longseq",
        description="Training Transformers on very long sequences with Megatron-LM.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else list(argv)
    # Only the command asked for is imported: the doctor must come up where others cannot.
    asked = [name for name in COMMANDS if words[:1] == [name.replace("_", "-")]]
    for name in asked or COMMANDS:
        importlib.import_module(f".{name}", __package__).add_parser(subparsers)
    arguments = parser.parse_args(words)
    try:
        return arguments.run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
