"""The launcher: results by rank, and failures that name the rank within seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_longseq.errors import UserError
from megatron_longseq.launch import RankFailure


def sum_over_ranks(offset):
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads(), os.environ["LOCAL_RANK"]


def large_result(megabytes):
    return bytes(megabytes << 20)


def slow_peer():
    if dist.get_rank() == 1:
        time.sleep(0.5)
    tensor = torch.ones(4)
    if dist.get_rank() == 1:
        dist.send(tensor, 0)
    return True if dist.get_rank() else dist.recv(tensor, 1)


def fail_on(rank, how):
    if dist.get_rank() == rank:
        if how == "raise":
            print("about to fail")
            raise KeyError("the missing thing")
        if how == "user":
            raise UserError("--some-flag 3: must be even; try 2 or 4")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(7)
        if how == "hang":
            while True:
                time.sleep(0.01)
    dist.barrier()


def leave_state_behind():
    found = getattr(torch, "left_behind", None)
    torch.left_behind = dist.get_rank()
    return found


def start_grandchild(path):
    import subprocess

    process = subprocess.Popen(["sleep", "300"])
    with open(path, "w") as file:
        file.write(str(process.pid))
    while True:
        time.sleep(0.1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(ranks, world_size):
    results = ranks.run(sum_over_ranks, world_size=world_size, args=(1,), backend="gloo")
    total = world_size * (world_size + 1) / 2
    assert results == [(total, 1, str(rank)) for rank in range(world_size)]


def test_a_started_pool_runs_four_ranks_in_seconds(ranks):
    ranks.start()
    start = time.monotonic()
    ranks.run(sum_over_ranks, world_size=4, args=(0,), backend="gloo")
    assert time.monotonic() - start < 10  # about one second on an idle machine


def test_large_results_do_not_block(ranks):
    assert len(ranks.run(large_result, world_size=1, args=(32,))[0]) == 32 << 20


def test_a_rank_that_is_done_keeps_its_connections_until_all_are(ranks):
    assert ranks.run(slow_peer, world_size=3, backend="gloo")[1] is True


def test_no_state_survives_from_one_run_to_the_next(ranks):
    for _ in range(2):
        assert ranks.run(leave_state_behind, world_size=2, backend="gloo") == [None, None]


def test_an_exception_names_its_rank_and_shows_what_it_printed(ranks):
    with pytest.raises(RankFailure, match=r"rank 2 of 4 raised KeyError") as failure:
        ranks.run(fail_on, world_size=4, args=(2, "raise"), backend="gloo")
    assert failure.value.rank == 2
    assert "the missing thing" in str(failure.value) and "about to fail" in str(failure.value)


def test_a_user_error_keeps_its_message_and_nothing_else(ranks):
    with pytest.raises(UserError) as failure:
        ranks.run(fail_on, world_size=2, args=(1, "user"), backend="gloo")
    assert str(failure.value) == "--some-flag 3: must be even; try 2 or 4"


@pytest.mark.parametrize(
    ("how", "reason", "text"), [("kill", "signal", "signal 9"), ("exit", "exit", "exit status 7")]
)
def test_a_dead_rank_ends_the_others_within_seconds(ranks, how, reason, text):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=text) as failure:
        ranks.run(fail_on, world_size=3, args=(1, how), backend="gloo", timeout_seconds=60)
    assert (failure.value.rank, failure.value.reason) == (1, reason)
    assert time.monotonic() - start < 15


def test_a_hung_rank_is_told_from_those_that_wait_for_it(ranks):
    with pytest.raises(RankFailure, match=r"^rank 1 of 3 did not end within 4 s") as failure:
        ranks.run(fail_on, world_size=3, args=(1, "hang"), backend="gloo", timeout_seconds=4)
    assert failure.value.reason == "timeout"
    assert "rank 1 hangs" in str(failure.value) and "rank 0 waits" in str(failure.value)
    assert "in fail_on" in str(failure.value)


def test_the_pool_works_after_every_kind_of_failure(ranks):
    for how in ("raise", "kill"):
        with pytest.raises(RankFailure):
            ranks.run(fail_on, world_size=2, args=(0, how), backend="gloo")
        assert ranks.run(sum_over_ranks, world_size=2, args=(0,), backend="gloo")[0][0] == 1


def leave_without_a_result():
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


def test_a_rank_that_leaves_without_a_result_is_a_failure(ranks):
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 2 ended with exit status 0"):
        ranks.run(leave_without_a_result, world_size=2, backend="gloo")
    assert time.monotonic() - start < 15


def stop_silently():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def test_after_a_time_out_the_rank_that_was_waited_for_is_named(ranks):
    with pytest.raises(RankFailure, match="rank 1 did not take part: it does not answer"):
        ranks.run(stop_silently, world_size=2, backend="gloo")


def pool_in_a_rank():
    from megatron_longseq.launch import RankPool

    RankPool().start()


def test_a_rank_cannot_make_a_pool_of_its_own(ranks):
    with pytest.raises(RankFailure, match='if __name__ == "__main__"'):
        ranks.run(pool_in_a_rank, world_size=1)


def test_no_ranks_at_all_is_an_error(ranks):
    with pytest.raises(UserError, match="0 ranks"):
        ranks.run(pool_in_a_rank, world_size=0)


INTERRUPTED = """
import os, signal, sys, threading, time
from megatron_longseq.launch import RankPool

def wait(folder):
    open(os.path.join(folder, os.environ["RANK"] + "." + str(os.getpid())), "w").close()
    time.sleep(60)

if __name__ == "__main__":
    pool = RankPool()
    pool.start()
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    pool.run(wait, world_size=2, args=(sys.argv[1],))
"""


def test_ctrl_c_ends_every_rank_at_once_and_says_nothing_more(tmp_path):
    (tmp_path / "script.py").write_text(INTERRUPTED)
    (tmp_path / "pids").mkdir()
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "pids")],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode != 0 and time.monotonic() - start < 30
    assert "BrokenPipe" not in result.stderr and "zygote" not in result.stderr
    pids = [int(path.suffix[1:]) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived the interrupt"
        time.sleep(0.05)


def is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().split(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_processes_started_by_a_rank_end_with_it(ranks, tmp_path):
    path = tmp_path / "pid"
    with pytest.raises(RankFailure):
        ranks.run(start_grandchild, world_size=1, args=(str(path),), timeout_seconds=2)
    pid = int(path.read_text())
    deadline = time.monotonic() + 5
    while is_running(pid):  # a killed orphan may stay a zombie until somebody collects it
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.05)
