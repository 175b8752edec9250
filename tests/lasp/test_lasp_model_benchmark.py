"""What the benchmark of whole linear models relies on: data, agreement, counts and figures."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocabulary": 32}
PAIRS, KEYS = 5, 9


def recall_samples(count):
    sys.path.insert(0, BENCHMARKS)
    from associative_recall import RecallSequences

    data = RecallSequences(count, PAIRS, KEYS, seed=3)
    return [{name: row.tolist() for name, row in data[i].items()} for i in [*range(count), 0]]


def test_recall_asks_every_key_once_and_its_answer_stands_before(megatron_ranks):
    (samples,) = megatron_ranks.run(recall_samples, world_size=1, args=(6,))
    assert samples[0] == samples[-1] != samples[1]
    for sample in samples:
        tokens, labels, mask = (sample[name] for name in ("tokens", "labels", "loss_mask"))
        assert len(tokens) == len(labels) == len(mask) == 4 * PAIRS
        assert labels[:-1] == tokens[1:]
        shown = dict(zip(tokens[: 2 * PAIRS : 2], tokens[1 : 2 * PAIRS : 2], strict=True))
        asked = [place for place, counts in enumerate(mask) if counts]
        assert len(shown) == PAIRS and min(asked) >= 2 * PAIRS
        assert {tokens[place]: labels[place] for place in asked} == shown
        assert max(shown) < KEYS <= min(shown.values()) <= max(shown.values()) < 2 * KEYS


def agreement():
    """On two ranks: how far the contenders of each model are apart."""
    sys.path.insert(0, BENCHMARKS)
    import lasp_model_memory as memory
    from lasp_model_contenders import Shape

    shape = Shape(**SHAPE, linear_attention="lightning")
    return [memory.agreement(group, shape, 64) for group in memory.same_model(32)]


def test_contenders_of_a_model_have_the_same_loss_and_gradients(megatron_ranks):
    linear, softmax = megatron_ranks.run(
        agreement, world_size=2, backend="gloo", timeout_seconds=180
    )[0]
    assert len(linear) == 5 and len(softmax) == 4
    assert max(*linear.values(), *softmax.values()) < 1e-5


def peaks():
    """On two ranks: peaks of 4 and of 8 chunks, and of 4 chunks in a second step."""
    sys.path.insert(0, BENCHMARKS)
    import lasp_model_memory as memory
    from lasp_model_contenders import Contender, Shape

    shape = Shape(**SHAPE, linear_attention="lightning")
    chunks = Contender("LASP", "chunks", 64)
    return memory.peaks(chunks, shape, [256, 512]) + memory.peaks(chunks, shape, [256], steps=2)


def test_a_peak_is_that_of_any_step_and_of_any_number_of_chunks(megatron_ranks):
    # A thread of gloo may hold a tensor for a moment: a count can come out too high, not too low.
    for _ in range(3):
        counts = megatron_ranks.run(peaks, world_size=2, backend="gloo", timeout_seconds=180)
        if all(first == second for first, _, second in counts):
            break
    for four_chunks, eight_chunks, in_second_step in counts:
        assert four_chunks == in_second_step
        # The batch and its losses, in bytes per token, and a state per layer and chunk.
        states = SHAPE["layers"] * SHAPE["heads"] * 8 * 8 * 4
        assert eight_chunks - four_chunks <= (512 - 256) * 40 + 4 * states


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("lasp_model")


def time_row(name, seconds, **more):
    row = {"part": "speed", "kind": "time", "network": "limited", "name": name}
    return row | {"seconds": seconds, "quiet_machine": True, "void": False} | more


def test_step_times_are_a_figure_if_quiet_and_of_the_same_result(benchmark):
    rows = [time_row("TP+SP", 6.0), time_row("LASP", 2.0)]
    assert benchmark.make_figures(rows) == {"over_megatron_sp_slow_link": 3.0}
    assert not benchmark.make_figures([rows[0], time_row("LASP", 2.0, quiet_machine=False)])
    assert not benchmark.make_figures([rows[0], time_row("LASP", 2.0, void=True)])


def test_a_longest_sequence_is_a_figure_if_it_was_counted_and_results_agree(benchmark):
    row = {"part": "memory", "kind": "longest", "figure": True, "ranks": 8, "ratio": 9.5}
    row |= {"name": "LASP", "counted": True}
    apart = {"part": "memory", "kind": "agreement", "name": "LASP, chunks", "void": True}
    assert benchmark.make_figures([row]) == {"max_sequence_over_best_rival_p8": 9.5}
    assert not benchmark.make_figures([row | {"counted": False}])
    assert not benchmark.make_figures([row, apart])


def sequence(ranks, tokens, losses, peak=1000):
    row = {"part": "longest", "kind": "sequence", "ranks": ranks, "tokens": tokens}
    return row | {"losses": losses, "gradient_norms": [1.0] * len(losses), "peak_bytes": peak}


def test_losses_are_compared_with_one_process_at_the_lengths_that_it_ran(benchmark):
    rows = [
        sequence(1, 64, [2.0, 1.0]),
        sequence(4, 64, [2.0, 1.001]),
        sequence(4, 128, [3.0], 1000),
        sequence(4, 256, [3.5], 2280),
        sequence(1, 256, [3.5]),
    ]
    figures = benchmark.make_figures(rows)
    assert figures["longest_sequence_trained"] == 256
    assert figures["loss_difference_longest"] == pytest.approx(1e-3)
    assert figures["gradient_norm_difference_longest"] == 0
    assert figures["peak_growth_bytes_per_token"] == 10
