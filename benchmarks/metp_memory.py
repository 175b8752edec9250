"""Memory of METP and of stock tensor parallelism: saved bytes, attention, scores, longest sequence.

The functions that count run on every rank of one tensor-parallel group; rows are made of what they
return. Bytes are counted, not sampled: they are the same in every run and on every machine.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from metp_live import LargestSquare, LiveByRole, WithoutArithmetic
from metp_models import (
    HEADS,
    HIDDEN,
    METP,
    STOCK_CORE,
    TP,
    TP_SP,
    Contender,
    Training,
    difference,
    start,
)
from metp_search import PeakSearch

from megatron_longseq.measurement import LiveBytes, LiveStorage, held_after

# A contender whose gradients differ by more from those of TP+SP in fp32 is void.
AGREEMENT = 1e-4

NORM_METP = replace(METP, recompute="norm")
FULL_METP = replace(METP, recompute="full")
NORM_TP_SP = replace(TP_SP, recompute="norm")
SAVED = (TP_SP, NORM_TP_SP, STOCK_CORE, TP, replace(STOCK_CORE, method="TP"), METP, NORM_METP)
LAYERS = 8
BASELINE_TOKENS = 8192
# Where the search begins: long enough for the moment of the peak to be that of the answer.
METP_LENGTHS = (12288, 20480)


def agreement(ranks: int, sequence: int, contenders: list[Contender]) -> dict[str, float]:
    """Largest relative difference of loss and gradients from TP+SP's, in fp32, by contender."""
    start(ranks)
    reference: dict[str, torch.Tensor] = {}
    expected, worst = 0.0, {}
    for contender in [TP_SP, *contenders]:
        training = Training(contender, layers=2, sequence=sequence, dtype=torch.float32)
        loss = training.step(sequence, update=False)
        gradients = training.gradients()
        if not reference:
            reference, expected = gradients, loss
        else:
            error = max(difference(gradients, reference), abs(loss - expected) / expected)
            worst[contender.name] = error
    return worst


# --- saved for backward -----------------------------------------------------------------------


def saved_bytes(ranks: int, sequence: int) -> dict[str, int]:
    """Bytes that one layer holds for backward, parameters left out, by contender."""
    found = {}
    for contender in SAVED:
        start(ranks)
        training = Training(contender, layers=1, sequence=sequence, optimizer=False)
        training.step(sequence)  # buffers that stay are there after it
        layer = training.inner.decoder.layers[0]
        rows = sequence if contender.method == "TP" else sequence // ranks
        given = torch.randn(rows, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

        def forward(layer: Any = layer, given: torch.Tensor = given) -> Any:
            # A product, so that the layer's input is an activation like any other.
            return layer(given * 1, attention_mask=None)

        held = held_after(forward, [training.inner])
        found[contender.name] = held.saved + held.unseen
    return found


def saved_formula(contender: Contender, ranks: int, sequence: int) -> tuple[str, int] | None:
    """Bytes of one layer by formula, in bf16; None where scores are kept.

    Beside the terms of h: the log-sum-exp, fp32 per head and token, and mean and deviation of two
    norms, bf16 per token and rank that computes it (recomputed norms keep none).
    """
    if contender.core == "stock":
        return None
    tokens = sequence // ranks
    lse = 4 * HEADS * tokens
    statistics = 0 if contender.recompute == "norm" else 2 * 2 * 2
    if contender.method == "TP":
        return (
            "sbh (8 + 24/p) + lse + norm statistics",
            sequence * (8 * HIDDEN + statistics) + 24 * HIDDEN * tokens + lse,
        )
    factor = {"TP+SP": 32, "METP": 10}[contender.method]
    factor -= 4 if contender.recompute == "norm" else 0
    return (
        f"{factor} sbh/p + lse" + (" + norm statistics" if statistics else ""),
        tokens * (factor * HIDDEN + statistics) + lse,
    )


def saved_rows(ranks: int, sequence: int, found: dict[str, int]) -> list[dict[str, Any]]:
    """One row per contender."""
    rows = []
    for contender in SAVED:
        formula = saved_formula(contender, ranks, sequence)
        held = found[contender.name]
        row = {"kind": "saved", "name": contender.name, "ranks": ranks, "tokens": sequence}
        row |= {"bytes": held, "bytes_over_nh": held / (sequence // ranks * HIDDEN)}
        row |= {"formula": formula and formula[0], "formula_bytes": formula and formula[1]}
        rows.append(row | {"over_tp_sp": held / found[TP_SP.name]})
    return rows


# --- one layer's attention --------------------------------------------------------------------

# "Our reading" of what the paper counts; the rest is shown apart.
COUNTED = ("X", "QKV", "attention output", "projection output")


def attention_bytes(ranks: int, sequence: int, contender: Contender) -> dict[str, int]:
    """Bytes alive in one layer's attention by what they are, when the counted ones are most."""
    start(ranks)
    training = Training(contender, layers=1, sequence=sequence, optimizer=False)
    training.step(sequence)
    attention = training.inner.decoder.layers[0].self_attention
    given = torch.randn(sequence // ranks, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    parameters = {p.untyped_storage()._cdata for p in training.inner.parameters()}
    element = 2 * sequence // ranks * HIDDEN  # bsh/p in bf16
    role = _role_metp if contender.method == "METP" else _role_stock

    def of(storage: LiveStorage, dtype: torch.dtype | None) -> str | None:
        if storage.address == given.untyped_storage()._cdata:
            return "X"
        if storage.address in parameters:
            return None
        if storage.origin is None or (
            storage.origin == "aten.empty.memory_format" and dtype == torch.uint8
        ):
            return "buffers"
        if dtype == torch.float32:
            return "fp32 accumulators"
        return role(storage.origin, storage.bytes, element, ranks)

    with LiveByRole(of, COUNTED) as live:
        live.include(training.inner, given)
        out, _ = attention(given, attention_mask=None)
        peak = live.peak()
    del out
    weights = sum(p.nbytes for p in training.inner.parameters())
    return live.at_most | {"live peak": peak - weights}


def _role_metp(origin: str, size: int, element: int, ranks: int) -> str:
    if origin == "aten.addmm.default":
        return "QKV"
    if origin == "aten._to_copy.default":
        return "projection output" if size == element else "attention output"
    return "other"


def _role_stock(origin: str, size: int, element: int, ranks: int) -> str:
    if origin == "aten.add.Tensor" and size == 3 * element:
        return "QKV"
    if origin == "aten._to_copy.default" and size == element:
        return "attention output"
    if origin == "aten.empty.memory_format" and size == element:
        return "projection output"
    return "full sequence" if size == ranks * element else "other"


# --- scores without flash ---------------------------------------------------------------------


def score_bytes(ranks: int, sequence: int) -> int:
    """Bytes of the largest block of scores, with the kernel that holds them; METP, or one rank."""
    start(ranks)
    contender = replace(METP if ranks > 1 else TP, kernel="reference")
    training = Training(contender, layers=1, sequence=sequence, optimizer=False)
    rows = sequence // ranks
    with LargestSquare({rows, rows // 2}) as largest:
        training.step(sequence)
    return largest.bytes


# --- longest sequence -------------------------------------------------------------------------


def peaks(
    ranks: int, contender: Contender, lengths: list[int], *, layers: int, arithmetic: bool
) -> list[int]:
    """Peak live bytes of this rank in a whole training step of each length.

    All is counted: weights, gradients, optimizer, activations, buffers.
    """
    found = []
    for length in lengths:
        start(ranks)
        with nullcontext() if arithmetic else WithoutArithmetic(), LiveBytes() as live:
            training = Training(contender, layers=layers, sequence=length)
            training.first_update()
            training.warm_up(length)
            live.reset_peak()
            training.step(length)
            found.append(live.peak())
        del training
    return found


@dataclass(frozen=True)
class Scenario:
    """What both sides may do in a comparison of longest sequences."""

    name: str
    baselines: tuple[Contender, ...]
    metp: Contender
    verified: bool = False


def scenarios() -> list[Scenario]:
    """The comparisons; the first one is the figure's."""

    def stock(loss: str, *recomputes: str) -> tuple[Contender, ...]:
        return tuple(
            replace(base, loss=loss, recompute=recompute)
            for base in (TP_SP, TP)
            for recompute in recomputes
        )

    return [
        Scenario("tiled loss, norm recompute", stock("tiled", "none", "norm"), NORM_METP, True),
        Scenario("tiled loss, no recompute", stock("tiled", "none"), METP, True),
        Scenario("stock loss, norm recompute", stock("stock", "none", "norm"), NORM_METP),
        Scenario("stock loss, no recompute", stock("stock", "none"), METP),
        Scenario(
            "tiled loss, full recompute", stock("tiled", "full"), replace(METP, recompute="full")
        ),
    ]


def all_contenders() -> list[Contender]:
    """Every contender of the longest sequence, once."""
    every = [c for scenario in scenarios() for c in (*scenario.baselines, scenario.metp)]
    return list(dict.fromkeys(every))


def longest_rows(
    ranks: int, peaks_of: Callable[[Contender, list[int]], list[int]]
) -> list[dict[str, Any]]:
    """One row per scenario: the budget, whose it is, and the longest sequence of METP in it.

    The budget is the least that a stock contender needs for its 8K tokens. Answers are verified by
    counted peaks on both sides where ``counted`` says so; the others lie on the line of peaks that
    a contender's verified answers lie on.
    """
    searches: dict[Contender, PeakSearch] = {}
    rows = []
    for index, scenario in enumerate(scenarios()):
        budgets = {}
        for baseline in scenario.baselines:
            search = searches.setdefault(
                baseline, PeakSearch(partial(peaks_of, baseline), 2 * ranks)
            )
            (budgets[baseline],) = search.peak(BASELINE_TOKENS)
        best = min(budgets, key=lambda baseline: budgets[baseline])
        search = searches.setdefault(
            scenario.metp, PeakSearch(partial(peaks_of, scenario.metp), 2 * ranks)
        )
        search.peak(*METP_LENGTHS)
        if scenario.verified:
            tokens, counted = search.longest(budgets[best])
        else:
            tokens, counted = search.estimate(budgets[best]), False
        rows.append(
            {"kind": "longest", "scenario": scenario.name, "name": scenario.metp.name}
            | {"ranks": ranks, "tokens": tokens, "counted": counted, "figure": index == 0}
            | {"baseline": best.name, "baseline_tokens": BASELINE_TOKENS, "budget": budgets[best]}
            | {"baseline_peaks": {c.name: peak for c, peak in budgets.items()}}
            | {"metp_peaks": {str(n): peak for n, peak in sorted(search.known.items())}}
            | {"ratio": tokens / BASELINE_TOKENS}
        )
    # Beside them: how far stock attention, which keeps its scores, comes in the figure's budget.
    contender = replace(STOCK_CORE, loss="tiled", recompute="norm")
    search = PeakSearch(partial(peaks_of, contender), 2 * ranks)
    search.peak(1024, 2048)
    tokens, counted = search.longest(rows[0]["budget"])
    row = rows[0] | {"scenario": "stock attention beside", "name": contender.name}
    row |= {"metp_peaks": {}, "tokens": tokens, "counted": counted, "figure": False}
    return [*rows, row | {"ratio": tokens / BASELINE_TOKENS}]
