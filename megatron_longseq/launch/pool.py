"""A pool of forked ranks: ``RankPool().run(function, world_size=4)``.

The pool starts one parent process (see :mod:`megatron_longseq.launch.zygote`) that imports torch,
and Megatron if asked, exactly once. Every run forks fresh ranks from it: a four-rank case starts
in about a second, and no state survives from one run to the next.
"""

import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from ..errors import UserError
from .job import INSIDE_RANK, Job, RankError, RankStatus, receive_message, send_message

# Frames of these files mean that a rank is waiting for others, not that it hangs by itself.
_WAITING = re.compile(r"torch/distributed/|megatron_longseq/communication/")
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
LOG_TAIL_LINES = 15

# One thread per library pool in the parent: a fork must find no thread but the main one.
_SINGLE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# glibc gives a large freed block back to the kernel at once, and the next one of that size is
# paged in zero by zero again: half the time of a large softmax. Keep what was freed instead.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


class RankFailure(RuntimeError):
    """A rank failed, died or hung; the message names it and shows the end of what it printed.

    Attributes:
        rank: the rank that ended first or, if all hang, the one that waits for nobody.
        reason: ``"exception"``, ``"signal"``, ``"exit"`` or ``"timeout"``.
        details: the rank's traceback or stacks.
    """

    def __init__(self, rank: int, reason: str, message: str, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason
        self.details = details


class RankPool:
    """Runs functions on forked ranks.

    Args:
        preload: ``"module:function"`` called once in the parent process before any fork, to
            import what the ranks need. It must start no thread and no process group.

    Use as a context manager, or call :meth:`close`. The parent process starts with the first run,
    and anew after it has died.
    """

    def __init__(self, preload: str | None = None) -> None:
        self._preload = preload
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> None:
        """Starts the parent process now and waits until it has imported everything."""
        if self._process is not None and self._process.poll() is None:
            return
        if os.environ.get(INSIDE_RANK):
            raise RuntimeError(
                "a rank cannot make a pool of ranks; in a script, make the pool below "
                'if __name__ == "__main__":'
            )
        ours, theirs = socket.socketpair()
        environment = (
            os.environ
            | _SINGLE_THREAD
            | {name: os.environ.get(name, value) for name, value in _KEEP_FREED_MEMORY.items()}
        )
        command = [sys.executable, "-m", __package__ + ".zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command + ([self._preload] if self._preload else []),
            pass_fds=[theirs.fileno()],
            env=environment | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        theirs.close()
        self._connection = ours
        try:
            answer = receive_message(ours)
        except EOFError:
            answer = f"it ended with exit status {self._process.wait()}"
        if answer != "ready":
            self.close()
            raise RuntimeError(f"the parent process of the ranks did not start:\n{answer}")

    def close(self) -> None:
        """Ends the parent process and with it every rank."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def run(
        self,
        function: Callable[..., Any],
        *,
        world_size: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        backend: str | None = None,
        timeout_seconds: float = 60.0,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        foreground: Sequence[int] = (),
        log_directory: Path | None = None,
    ) -> list[Any]:
        """Calls ``function(*args, **kwargs)`` on every rank; returns the results by rank.

        Args:
            function: a module-level function; found by its module's name in the ranks.
            backend: initialise the default process group with this backend first.
            timeout_seconds: for the whole run; the ranks that have not ended by then are killed.
            threads: PyTorch threads of each rank.
            environment: further environment variables of the ranks. The usual ones of torchrun
                (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ..) are set.
            foreground: ranks that print to the terminal; the others print to log files.
            log_directory: keep the ranks' logs here instead of in a temporary directory.

        Raises:
            UserError: a rank raised it.
            RankFailure: a rank raised anything else, died, or the time was over.
        """
        if world_size < 1:
            raise UserError(f"{world_size} ranks: there must be at least one")
        self.start()
        assert self._connection is not None
        directory = Path(log_directory or tempfile.mkdtemp(prefix="longseq-ranks-"))
        directory.mkdir(parents=True, exist_ok=True)
        job = Job(
            call=pickle.dumps((function, tuple(args), dict(kwargs or {}))),
            module=function.__module__,
            preparation=_preparation(),
            world_size=world_size,
            directory=directory,
            timeout_seconds=timeout_seconds,
            backend=backend,
            threads=threads,
            environment=dict(environment or {}),
            foreground=tuple(foreground),
        )
        try:
            send_message(self._connection, job)
            try:
                answer = receive_message(self._connection)
            except EOFError:
                code = self._process.wait() if self._process else None
                self.close()
                raise RankFailure(
                    -1,
                    "signal" if code and code < 0 else "exit",
                    f"the parent process of the ranks died (exit status {code}), and all "
                    f"{world_size} ranks with it; out of memory?",
                ) from None
            except BaseException:
                # Ctrl-C: end the ranks now; the next run starts a new parent.
                self.close()
                raise
            if isinstance(answer, str):
                self.close()
                raise RuntimeError(answer)
            raise_first_failure(job, answer)
            return [pickle.loads(job.result_path(r).read_bytes()) for r in range(world_size)]
        finally:
            if log_directory is None:
                shutil.rmtree(directory, ignore_errors=True)


def raise_first_failure(job: Job, statuses: list[RankStatus]) -> None:
    """Raises for the rank that failed first; returns if none did."""
    failed = sorted(
        (s for s in statuses if s.exit_code != 0 or not job.result_path(s.rank).exists()),
        key=lambda s: s.order,
    )
    if not failed:
        return
    own = [status for status in failed if not status.killed]
    if not own:
        raise _hang(job, failed)
    status = own[0]
    ended = sorted(s.rank for s in failed if s.killed)
    others = f"; ended with it: {_rank_list(ended)}" if ended else ""
    error_path = job.error_path(status.rank)
    if error_path.exists():
        error: RankError = pickle.loads(error_path.read_bytes())
        if error.is_user_error:
            raise UserError(error.message)
        raise RankFailure(
            status.rank,
            "exception" if error.type_name != "SystemExit" else "exit",
            f"rank {status.rank} of {job.world_size} raised {error.type_name}: "
            f"{error.message}{others}{_silent_ranks(job, error, failed)}\n{error.traceback}"
            f"{_log_tail(job, status.rank)}",
            error.traceback,
        )
    if status.exit_code < 0:
        what, reason = f"was killed by signal {-status.exit_code}", "signal"
    else:
        what, reason = f"ended with exit status {status.exit_code}", "exit"
    raise RankFailure(
        status.rank,
        reason,
        f"rank {status.rank} of {job.world_size} {what}{others}{_log_tail(job, status.rank)}",
    )


def _silent_ranks(job: Job, error: RankError, failed: list[RankStatus]) -> str:
    """After a wait that timed out: what the ranks did that were alive, and so were waited for."""
    if not _TIMED_OUT.search(error.message):
        return ""
    lines = []
    for status in failed:
        if status.killed:
            frames = _innermost_frames(job, status.rank)
            where = frames[0] if frames else "it does not answer: stopped?"
            lines.append(f"\n  rank {status.rank} did not take part: {where}")
    return "".join(lines)


def _hang(job: Job, statuses: list[RankStatus]) -> RankFailure:
    """Names the ranks that hang by themselves before those that only wait for others."""
    stacks = {s.rank: _innermost_frames(job, s.rank) for s in statuses}
    waiting = {r for r, frames in stacks.items() if any(_WAITING.search(f) for f in frames)}
    culprits = sorted(set(stacks) - waiting) or sorted(stacks)
    lines = [
        f"{_rank_list(culprits)} of {job.world_size} did not end within {job.timeout_seconds:g} s"
    ]
    for rank in culprits + sorted(waiting - set(culprits)):
        where = stacks[rank][0] if stacks[rank] else "no Python stack"
        role = "waits for others" if rank in waiting else "hangs"
        lines.append(f"  rank {rank} {role}: {where}")
    first = culprits[0]
    details = job.stack_path(first).read_text() if job.stack_path(first).exists() else ""
    return RankFailure(first, "timeout", "\n".join(lines) + _log_tail(job, first), details)


def _innermost_frames(job: Job, rank: int, depth: int = 6) -> list[str]:
    """The innermost Python frames of the rank's main thread, innermost first."""
    path = job.stack_path(rank)
    text = path.read_text() if path.exists() else ""
    # faulthandler writes the thread that got the signal last, marked "Current thread".
    current = text.split("Current thread", 1)[-1]
    frames = [line.strip() for line in current.splitlines() if line.strip().startswith("File ")]
    return frames[:depth]


def _log_tail(job: Job, rank: int) -> str:
    path = job.log_path(rank)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if not lines:
        return ""
    return "\n".join([f"\nlast lines printed by rank {rank}:", *lines[-LOG_TAIL_LINES:]])


def _rank_list(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(str(rank) for rank in ranks)}"


def _preparation() -> dict[str, Any]:
    """How the ranks find the caller's modules, ``__main__`` included."""
    data = spawn.get_preparation_data("rank")
    # Neither concerns a rank: the key is for multiprocessing's own connections, and a fork has
    # its start method already.
    for key in ("authkey", "start_method", "log_to_stderr", "log_level"):
        data.pop(key, None)
    return data
