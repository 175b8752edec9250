"""Claims about limited links, measured by what gloo gets through them."""

import os
import subprocess
import time

import pytest
import torch
from torch import distributed as dist

from megatron_longseq.errors import NodeError, UserError
from megatron_longseq.measurement import LimitedLinks, MeasuredTransport, links_available
from megatron_longseq.measurement.links import process_start_time, remove_leftovers

LIMIT = 20e6
INNER_LIMIT = 40e6
SIZE = 4_800_000
NODES = [[0, 1], [2, 3]]

ours = f"longseq-{os.getpid()}-"


def namespaces():
    return set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()


@pytest.fixture(scope="module")
def works():
    available, reason = links_available()
    if not available:
        pytest.skip(reason)


def transfer_between(links, cases):
    """Rates of this rank, in bytes per second: name -> best of three."""
    rank = int(os.environ["RANK"])
    os.environ.update(links.enter(rank))
    dist.init_process_group("gloo")
    x, rates = torch.ones(SIZE // 4), {}
    for name, pairs in cases.items():
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            # Receives first: gloo then uses both directions of a connection at once.
            works = [dist.irecv(torch.empty_like(x), a) for a, b in pairs if b == rank]
            works += [dist.isend(x, b) for a, b in pairs if a == rank]
            for work in works:
                work.wait()
            if any(b == rank for _, b in pairs):
                rate = SIZE / (time.perf_counter() - start)
                rates[name] = max(rates.get(name, 0.0), rate)
    return rates


@pytest.fixture(scope="module")
def rates(works, ranks):
    """Rate of each receiving rank in each case, over links that are limited between nodes only."""
    cases = {
        "alone": [(0, 2)],
        "side by side": [(0, 2), (1, 3)],
        "both ways": [(1, 3), (3, 1)],
        "two to one": [(0, 2), (1, 2)],
        "inside": [(0, 1), (2, 3)],
    }
    with LimitedLinks(NODES, LIMIT) as links:
        return ranks.run(transfer_between, world_size=4, args=(links, cases))


@pytest.mark.links
def test_transfer_between_nodes_is_within_ten_percent_of_the_limit(rates):
    assert rates[2]["alone"] == pytest.approx(LIMIT, rel=0.1)


@pytest.mark.links
def test_every_rank_of_a_node_has_a_link_of_its_own(rates):
    assert rates[2]["side by side"] == pytest.approx(LIMIT, rel=0.1)
    assert rates[3]["side by side"] == pytest.approx(LIMIT, rel=0.1)


@pytest.mark.links
def test_links_carry_their_limit_in_both_directions_at_once(rates):
    assert rates[1]["both ways"] == pytest.approx(LIMIT, rel=0.1)
    assert rates[3]["both ways"] == pytest.approx(LIMIT, rel=0.1)


@pytest.mark.links
def test_what_a_rank_receives_is_limited_too(rates):
    # Two messages of SIZE come in over one link before both receives are done.
    assert rates[2]["two to one"] == pytest.approx(LIMIT / 2, rel=0.1)


@pytest.mark.links
def test_traffic_within_a_node_is_not_limited(rates):
    assert rates[1]["inside"] > 3 * LIMIT
    assert rates[3]["inside"] > 3 * LIMIT


@pytest.mark.links
def test_traffic_within_a_node_can_be_limited_by_itself(works, ranks):
    with LimitedLinks([[0, 1]], LIMIT, inner_bandwidth_bytes_per_second=INNER_LIMIT) as links:
        rates = ranks.run(transfer_between, world_size=2, args=(links, {"inside": [(0, 1)]}))
    assert rates[1]["inside"] == pytest.approx(INNER_LIMIT, rel=0.1)


def count_on_the_wire(links):
    rank, size = int(os.environ["RANK"]), links.world_size
    os.environ.update(links.enter(rank))
    transport = MeasuredTransport()
    dist.init_process_group(transport.register())
    x = torch.ones(SIZE // 4)
    calls = {
        "send": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % size),
                    dist.P2POp(dist.isend, x, (rank + 1) % size),
                ]
            )
        ],
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all_reduce": lambda: dist.all_reduce(x.clone()),
    }
    counts = {}
    for name, call in calls.items():
        dist.barrier()
        counted, wire = transport.traffic.snapshot(), links.bytes_sent(rank)
        dist.barrier()
        call()
        counted = (transport.traffic - counted).total(operation=name).bytes_sent
        dist.barrier()
        counts[name] = counted, sum(links.bytes_sent(rank).values()) - sum(wire.values())
    return counts


@pytest.mark.links
def test_kernel_counts_the_bytes_that_the_traffic_counts(works, ranks):
    with LimitedLinks([[0], [1, 2]], 200e6) as links:
        for counts in ranks.run(count_on_the_wire, world_size=3, args=(links,)):
            for name, (counted, wire) in counts.items():
                # Headers and acknowledgements come on top.
                assert counted <= wire < 1.05 * counted, name


@pytest.mark.links
def test_links_are_gone_after_the_exit_and_after_an_error(works):
    with LimitedLinks(NODES, LIMIT):
        assert sum(name.startswith(ours) for name in namespaces()) == 5
    assert not any(name.startswith(ours) for name in namespaces())
    with pytest.raises(ZeroDivisionError), LimitedLinks(NODES, LIMIT):
        raise ZeroDivisionError
    assert not any(name.startswith(ours) for name in namespaces())


@pytest.mark.links
def test_several_links_can_exist_at_once(works):
    with LimitedLinks(NODES, LIMIT) as first, LimitedLinks(NODES, LIMIT) as second:
        assert set(first.bytes_sent(3)) == set(second.bytes_sent(3)) == {"outer", "inner"}
        assert sum(name.startswith(ours) for name in namespaces()) == 10


@pytest.mark.links
def test_leftovers_of_a_killed_process_are_removed_and_others_stay(works):
    process = subprocess.Popen(["sleep", "100"])
    name = f"longseq-{process.pid}-{process_start_time(process.pid)}-0-switch"
    with LimitedLinks([[0], [1]], LIMIT) as links:
        subprocess.run(["ip", "netns", "add", name], check=True)
        assert name not in remove_leftovers()
        process.kill()
        process.wait()
        assert name in remove_leftovers()
        assert name not in namespaces()
        links.bytes_sent(0)


@pytest.mark.links
def test_any_command_can_run_as_a_rank(works):
    with LimitedLinks(NODES, LIMIT) as links:
        command = [*links.command_prefix(3), "sh", "-c", "echo $RANK/$WORLD_SIZE; ip -br address"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.startswith("3/4\n")
    assert "10.213.0.4/24" in output


@pytest.mark.parametrize("nodes", [[], [[]], [[0, 0]], [[1, 2]], [[0], [2]], [[0, 1], [1]]])
def test_nodes_that_do_not_name_each_rank_once_are_refused(nodes):
    with pytest.raises(UserError, match="nodes"):
        LimitedLinks(nodes, LIMIT)


def test_bandwidths_that_can_only_be_a_mistake_are_refused():
    with pytest.raises(UserError, match="bandwidth_bytes_per_second 0"):
        LimitedLinks(NODES, 0)
    with pytest.raises(UserError, match="inner_bandwidth_bytes_per_second 1"):
        LimitedLinks(NODES, LIMIT, inner_bandwidth_bytes_per_second=1)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert links_available() == (False, "limited links need root (network namespaces and tc)")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    available, reason = links_available()
    assert not available and "the command ip" in reason
    with pytest.raises(NodeError, match="install iproute2"), LimitedLinks(NODES, LIMIT):
        pass
