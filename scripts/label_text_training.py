"""What the ranks of ``label_text.py`` run: Megatron's training loop with three parts exchanged.

layer spec    this package's, with linear layers that have no causal mask
data          bytes and the class of each, instead of a corpus and the next token
loss          cross entropy over the classes, the first outputs of the model
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_longseq import compat
from megatron_longseq.arguments import extra_arguments
from megatron_longseq.config import LongSeqTransformerConfig
from megatron_longseq.gpt_training import GPTTraining
from megatron_longseq.layer_specs import longseq_layer_spec


def encoder_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    """This package's layer spec, of layers whose linear attention looks both ways."""
    spec = longseq_layer_spec(model_config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    return spec


def train_encoder(
    argv: Sequence[str], folder: Path, classes: int, progress: Path
) -> list[dict[str, float]]:
    """Trains on this rank by a command line; returns loss and accuracy of each step.

    Args:
        folder: of the data, see :class:`LabelledText`.
        classes: how many there are.
        progress: rank 0 appends a line of JSON a step.
    """
    sys.argv = ["label_text.py", *argv]
    args = compat.parse_and_validate(extra_arguments())
    config = compat.model_config(args, LongSeqTransformerConfig, encoder_layer_spec)
    loss = ClassLoss(classes, progress if args.rank == 0 else None)
    config.pre_wrap_hooks.append(loss.install)
    run = LabelTraining(args, LabelledText(folder, args.seq_length))
    with run:
        compat.pretrain(args, config, run.datasets, run.forward_step)
    return loss.steps


class LabelledText(torch.utils.data.Dataset):
    """Pieces of labelled text, one after the other, none of them twice.

    Args:
        folder: with ``text.npy`` and ``classes.npy``.
        length: tokens of a sample.
    """

    def __init__(self, folder: Path, length: int) -> None:
        self._text = np.load(folder / "text.npy", mmap_mode="r")
        self._classes = np.load(folder / "classes.npy", mmap_mode="r")
        self._length = length

    def __len__(self) -> int:
        return len(self._text) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part = slice(index * self._length, (index + 1) * self._length)
        return {
            "tokens": torch.from_numpy(self._text[part].astype(np.int64)),
            "labels": torch.from_numpy(self._classes[part].astype(np.int64)),
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


class LabelTraining(GPTTraining):
    """The training job on labelled text instead of a corpus."""

    def __init__(self, args: Any, data: LabelledText) -> None:
        super().__init__(args)
        self._data = data

    def datasets(self, sample_counts: list[int], vp_stage: int | None = None):
        """The labelled text for training; nothing else."""
        return self._data, None, None


class ClassLoss:
    """The loss of a model whose labels are classes; for one micro-batch a step, on whole outputs.

    Args:
        classes: the first outputs of the model; its others stay unused.
        progress: a file to which a line is added a step.

    Attributes:
        steps: loss per token and share of tokens labelled right, of every step so far.
    """

    def __init__(self, classes: int, progress: Path | None) -> None:
        self.steps: list[dict[str, float]] = []
        self._classes = classes
        self._progress = progress

    def install(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """A ``pre_wrap_hook`` of Megatron's model config: takes the place of the next token's."""
        for model in models:
            model.compute_language_model_loss = self  # type: ignore[assignment]
        return models

    def __call__(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses ``[b, n]`` of this rank's tokens; labels ``[b, n]``, logits ``[n, b, V]``."""
        scores = logits[..., : self._classes].permute(1, 2, 0).float()
        losses = cross_entropy(scores, labels, reduction="none")
        self._record(losses.detach(), scores.argmax(1) == labels)
        return losses

    def _record(self, losses: Tensor, right: Tensor) -> None:
        """Adds this step, over the ranks that share the sequence."""
        sums = torch.stack([losses.double().sum(), right.double().sum()])
        group = mpu.get_context_parallel_group()
        dist.all_reduce(sums, group=group)
        loss, accuracy = (sums / (right.numel() * group.size())).tolist()
        self.steps.append({"loss": loss, "accuracy": accuracy})
        if self._progress is not None:
            with self._progress.open("a") as stream:
                stream.write(json.dumps(self.steps[-1]) + "\n")
