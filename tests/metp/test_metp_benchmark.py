"""What the benchmark of METP relies on: its counts, its search and its baseline's tiled loss."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def relied_on():
    """On two ranks: agreement, saved bytes with their formulas, peaks counted in several ways."""
    sys.path.insert(0, BENCHMARKS)
    from dataclasses import replace

    import metp_memory as memory
    from metp_models import METP, TP, TP_SP

    tiled = [replace(base, loss="tiled") for base in (TP_SP, TP)]
    found = {"agreement": memory.agreement(2, 512, [*tiled, METP])}
    rows = memory.saved_rows(2, 64, memory.saved_bytes(2, 64))
    found["saved"] = {r["name"]: (r["bytes"], r["formula_bytes"]) for r in rows if r["formula"]}
    found["peaks"] = []
    for contender in (replace(TP_SP, loss="tiled"), memory.NORM_METP):
        counts = [peak_in_three_ways(contender)]
        # A thread of gloo may hold a tensor for a moment after its work is done: a count can come
        # out too high, on one rank alone, never too low.
        while len(counts) < 4 and not all_equal_on_every_rank(counts):
            counts.append(peak_in_three_ways(contender))
        found["peaks"].append([min(ways) for ways in zip(*counts, strict=True)])
    return found


def peak_in_three_ways(contender):
    """Of a whole step, of one without arithmetic, and of the second of two steps."""
    import metp_memory as memory
    from metp_models import Training, start

    from megatron_longseq.measurement import LiveBytes

    ways = [
        memory.peaks(2, contender, [192], layers=2, arithmetic=real)[0] for real in (True, False)
    ]
    start(2)
    with LiveBytes() as live:
        training = Training(contender, layers=2, sequence=192)
        for _ in range(2):
            live.reset_peak()
            training.step(192)
        ways.append(live.peak())
    return ways


def all_equal_on_every_rank(counts):
    import torch.distributed as dist

    equal = [None, None]
    dist.all_gather_object(equal, len({min(ways) for ways in zip(*counts, strict=True)}) == 1)
    return all(equal)


def test_contenders_agree_and_counts_are_those_of_real_steps(megatron_ranks):
    for found in megatron_ranks.run(relied_on, world_size=2, backend="gloo", timeout_seconds=120):
        assert max(found["agreement"].values()) < 1e-5
        assert len(found["agreement"]) == 3
        for name, (held, formula) in found["saved"].items():
            assert held == formula, name
        for real, without_arithmetic, in_the_second_step in found["peaks"]:
            assert real == without_arithmetic == in_the_second_step


@pytest.mark.parametrize("budget", [1000, 777, 5000])
def test_the_longest_sequence_is_right_behind_a_kink(monkeypatch, budget):
    monkeypatch.syspath_prepend(BENCHMARKS)
    PeakSearch = importlib.import_module("metp_search").PeakSearch

    def peaks(lengths):
        return [max(100 + 2 * n, 3 * n - 150) for n in lengths]

    search = PeakSearch(peaks, unit=8)
    search.peak(40, 80)
    longest = max(n for n in range(8, 4000, 8) if peaks([n])[0] <= budget)
    assert search.longest(budget) == (longest, True)


def counted_traffic():
    """Messages and bytes of every stream of a model's step on two ranks, beside the formulas."""
    sys.path.insert(0, BENCHMARKS)
    import metp_speed

    return metp_speed.traffic(2, 64)


def test_every_stream_of_a_model_is_counted_and_equals_its_formula(megatron_ranks):
    for rows in megatron_ranks.run(counted_traffic, world_size=2, backend="gloo"):
        for row in rows:
            counted, formula = (
                [row[f"{kind}{unit}"] for unit in ("messages", "bytes")]
                for kind in ("", "formula_")
            )
            assert counted == formula, row
        sent = {row["stream"] for row in rows if row["bytes"] and row["method"] == "METP"}
        assert {"weight ring", "weight gradients", "K and V", "dK and dV", "losses"} <= sent
