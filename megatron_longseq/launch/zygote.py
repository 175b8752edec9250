"""The parent of all ranks: imports once, then forks a set of ranks for each job.

Importing torch and Megatron takes 10 to 20 s a process on a small machine, forking takes
milliseconds. A fork is safe only while the parent has no threads, no process group and no OpenMP
team: so this process computes nothing, and it refuses to fork once it has a second thread. The
rendezvous store, which does need a thread, lives in one more forked process.
"""

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from .job import Job, RankStatus, receive_message, send_message
from .rank import run_rank

# How long ranks may take to end by themselves after one of them has failed: enough to notice a
# lost peer and report it, short enough that nobody waits.
GRACE_SECONDS = 3.0
# How long a rank has to write its stacks before it is killed.
STACK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """``python -m megatron_longseq.launch.zygote FD [MODULE:FUNCTION]``."""
    connection = socket.socket(fileno=int(arguments[0]))
    # Ctrl-C reaches the whole foreground group; the pool decides what ends, through `connection`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch.distributed  # noqa: F401

        if len(arguments) > 1:
            module, function = arguments[1].split(":")
            getattr(importlib.import_module(module), function)()
        send_message(connection, "ready")
    except BaseException as error:
        import traceback

        send_message(connection, traceback.format_exc())
        raise SystemExit(1) from error
    while True:
        try:
            job = receive_message(connection)
        except EOFError:
            return
        send_message(connection, run_job(job, connection))


def run_job(job: Job, connection: socket.socket) -> list[RankStatus] | str:
    """Forks the ranks of one job and waits for their end; a string says why it could not."""
    _import_for_job(job)
    threads = os.listdir("/proc/self/task") if Path("/proc/self/task").is_dir() else ["self"]
    if len(threads) > 1:
        return (
            f"the parent process has {len(threads)} threads and cannot fork safely; "
            "a module it imported starts threads at import"
        )
    store_pid, store_port = _fork_store()
    release_read, release_write = os.pipe()
    finished_read, finished_write = os.pipe()
    pids: dict[int, int] = {}
    parent = os.getpid()
    try:
        for rank in range(job.world_size):
            pid = os.fork()
            if pid == 0:
                _die_with_parent(parent)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.setpgid(0, 0)
                connection.close()
                os.close(release_write)
                os.close(finished_read)
                run_rank(job, rank, store_port, finished_write, release_read)
            pids[rank] = pid
        os.close(finished_write)
        os.close(release_read)
        return _watch(job, pids, finished_read, release_write, connection)
    finally:
        for fd in (finished_read, release_write):
            try:
                os.close(fd)
            except OSError:
                continue  # _watch has closed it already to let the ranks go
        os.kill(store_pid, signal.SIGKILL)
        os.waitpid(store_pid, 0)


def _watch(
    job: Job,
    pids: dict[int, int],
    finished_read: int,
    release_write: int,
    connection: socket.socket,
) -> list[RankStatus]:
    """Waits for every rank; after a failure, the time limit or a cancellation it ends the rest."""
    pidfds = {os.pidfd_open(pid): rank for rank, pid in pids.items()}
    statuses: list[RankStatus] = []
    finished = 0
    deadline = time.monotonic() + job.timeout_seconds
    timed_out = False
    killed: set[int] = set()
    released = False
    while pidfds:
        watched: list[Any] = [*pidfds, connection] + ([] if released else [finished_read])
        ready, _, _ = select.select(watched, [], [], max(0.0, deadline - time.monotonic()))
        if connection in ready:
            # The pool sends nothing while a job runs: it is gone, by Ctrl-C or by its own end.
            _kill(pids, pids)
            for rank in pidfds.values():
                os.waitpid(pids[rank], 0)
            os._exit(0)
        if not released and finished_read in ready:
            finished += len(os.read(finished_read, job.world_size))
            if finished == job.world_size:
                os.close(release_write)
                released = True
        for fd in [fd for fd in ready if fd in pidfds]:
            rank = pidfds.pop(fd)
            os.close(fd)
            _, wait_status = os.waitpid(pids[rank], 0)
            code = os.waitstatus_to_exitcode(wait_status)
            statuses.append(
                RankStatus(rank, len(statuses), code, rank in killed, rank in killed and timed_out)
            )
            # A rank that leaves by itself before it was let go has no result.
            if (code != 0 or not released) and not killed:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if pidfds and time.monotonic() >= deadline:
            # Out of time with nobody failed: the ranks hang. Otherwise the grace is over.
            timed_out = timed_out or not statuses
            _ask_for_stacks(pids, pidfds.values())
            killed |= set(pidfds.values())
            _kill(pids, pidfds.values())
            deadline = time.monotonic() + 60.0
    # Processes a rank has started (data loaders, checkpoint writers) are in its group.
    _kill(pids, pids)
    return statuses


def _ask_for_stacks(pids: dict[int, int], ranks) -> None:
    for rank in ranks:
        os.kill(pids[rank], signal.SIGUSR1)
    time.sleep(STACK_SECONDS)


def _kill(pids: dict[int, int], ranks) -> None:
    for rank in ranks:
        try:
            os.killpg(pids[rank], signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended, or has not made its group yet and ends with this process


def _fork_store() -> tuple[int, int]:
    """Forks the process that holds the rendezvous store on a free port of loopback."""
    read_fd, write_fd = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _die_with_parent(parent)
        os.close(read_fd)
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(write_fd, str(store.port).encode())
        os.close(write_fd)
        while True:
            signal.pause()
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        port = file.read()
    if not port:
        raise RuntimeError("the process that holds the rendezvous store ended at once")
    return pid, int(port)


def _import_for_job(job: Job) -> None:
    """Imports the function's module here, so that it is imported once and not in every rank."""
    for path in job.preparation.get("sys_path", []):
        if path not in sys.path:
            sys.path.append(path)
    if job.module != "__main__":
        try:
            importlib.import_module(job.module)
        except ImportError:
            return  # the ranks try again and report it with their traceback


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
