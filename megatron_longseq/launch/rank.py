"""What one forked rank does: environment, output, the function, and how its end is reported."""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from multiprocessing import spawn

from ..errors import UserError
from .job import INSIDE_RANK, Job, RankError


def run_rank(job: Job, rank: int, store_port: int, finished_fd: int, release_fd: int) -> None:
    """Runs the job's function as ``rank`` and ends this process; never returns.

    A rank that is done says so through ``finished_fd`` and then waits on ``release_fd`` until all
    are: as long as it lives its connections stay open, so that no slower peer sees them break.
    """
    exit_code = 1
    try:
        _redirect_output(job, rank)
        # The stacks go to a file of their own: faulthandler needs an open descriptor, not a path.
        stack_file = open(job.stack_path(rank), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        os.environ.update(rank_environment(job, rank, store_port))
        result = _call(job)
        with open(job.result_path(rank), "wb") as file:
            pickle.dump(result, file)
        exit_code = 0
    except BaseException as error:
        exit_code = _record_error(job, rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if exit_code == 0:
            os.write(finished_fd, b".")
            os.read(release_fd, 1)
        # Not sys.exit: exit handlers inherited from the parent, or a process group that waits for
        # a dead peer, must not keep a finished rank alive.
        os._exit(exit_code)


def rank_environment(job: Job, rank: int, store_port: int) -> dict[str, str]:
    """The variables torchrun would set, on loopback, plus the job's own."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        # The store lives in a process of its own (see zygote.py): every rank is a client of it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(job.threads),
        **job.environment,
    }


def _call(job: Job):
    import torch

    torch.set_num_threads(job.threads)
    # A script that makes a pool outside of `if __name__ == "__main__":` is run again by the next
    # line, and would make pools without end.
    os.environ[INSIDE_RANK] = "1"
    spawn.prepare(job.preparation)
    function, args, kwargs = pickle.loads(job.call)
    if job.backend is None:
        return function(*args, **kwargs)
    torch.distributed.init_process_group(job.backend)
    return function(*args, **kwargs)


def _redirect_output(job: Job, rank: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if rank not in job.foreground:
        log = os.open(job.log_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _record_error(job: Job, rank: int, error: BaseException) -> int:
    if isinstance(error, SystemExit):
        code = error.code
        exit_code = code if isinstance(code, int) else (0 if code is None else 1)
        message = f"exit status {exit_code}" if isinstance(code, int | None) else str(code)
    else:
        exit_code, message = 1, str(error)
    # A rank that leaves by sys.exit(0) has no result to give; for the job that is a failure too.
    exit_code = exit_code or 1
    record = RankError(
        type_name=type(error).__name__,
        message=message,
        traceback=traceback.format_exc(),
        is_user_error=isinstance(error, UserError),
        exit_code=exit_code,
    )
    with open(job.error_path(rank), "wb") as file:
        pickle.dump(record, file)
    return exit_code
