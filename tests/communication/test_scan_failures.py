"""A scan that cannot work says why, on every rank, and none waits for ever."""

import time

import pytest
import torch
import torch.distributed as dist
from chains import own, random_chain, random_pair, random_state, wait_until
from grids import refused

from megatron_longseq.communication import slots as slots_module
from megatron_longseq.communication.scan import Scan
from megatron_longseq.communication.scan.job import Job
from megatron_longseq.communication.scan.local import LocalScan
from megatron_longseq.communication.scan.side_stream import SideStream
from megatron_longseq.errors import UserError


def silent_peer(schedule, carried_by):
    """Rank 1 starts no scan; returns what the others' errors say, and after how many seconds."""
    slots_module.SETTLE_SECONDS = 0.5
    pairs, chain = random_chain("diagonal", "zigzag", 3)
    scan = Scan(
        dist.group.WORLD,
        schedule=schedule,
        timeout_seconds=1.0,
        check_agreement=False,
        carried_by=carried_by,
    )
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2.5)
        return None, 0.0, True
    started = time.monotonic()
    error = refused(scan.start(own(chain, pairs)).wait)
    seconds = time.monotonic() - started
    return error, seconds, wait_until(lambda: scan.buffers.leased_bytes == 0)


@pytest.mark.parametrize(
    "schedule, carried_by, moment",
    [
        ("ring", "thread", "receiving from rank 1 at step 2 of 4"),
        ("ring", "caller", "receiving from rank 1 at step 2 of 4"),
        ("log_scan", "thread", "receiving from rank 1 at step 1 of 3"),
        ("all_gather", "thread", "gathering the pairs of all ranks at step 1 of 1"),
    ],
)
def test_a_silent_peer_is_named_with_stream_group_and_step(ranks, schedule, carried_by, moment):
    args = (schedule, carried_by)
    results = ranks.run(silent_peer, world_size=3, args=args, backend="gloo")
    where = f"scan of states: {moment}, on rank 2 in the group of ranks [0, 1, 2]"
    assert results[2][0].startswith(f"CommunicationTimeout: {where}"), results
    assert "within 1 s" in results[2][0]
    assert all(seconds < 2.4 for _, seconds, _ in results), results
    assert all(returned for *_, returned in results), "nothing stays on lease"


def gone_peer(carried_by):
    """Rank 1 leaves after the first scan."""
    slots_module.SETTLE_SECONDS = 0.5
    pairs, chain = random_chain("matrix", "contiguous", 3)
    options = dict(layout="contiguous", schedule="ring", check_agreement=False)
    scan = Scan(dist.group.WORLD, timeout_seconds=30, carried_by=carried_by, **options)
    scan.start(own(chain, pairs)).wait()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(1)
        return None, 0.0
    started = time.monotonic()
    error = refused(scan.start(own(chain, pairs)).wait)
    return error, time.monotonic() - started


@pytest.mark.parametrize("carried_by", ["thread", "caller"])
def test_a_peer_that_has_ended_is_reported_at_once(ranks, carried_by):
    results = ranks.run(gone_peer, world_size=3, args=(carried_by,), backend="gloo")
    error, seconds = results[2]
    assert "CommunicationError: scan of states: receiving from rank 1 at step 2 of 2" in error
    assert seconds < 10


def disagreements():
    """The errors of starts that do not fit, by what is wrong; rank 1 is the odd one."""
    odd, size = dist.get_rank() == 1, dist.get_world_size()
    texts = {}
    for schedule in ("ring", "all_gather", "log_scan", "all_scan"):
        scan = Scan(dist.group.WORLD, schedule=schedule, timeout_seconds=10)
        pairs, chain = random_chain("diagonal", "zigzag", size)
        mine = own(chain, pairs)
        longer = [type(p)(p.transition, torch.zeros(2, 3, 4, 6).double()) for p in mine]
        matrices = own(chain, random_chain("matrix", "zigzag", size)[0])
        single = [type(p)(p.transition.float(), p.state.float()) for p in mine]
        for what, wrong, options in (
            ("width", longer, {}),
            ("kind", matrices, {}),
            ("dtype", single, {}),
            ("pairs", mine[:1], {}),
            ("direction", mine, {"reverse": odd}),
            ("total", mine, {"total": "everywhere" if odd else "none"}),
        ):
            texts[schedule, what] = refused(scan.start, wrong if odd else mine, **options)
        texts[schedule, "all wrong"] = refused(scan.start, mine[:1])
        # Read on rank 0 alone; what the others pass does not matter.
        short = torch.zeros(2, 3, 4, 4).double()
        texts[schedule, "initial"] = refused(scan.start, mine, initial_state=short)
        fits = random_state(3) if dist.get_rank() == 0 else short
        scan.start(mine, initial_state=fits).wait()
    return texts


def test_unequal_shards_raise_the_same_error_on_every_rank(ranks):
    results = ranks.run(disagreements, world_size=3, backend="gloo")
    expected = {
        "width": "state [2, 3, 4, 6], float64 on rank 1",
        "kind": "transition [2, 3, 4, 4]",
        "dtype": "float32 on rank 1",
        "pairs": "1 pairs: the zigzag layout has 2 per rank on rank 1",
        "direction": "reverse: False on ranks 0, 2, True on rank 1",
        "total": "total: none on ranks 0, 2, everywhere on rank 1",
        "all wrong": "1 pairs: the zigzag layout has 2 per rank",
        "initial": "initial_state [2, 3, 4, 4] in torch.float64: must be as the states",
    }
    for (schedule, what), text in results[0].items():
        assert text.startswith("UserError: ") and expected[what] in text, (schedule, what, text)
        for other in results[1:]:
            assert other[schedule, what] == text, "the same words everywhere"


def wrong_options():
    group = dist.group.WORLD
    pairs, chain = random_chain("scalar", "zigzag", dist.get_world_size())
    mine = own(chain, pairs)
    return [
        refused(Scan, group, schedule="tree"),
        refused(Scan, group, layout="striped"),
        refused(Scan, group, node_size=3),
        refused(Scan, group, schedule="two_level"),
        refused(Scan, group, node_size=2, across="all_gather"),
        refused(Scan, group, blocks=0),
        refused(Scan(group, blocks=5).start, mine),
        refused(Scan(group).start, mine, total="mine"),
        refused(Scan(group).start, [mine[0], random_pair("matrix", 1)]),
    ]


def test_options_that_cannot_work_are_refused_with_those_that_do(ranks):
    for texts in ranks.run(wrong_options, world_size=4, backend="gloo"):
        for text, expected in zip(
            texts,
            (
                "schedule 'tree': must be one of 'ring', 'all_gather', 'log_scan', 'all_scan', "
                "'two_level', 'auto'",
                "layout 'striped': must be one of 'zigzag', 'contiguous'",
                "node_size 3: must divide the 4 ranks of the group; nearest: [1, 2, 4]",
                "schedule 'two_level' needs node_size, the ranks per node",
                "across 'all_gather': must be one of 'ring', 'all_scan', 'log_scan'",
                "blocks 0: must be at least 1",
                "blocks 5: a state of this scan has at most 4",
                "total 'mine': must be one of 'none', 'owner', 'everywhere'",
                "the pairs of a rank differ",
            ),
            strict=True,
        ):
            assert text.startswith(f"UserError: {expected}"), text


class BrokenMailbox:
    """Loses what it has sent."""

    def wait_sent(self):
        raise RuntimeError("the peer has gone")

    def close(self):
        pass


def test_a_send_that_fails_after_the_result_is_raised_by_the_next_scan():
    scan = Scan(None, layout="contiguous")
    job = Job(
        LocalScan(),
        BrokenMailbox(),
        [random_pair("scalar", 0)],
        entering=None,
        swapped=False,
        holds_last=True,
        total="none",
        broadcast=None,
        side=SideStream(),
        late_errors=scan._late_errors,
    )
    job.complete()
    assert not job.result().states[0].any()
    with pytest.raises(RuntimeError, match="the peer has gone"):
        scan.start([random_pair("scalar", 0)])
    scan.start([random_pair("scalar", 0)]).wait()


def test_an_unknown_layout_is_a_user_error():
    with pytest.raises(UserError, match="layout"):
        Scan(None, layout="striped")
