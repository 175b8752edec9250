"""Batches and loss from the ``pretrain_gpt.py`` of a Megatron-LM checkout, instead of ours.

What a team has changed there stays in effect: data sets, masks, loss. Steps are recorded as ever.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor

from .errors import UserError
from .gpt_training import GPTTraining


class CheckoutTraining(GPTTraining):
    """One training run on a checkout's data and loss functions.

    Args:
        args: Megatron's arguments.
        script: the checkout's ``pretrain_gpt``, from :func:`.checkout.import_script`.
    """

    def __init__(self, args: Any, script: ModuleType) -> None:
        super().__init__(args)
        self.script = script

    def datasets(self, sample_counts: list[int], vp_stage: int | None = None):
        """The script's ``train_valid_test_datasets_provider``."""
        return self.script.train_valid_test_datasets_provider(sample_counts, vp_stage=vp_stage)

    def forward_step(self, data_iterator: Iterator, model: torch.nn.Module, *args, **kwargs):
        """The script's ``forward_step``; its loss is recorded too, if steps are."""
        if self.recorder is None:
            return self.script.forward_step(data_iterator, model, *args, **kwargs)
        if torch.is_grad_enabled() and model.training:
            self.recorder.begin_micro_batch(self.args.curr_iteration)
        output, loss = self.script.forward_step(data_iterator, model, *args, **kwargs)
        return output, functools.partial(self._recorded, loss, model.training)

    def _recorded(self, loss: Callable, training: bool, output: Tensor):
        result = loss(output)
        if len(result) != 3:
            raise UserError(
                f"--longseq-measure {self.args.longseq_measure}: the loss function of "
                f"{self.script.__file__} returns {len(result)} values, without the number of "
                "tokens; let it return loss, tokens, report, or leave the flag out"
            )
        if self.recorder is not None and training:
            total, count, _ = result
            self.recorder.add_loss(
                total, count, counts_once=mpu.get_tensor_model_parallel_rank() == 0
            )
        return result
