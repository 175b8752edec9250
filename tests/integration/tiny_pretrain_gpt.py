"""A script with the names that Megatron-LM's ``pretrain_gpt.py`` has, and a loss of its own.

Stands in for a team's script in the tests: it counts only every second token.
"""

import functools

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class Numbers(torch.utils.data.Dataset):
    """Random tokens, the same for the same index on every rank."""

    def __init__(self, length: int, args) -> None:
        self.length, self.args = length, args

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        size = self.args.seq_length
        tokens = torch.randint(0, self.args.vocab_size, (size + 1,), generator=generator)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": (torch.arange(size) % 2).float(),
            "position_ids": torch.arange(size),
        }


def train_valid_test_datasets_provider(sample_counts, vp_stage=None):
    args = get_args()
    return tuple(Numbers(count, args) if count else None for count in sample_counts)


def loss_func(loss_mask, losses):
    total = torch.sum(losses.view(-1) * loss_mask.view(-1))
    count = loss_mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def forward_step(data_iterator, model):
    batch = get_batch_on_this_cp_rank(
        next(data_iterator), is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(
        extra_args_provider=None,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
    model_cfg = gpt_config_from_args(args)
    pretrain(
        pretrain_cfg_container_from_args(args, model_cfg),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
