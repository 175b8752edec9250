"""Asks :mod:`.probe` in a child process, and outlives whatever happens to it."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

# One import: far above what torch or Megatron take on a cold network file system.
STEP_SECONDS = 120.0
# From the last answer to the end of the process.
ENDING_SECONDS = 10.0


def ask(steps: Sequence[str], step_seconds: float = STEP_SECONDS) -> dict[str, dict[str, Any]]:
    """Takes the steps in order; ``{step: {"facts": ..}}`` or ``{step: {"error": first line}}``.

    A child that dies or hangs is named as the error of the step it was at, and a new one takes the
    steps that are left.
    """
    answers: dict[str, dict[str, Any]] = {}
    left = list(steps)
    while left:
        answers |= _ask_one_child(left, step_seconds)
        left = [step for step in steps if step not in answers]
    return answers


def _ask_one_child(steps: Sequence[str], step_seconds: float) -> dict[str, dict[str, Any]]:
    """Answers up to and including the step that ended the child; at least one."""
    reader, writer = os.pipe()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # Counts devices through NVML: a plain count would initialise CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONFAULTHANDLER": "0",
    }
    answers: dict[str, dict[str, Any]] = {}
    current = steps[0]
    with tempfile.TemporaryFile() as output, open(reader, "rb", buffering=0) as channel:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.probe", str(writer), *steps],
            pass_fds=[writer],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        os.close(writer)
        buffered = b""
        try:
            while True:
                line, buffered = _next_line(channel, buffered, time.monotonic() + step_seconds)
                if line is None:
                    break
                message = json.loads(line)
                if "begin" in message:
                    current = message["begin"]
                else:
                    answers[message.pop("end")] = message
            code = child.wait(timeout=ENDING_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            answers.setdefault(current, {"error": f"did not finish within {step_seconds:g} s"})
        finally:
            child.kill()  # does nothing to one that has ended
            child.wait()
        if current not in answers:
            answers[current] = {"error": _how_it_ended(code, output)}
    return answers


def _next_line(channel: IO[bytes], buffered: bytes, deadline: float) -> tuple[bytes | None, bytes]:
    """(the next line, or None at the end of file; what was read beyond it)."""
    while b"\n" not in buffered:
        ready, _, _ = select.select([channel], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError
        part = channel.read(1 << 16)
        if not part:
            return None, b""
        buffered += part
    line, _, rest = buffered.partition(b"\n")
    return line, rest


def _how_it_ended(code: int, output: IO[bytes]) -> str:
    """The last line the child printed, and its signal or exit status."""
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"the interpreter ended ({how})" + (f": {lines[-1].strip()}" if lines else "")
