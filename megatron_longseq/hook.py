"""Two lines that give a user's own ``pretrain_gpt.py`` this package's flags.

Directly above ``if __name__ == "__main__":`` of the script::

    from megatron_longseq.hook import install
    install(globals())

They rebind two names, in that script alone: ``parse_and_validate_args`` also knows and checks
``--longseq-..``, and ``gpt_config_from_args`` makes a config with those options and this package's
layer spec. The rest of the script, its data and its loss stay as they are.

On GPUs the script starts as ever. On a CPU Megatron has to be imported under the CPU platform, and
the script imports it before it comes to these lines; so there it is started by this module, which
does that first and then runs the script::

    torchrun .. -m megatron_longseq.hook pretrain_gpt.py <flags>

Started so, a script runs with or without the two lines, and on GPUs as well.
"""

import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from . import checkout, compat
from .errors import NodeError, UserError
from .pretrain_gpt import USER_ERROR_EXIT_CODE, early_flags, prepare_process, should_print

LINES = ("from megatron_longseq.hook import install", "install(globals())")
_USAGE = "torchrun .. -m megatron_longseq.hook SCRIPT <flags>"


def install(namespace: MutableMapping[str, Any]) -> None:
    """Gives the script whose ``globals()`` these are the ``--longseq-..`` flags.

    Does nothing where the script is imported instead of run, and nothing the second time.
    A user's error, here or in the two functions later, is printed once and ends the process.
    """
    if namespace.get("__name__") != "__main__":
        return
    with _errors_end_the_process():
        check_script(namespace)
        parse, build = (namespace[name] for name in compat.SCRIPT_CALLS)
        if not isinstance(parse, _Hooked):
            namespace["parse_and_validate_args"] = _Hooked(_parse_and_validate, parse)
            namespace["gpt_config_from_args"] = _Hooked(_gpt_config, build)


def check_script(namespace: MutableMapping[str, Any]) -> None:
    """Checks that the two lines can take effect in this script and process.

    Raises:
        UserError: another Megatron release, or names that are missing.
        NodeError: no GPU, and Megatron was imported without the CPU platform.
    """
    from . import cpu_platform

    script = namespace.get("__file__", "this script")
    version = sys.modules["megatron.core"].__version__ if "megatron.core" in sys.modules else None
    if version is not None and not compat.is_supported(version):
        raise UserError(
            f"{script} runs Megatron-LM {version}; this release of megatron_longseq supports "
            f"{compat.SUPPORTED}.x: check out {compat.SUPPORTED_BRANCH}"
        )
    missing = [name for name in compat.SCRIPT_CALLS if not callable(namespace.get(name))]
    if missing:
        raise UserError(
            f"{script}: {' and '.join(missing)} must be defined above the two lines of "
            f"megatron_longseq, as in the {checkout.SCRIPT} of Megatron-LM {compat.SUPPORTED}.x "
            f"(found: Megatron-LM {version or 'not imported'}); import "
            f"{'it' if len(missing) == 1 else 'them'} there from megatron.training, or use "
            f"-m megatron_longseq.pretrain_gpt {checkout.FLAG} DIR"
        )
    device = early_flags(sys.argv[1:]).longseq_device
    if cpu_platform.should_use(device) and not cpu_platform.is_installed():
        why = "there is no GPU" if device == "auto" else f"--longseq-device {device}"
        raise NodeError(
            f"{why}, and {script} has imported Megatron without the CPU platform; "
            f"start it as torchrun .. -m megatron_longseq.hook {script} <flags>"
        )


class _Hooked:
    """A function of the script's, called through one of ours."""

    def __init__(self, ours: Callable, theirs: Callable) -> None:
        self.ours, self.theirs = ours, theirs
        functools.update_wrapper(self, theirs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _errors_end_the_process():
            return self.ours(self.theirs, *args, **kwargs)


def _parse_and_validate(
    parse: Callable, extra_args_provider: Callable | None = None, **options: Any
) -> Any:
    """The script's ``parse_and_validate_args``, with this package's flags and checks."""
    from . import checkpoint, sequence_padding
    from .arguments import extra_arguments
    from .lasp.requirements import check_own_batches

    if early_flags(sys.argv[1:]).megatron_path is not None:
        raise UserError(
            f"{checkout.FLAG}: this script runs on the Megatron beside it; leave the flag out, or "
            "start -m megatron_longseq.pretrain_gpt instead of the script"
        )
    result = compat.parse_and_validate(extra_arguments(extra_args_provider), parse, **options)
    if result.longseq_measure is not None:
        raise UserError(
            f"--longseq-measure {result.longseq_measure}: the steps of this script are its own and "
            "are not recorded; leave the flag out, or use -m megatron_longseq.pretrain_gpt "
            f"{checkout.FLAG} DIR"
        )
    check_own_batches(result, "this script")
    sequence_padding.check_own_batches(result, "this script")
    checkpoint.check_checkpoint(result)
    return result


def _gpt_config(
    build: Callable, args: Any, config: Any = None, model_config_cls: type | None = None
) -> Any:
    """The script's ``gpt_config_from_args``, with our options, layer spec and start-up lines."""
    from .config import LongSeqTransformerConfig
    from .layer_specs import longseq_layer_spec
    from .startup_report import print_report_hook

    model = compat.model_config(
        args,
        LongSeqTransformerConfig,
        longseq_layer_spec,
        build=build,
        config=config,
        model_config_class=model_config_cls,
    )
    model.pre_wrap_hooks.append(print_report_hook)
    return model


@contextlib.contextmanager
def _errors_end_the_process() -> Iterator[None]:
    """Ends the process on a user's error: the script would show a stack trace on every rank."""
    try:
        yield
    except UserError as error:
        if should_print(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None


def run_script(script: str, argv: Sequence[str]) -> None:
    """Runs a script of Megatron's as ``python SCRIPT <flags>`` does, the process prepared first.

    Args:
        script: its path. Its folder is the first place where Megatron is looked for.
        argv: its flags.

    Raises:
        UserError: there is no such script, or Megatron cannot run here.
    """
    if not os.path.isfile(script):
        raise NodeError(f"{script}: no such script; usage: {_USAGE}")
    sys.argv = [script, *argv]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    prepare_process(argv)
    runpy.run_path(script, run_name="__main__")


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m megatron_longseq.hook SCRIPT <flags>``; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    with _errors_end_the_process():
        if not words or words[0].startswith("-"):
            raise UserError(f"the first argument must be a script; usage: {_USAGE}")
        run_script(words[0], words[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
