"""One training step of Megatron's, as the benchmarks of whole models run it.

Megatron's own GPT model, DDP, Adam and schedule on one sequence; what a benchmark compares differs
by the config it builds the model from, and by how it cuts its batches.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_longseq.model_builder import LongSeqGPTModelBuilder, LongSeqGPTModelConfig

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def start_groups(**sizes: Any) -> None:
    """Megatron's groups of these sizes, and steps of one micro-batch; ends what there was before.

    Args:
        sizes: what ``initialize_model_parallel`` takes.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(
        rank=dist.get_rank(),
        rampup_batch_size=None,
        global_batch_size=1,
        micro_batch_size=1,
        data_parallel_size=1,
    )


class MegatronStep:
    """A model with DDP and Adam, and one step of training it; after :func:`start_groups`.

    Subclasses say what a batch is (:meth:`batch`) and how the model makes a loss of it
    (:meth:`_forward_step`).

    Args:
        config: of the model.
        optimizer: leave it out where a step is not asked for.
        distributed: shard the optimizer over the ranks that have the same weights.
    """

    def __init__(
        self, config: LongSeqGPTModelConfig, *, optimizer: bool = True, distributed: bool = False
    ) -> None:
        self.config = config
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        builder = LongSeqGPTModelBuilder(config)
        (self.model,) = builder.build_distributed_models(self.groups, ddp_config=ddp)
        self.inner = self.model
        while hasattr(self.inner, "module"):
            self.inner = self.inner.module
        self.optimizer = None
        if optimizer:
            dtype = config.transformer.params_dtype
            adam = OptimizerConfig(
                optimizer="adam",
                lr=0.0,  # all the arithmetic of a step, and the next one starts from the same
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                clip_grad=1.0,
                use_distributed_optimizer=distributed,
            )
            self.optimizer = get_megatron_optimizer(adam, [self.model])

    def batch(self, sequence: int) -> tuple[Tensor, ...]:
        """This rank's part of one sequence."""
        raise NotImplementedError

    def _forward_step(self, batches: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        raise NotImplementedError

    def step(self, sequence: int, *, update: bool = True) -> float:
        """One micro-batch through Megatron's schedule, gradients finished, weights updated."""
        self.model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        (result,) = forward_backward_no_pipelining(
            forward_step_func=self._forward_step,
            data_iterator=iter([self.batch(sequence)]),
            model=[self.model],
            num_microbatches=1,
            seq_length=sequence,
            micro_batch_size=1,
            pg_collection=self.groups,
        )
        if self.optimizer is not None and update:
            self.optimizer.step()
        return float(result["loss"])

    def first_update(self) -> None:
        """An update by gradients of zero: the optimizer's state is there after it."""
        self.model.zero_grad_buffer()
        assert self.optimizer is not None
        self.optimizer.step()


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over this rank's tokens, and the same for the schedule's record."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}
