"""The longest sequence within a budget of bytes per rank: LASP against those that split it too.

Peaks are counted, not sampled: all live tensors of a rank in a whole training step, with weights,
gradients, optimizer and batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lasp_model_contenders import Contender, LinearTraining, Shape, loss_and_gradients, start
from metp_models import difference
from metp_search import PeakSearch

from megatron_longseq.measurement import LiveBytes

Row = dict[str, Any]
# Peaks in bytes of some lengths, of the rank that holds most.
Peaks = Callable[[Contender, list[int]], list[int]]


def agreement(contenders: list[Contender], shape: Shape, sequence: int) -> dict[str, float]:
    """Largest relative difference of loss and gradients from the first one's, in fp32, by name.

    Of contenders that compute the same model. On rank 0; empty on the others.
    """
    found: dict[str, float] = {}
    method: str | None = None
    expected: tuple[float, dict[str, torch.Tensor]] | None = None
    for contender in contenders:
        if contender.method != method:  # groups are made once for all that have the same
            start(contender, dist.get_world_size())
            method = contender.method
        loss, gradients = loss_and_gradients(
            contender, shape, sequence=sequence, dtype=torch.float32
        )
        if dist.get_rank() != 0:
            continue
        if expected is None:
            expected = loss, gradients
        error = abs(loss - expected[0]) / expected[0]
        found[contender.name] = max(error, difference(gradients, expected[1]))
    return found


def peaks(contender: Contender, shape: Shape, lengths: list[int], *, steps: int = 1) -> list[int]:
    """Peak live bytes of this rank in the last of some training steps, for each length.

    In bf16, with fp32 gradients and the distributed optimizer. A pool of buffers that grows does so
    in the first step.
    """
    found = []
    start(contender, dist.get_world_size())
    for length in lengths:
        with LiveBytes() as live:
            training = LinearTraining(contender, shape, sequence=length)
            training.first_update()
            for _ in range(steps):
                live.reset_peak()
                training.step(length)
            found.append(live.peak())
        del training
    return found


@dataclass(frozen=True)
class Scenario:
    """What both sides may do in a comparison of longest sequences.

    Attributes:
        meaning: what is compared, in words.
    """

    name: str
    meaning: str
    rivals: tuple[Contender, ...]
    ours: Contender


def scenarios(chunk_tokens: int) -> list[Scenario]:
    """The comparisons; the first one is the figure's."""

    def rivals(recompute: Any) -> tuple[Contender, ...]:
        return tuple(
            Contender(method, recompute) for method in ("TP+SP", "Ulysses", "ring attention")
        )

    against = (
        "Megatron TP+SP on the same linear model, Ulysses and ring attention on the softmax model"
    )
    return [
        Scenario(
            "every forward twice",
            f"LASP with sequence accumulation against {against}, with full recompute",
            rivals("full"),
            Contender("LASP", "chunks", chunk_tokens),
        ),
        Scenario(
            "full recompute, no chunks",
            f"LASP with full recompute against {against}, with full recompute",
            rivals("full"),
            Contender("LASP", "full"),
        ),
        Scenario(
            "no recompute",
            f"LASP against {against}, all without recompute",
            rivals("none"),
            Contender("LASP"),
        ),
    ]


def same_model(chunk_tokens: int) -> list[list[Contender]]:
    """Contenders in groups that compute the same model, by method within a group."""
    recomputes: tuple[Any, ...] = ("none", "full")

    def both(method: Any) -> list[Contender]:
        return [Contender(method, recompute) for recompute in recomputes]

    linear = [*both("TP+SP"), *both("LASP"), Contender("LASP", "chunks", chunk_tokens)]
    return [linear, [*both("ring attention"), *both("Ulysses")]]


def longest_rows(ranks: int, rival_tokens: int, chunk_tokens: int, peaks_of: Peaks) -> list[Row]:
    """One row per scenario: the budget, whose it is, and the longest sequence of LASP in it.

    The budget is the least that one of the rivals needs for ``rival_tokens``: the best rival. A
    length counts as the longest once its own peak is within the budget and the next one's is not.
    """
    known: dict[Contender, int] = {}
    rows = []
    for number, scenario in enumerate(scenarios(chunk_tokens)):
        for rival in scenario.rivals:
            if rival not in known:
                (known[rival],) = peaks_of(rival, [rival_tokens])
        budgets = {rival: known[rival] for rival in scenario.rivals}
        best = min(budgets, key=lambda rival: budgets[rival])
        ours = scenario.ours
        search = PeakSearch(partial(peaks_of, ours), ours.chunk_tokens or 2 * ranks)
        search.peak(rival_tokens, 2 * rival_tokens)
        tokens, counted = search.longest(budgets[best])
        if not counted:  # at least this much
            tokens = max(n for n, peak in search.known.items() if peak <= budgets[best])
        rows.append(
            {"kind": "longest", "scenario": scenario.name, "meaning": scenario.meaning}
            | {"name": ours.name, "ranks": ranks, "tokens": tokens, "counted": counted}
            | {"rival": best.name, "rival_tokens": rival_tokens, "budget": budgets[best]}
            | {"rival_peaks": {rival.name: peak for rival, peak in budgets.items()}}
            | {"peaks": {str(length): peak for length, peak in sorted(search.known.items())}}
            | {"ratio": tokens / rival_tokens, "figure": number == 0}
        )
    return rows
