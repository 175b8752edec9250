"""What Megatron's training loop asks of its script: data sets, batches and the loss.

The counterpart of Megatron's ``pretrain_gpt.py``, which no wheel holds, for causal language models
on ``.bin``/``.idx`` corpora or on mock data. One object, :class:`GPTTraining`, owns the state.
"""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_timers, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from .data.corpus import TrainingTokenizer, check_data_path
from .errors import NodeError, UserError
from .measurement.step_records import StepRecorder
from .packed_rows import PackedRows
from .sequence_padding import pad_batch, pad_documents, sample_length, weight_of_rank
from .token_layout import contiguous_tokens

# What Megatron's batch functions read, whether or not this job has it.
BATCH_KEYS = (
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "hybrid_cp_group",
    "labels",
    "local_cp_size",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
)

# Of these, what says where documents begin; the rest are tensors of tokens.
DOCUMENT_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

# Fields of Megatron's data set config that bear another name among its arguments.
_DATASET_ARGUMENTS = {
    "random_seed": "seed",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "inter_document_masking": "dataloader_inter_document_masking",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}


def check_data(args: Any) -> None:
    """Checks the corpora of this run before any process group exists.

    Raises:
        NodeError: a corpus is missing, cut short, too small, or made with another tokenizer.
    """
    if args.mock_data:
        return
    tokenizer = TrainingTokenizer.of_run(args, get_tokenizer())
    steps = args.train_iters or 0
    evaluations = steps // args.eval_interval + 1 if args.eval_interval else 1
    samples = [
        steps * args.global_batch_size or args.train_samples,
        evaluations * args.eval_iters * args.global_batch_size,
        args.eval_iters * args.global_batch_size,
    ]
    try:
        if args.data_path is not None:
            check_data_path(
                args.data_path,
                tokenizer=tokenizer,
                seq_length=sample_length(args),
                split=args.split,
                samples=samples,
            )
        for split, count in zip(("train", "valid", "test"), samples, strict=True):
            entries = getattr(args, f"{split}_data_path")
            if entries is not None:
                check_data_path(
                    entries,
                    tokenizer=tokenizer,
                    seq_length=sample_length(args),
                    samples=[count, None, None],
                    flag=f"--{split}-data-path",
                )
    except UserError as error:
        raise NodeError(str(error)) from error


def tokens_of_this_rank(args: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The part of a batch ``[b, s]`` that this context-parallel rank holds: ``[b, s / cp]``.

    Megatron's zigzag, by its own function, or ``--longseq-linear-layout contiguous``. With
    ``--longseq-sequence-chunks`` each chunk is cut by itself, and a rank has its parts one after
    the other.
    """
    chunks = args.longseq_sequence_chunks
    if chunks > 1 and mpu.get_context_parallel_world_size() > 1:
        whole = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
        in_chunks = {k: v.unflatten(1, (chunks, -1)).flatten(0, 1) for k, v in whole.items()}
        parts = _cut_for_ranks(args, in_chunks, args.seq_length // chunks)
        rows = {k: v.unflatten(0, (-1, chunks)).flatten(1, 2) for k, v in parts.items()}
        return batch | rows
    return _cut_for_ranks(args, batch, args.seq_length)


def _cut_for_ranks(args: Any, batch: dict[str, Any], length: int) -> dict[str, Any]:
    group = mpu.get_context_parallel_group()
    if args.longseq_linear_layout == "zigzag" or group.size() == 1:
        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    rows = contiguous_tokens(group.rank(), group.size(), length)
    part = slice(int(rows[0]), int(rows[-1]) + 1)
    return {
        key: value[:, part].contiguous() if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def _one_document(args: Any) -> dict[str, Tensor]:
    """``cu_seqlens`` and ``max_seqlen`` of rows that are one document each."""
    device, rows = torch.cuda.current_device(), args.micro_batch_size
    ends = torch.tensor([0, sample_length(args)], dtype=torch.int32, device=device)
    return {"cu_seqlens": ends.repeat(rows, 1), "max_seqlen": ends[1:].repeat(rows)}


class GPTTraining(AbstractContextManager):
    """Data sets, batches and loss of one training run.

    Use as a context manager around Megatron's ``pretrain``: with ``--longseq-measure`` it records
    each step.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.recorder: StepRecorder | None = None
        if args.longseq_measure is not None:
            self.recorder = StepRecorder(args.longseq_measure, rank=args.rank)

    def __enter__(self) -> "GPTTraining":
        if self.recorder is not None:
            self.recorder.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(*exception)

    def datasets(self, sample_counts: list[int], vp_stage: int | None = None):
        """Builds the training, validation and test data sets of this rank.

        Only the first tensor-parallel rank of the stages that read tokens or labels holds any; it
        broadcasts each batch to its group.
        """
        return BlendedMegatronDatasetBuilder(
            MockGPTDataset if self.args.mock_data else GPTDataset,
            sample_counts,
            lambda: mpu.get_tensor_model_parallel_rank() == 0 and self._reads_data(vp_stage),
            self._dataset_config(),
        ).build()

    def forward_step(self, data_iterator: Iterator, model: torch.nn.Module):
        """One micro-batch: returns the model's output and the function that makes it a loss."""
        if self.recorder is not None and torch.is_grad_enabled() and model.training:
            self.recorder.begin_micro_batch(self.args.curr_iteration)
        timer = get_timers()("batch-generator", log_level=2)
        timer.start()
        batch, documents = self._batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        timer.stop()
        losses = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            **({} if documents is None else {"packed_seq_params": documents}),
        )
        return losses, functools.partial(self._loss, batch["loss_mask"], model.training)

    def _loss(self, loss_mask: Tensor, training: bool, losses: Tensor):
        """Sum of the unmasked token losses, their count, and the pair for Megatron's log."""
        mask = loss_mask.view(-1).float()
        total = torch.sum(losses.view(-1).float() * mask)
        count = mask.sum().detach().to(torch.int)
        if self.args.check_for_nan_in_loss_and_grad:
            for test, what in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
                get_rerun_state_machine().validate_result(
                    result=total,
                    rejection_func=test,
                    message=f"found {what} in the loss of this rank's micro-batch",
                    tolerance=0.0,  # the same computation must give the same loss
                    fatal=True,
                )
        if self.recorder is not None and training:
            self.recorder.add_loss(
                total, count, counts_once=mpu.get_tensor_model_parallel_rank() == 0
            )
        report = {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}
        if self.args.longseq_pad_sequence and not self.args.calculate_per_token_loss:
            weight = weight_of_rank(count, mpu.get_context_parallel_group())
            total = total * weight.to(total.dtype)
        return total, count, report

    def _batch(
        self, data_iterator: Iterator, vp_stage: int | None
    ) -> tuple[dict[str, Tensor | None], PackedRows | None]:
        """This rank's part of the next micro-batch: ``[b, s / cp]``, in Megatron's token order.

        And with ``--dataloader-inter-document-masking`` the documents of its rows, whole.
        """
        if not self._reads_data(vp_stage):
            return dict.fromkeys(BATCH_KEYS), None
        args = self.args
        tp_rank = mpu.get_tensor_model_parallel_rank()
        batch: dict[str, Any] = {}
        if tp_rank == 0:
            sample = next(data_iterator)
            for key in BATCH_KEYS:
                value = sample.get(key)
                batch[key] = value.cuda(non_blocking=True) if value is not None else None
            if self._masks_documents and batch["cu_seqlens"] is None:
                batch |= _one_document(args)  # data that says nothing of documents
        batch = get_batch_on_this_tp_rank(
            batch,
            has_cu_seqlens=self._masks_documents,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
            broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
            broadcast_group=mpu.get_tensor_model_parallel_group(),
            cp_size=args.context_parallel_size,
            tp_rank=tp_rank,
            micro_batch_size=args.micro_batch_size,
            seq_length=sample_length(args),
            mtp_on_this_rank=self._predicts_further_tokens(vp_stage),
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
            is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        )
        documents = None
        if self._masks_documents:
            boundaries = pad_documents(args, batch["cu_seqlens"])
            documents = PackedRows.of(boundaries, args.seq_length)
            batch |= dict.fromkeys(DOCUMENT_KEYS)
        return tokens_of_this_rank(args, pad_batch(args, batch)), documents

    @property
    def _masks_documents(self) -> bool:
        return self.args.dataloader_inter_document_masking

    def _reads_data(self, vp_stage: int | None) -> bool:
        # Every stage has attention, which needs to know the documents.
        if self._masks_documents:
            return True
        return is_first_or_last_pipeline_stage(vp_stage) or self._predicts_further_tokens(vp_stage)

    def _predicts_further_tokens(self, vp_stage: int | None) -> bool:
        if self.args.mtp_num_layers is None:
            return False
        return mtp_on_this_rank(
            layout=self.args.pipeline_model_parallel_layout,
            mtp_num_layers=self.args.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )

    def _dataset_config(self) -> GPTDatasetConfig:
        """Megatron's data set config, filled from the arguments of the same meaning."""
        args = self.args
        values: dict[str, Any] = {"tokenizer": get_tokenizer()}
        values["sequence_length"] = sample_length(args)
        values["blend"], values["blend_per_split"] = get_blend_and_blend_per_split(args)
        for field in dataclasses.fields(GPTDatasetConfig):
            name = _DATASET_ARGUMENTS.get(field.name, field.name)
            if field.init and field.name not in values and hasattr(args, name):
                values[field.name] = getattr(args, name)
        return GPTDatasetConfig(**values)
