"""Step time of Megatron's tensor and sequence parallelism and of LASP, on the same linear model."""

import os
from typing import Any

import torch.distributed as dist
from attention_contenders import quiet, sample
from lasp_model_contenders import Contender, LinearTraining, Shape, start
from metp_speed import Step, rates

from megatron_longseq.measurement import LimitedLinks

LASP, TP_SP = Contender("LASP"), Contender("TP+SP")
# Long enough to connect and to make the optimizer's state.
FIRST_TOKENS = 512


def step_times(
    shape: Shape, sequence: int, rounds: int, most_rounds: int, links: LimitedLinks | None
) -> dict[str, Any]:
    """Samples of a step of TP+SP and of LASP, the losses by contender, and rates.

    By turns, until each has ``rounds`` samples in which others left the machine alone, or
    ``most_rounds`` are over. Megatron's groups are one set per process: each turn makes its own.
    """
    if links is not None:
        os.environ.update(links.enter(int(os.environ["RANK"])))
        dist.init_process_group("gloo")
    found: dict[str, Any] = {"rates": rates(), "samples": {}, "losses": {}}
    for _ in range(most_rounds):
        for contender in (TP_SP, LASP):
            own = found["samples"].setdefault(contender.method, [])
            if len(quiet(own)) >= rounds:
                continue
            start(contender, dist.get_world_size())
            step = Step(LinearTraining(contender, shape, sequence=sequence), sequence)
            step.training.step(FIRST_TOKENS)
            own.append(sample(step))  # type: ignore[arg-type]
            found["losses"][contender.method] = step.loss
            del step
    return found
