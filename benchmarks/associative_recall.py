"""Associative recall: key-value pairs, then every key once more, whose value is to be said.

    k3 v7 k0 v2 .. | k0 v2 k3 v7 ..        loss on the values of the second half alone

What a model of linear layers must do to solve it is to write pairs into its states and to read
them back, here across the borders of ranks. After Arora et al., "Zoology" (arXiv 2312.04927).
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor

from megatron_longseq.gpt_training import GPTTraining


class RecallSequences(torch.utils.data.Dataset):
    """Samples of ``4 * pairs`` tokens, each a function of the seed and its index alone.

    Args:
        count: of samples.
        pairs: of a sample; its keys are drawn without repetition.
        keys: how many there are, tokens ``0 .. keys - 1``; values are ``keys .. 2 keys - 1``.
    """

    def __init__(self, count: int, pairs: int, keys: int, seed: int) -> None:
        self._count = count
        self._pairs = pairs
        self._keys = keys
        self._seed = seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        keys = torch.randperm(self._keys, generator=generator)[: self._pairs]
        values = torch.randint(self._keys, 2 * self._keys, (self._pairs,), generator=generator)
        asked = torch.randperm(self._pairs, generator=generator)
        pairs = torch.stack((keys, values), 1)
        text = torch.cat((pairs.flatten(), pairs[asked].flatten()))
        mask = torch.zeros(len(text))
        mask[2 * self._pairs :: 2] = 1.0  # of the asked keys, whose label is the next token
        return {
            "tokens": text,
            # Of the last token nothing follows, and it is not asked.
            "labels": torch.cat((text[1:], text[:1])),
            "loss_mask": mask,
            "position_ids": torch.arange(len(text)),
        }


class RecallTraining(GPTTraining):
    """The training job on recall instead of a corpus; counts answers.

    Attributes:
        answers: by step: of this rank's tokens, those to which the model gave more than half of all
            probability, which are right whatever the rest, and all that were asked.
    """

    def __init__(self, args: Any, pairs: int, keys: int) -> None:
        super().__init__(args)
        self._pairs = pairs
        self._keys = keys
        self.answers: dict[int, tuple[int, int]] = {}

    def datasets(self, sample_counts: list[int], vp_stage: int | None = None):
        """The training samples; no others."""
        if mpu.get_tensor_model_parallel_rank() != 0 or not self._reads_data(vp_stage):
            return None, None, None
        data = RecallSequences(sample_counts[0], self._pairs, self._keys, self.args.seed)
        return data, None, None

    def _loss(self, loss_mask: Tensor, training: bool, losses: Tensor):
        result = super()._loss(loss_mask, training, losses)
        asked = loss_mask.view(-1) > 0
        sure = losses.detach().view(-1)[asked] < torch.log(torch.tensor(2.0))
        before = self.answers.get(self.args.curr_iteration, (0, 0))
        found = int(sure.sum()), int(asked.sum())
        self.answers[self.args.curr_iteration] = before[0] + found[0], before[1] + found[1]
        return result


def train_recall(argv: Sequence[str], pairs: int, keys: int) -> dict[int, tuple[int, int]]:
    """Trains by this command line on this rank; returns its answers by step."""
    from megatron_longseq import compat
    from megatron_longseq.arguments import extra_arguments
    from megatron_longseq.config import LongSeqTransformerConfig
    from megatron_longseq.layer_specs import longseq_layer_spec

    sys.argv = ["pretrain_gpt.py", *argv]
    args = compat.parse_and_validate(extra_arguments())
    config = compat.model_config(args, LongSeqTransformerConfig, longseq_layer_spec)
    run = RecallTraining(args, pairs, keys)
    with run:
        compat.pretrain(args, config, run.datasets, run.forward_step)
    return run.answers
