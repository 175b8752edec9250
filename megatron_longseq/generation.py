"""Text from a trained checkpoint of linear layers: the prompt by chunks, then a state per token.

A prompt goes through the model as in training, split over the ranks if there are several; every
rank then has the states after it. From there each token costs one pass of a single token, however
long the text has become: what a layer knows of it is a state of fixed size.

``longseq generate`` calls :func:`generate` on its ranks. On GPUs it is the module to start::

    torchrun --nproc-per-node N -m megatron_longseq.generation --load DIR --prompt TEXT
"""

import argparse
import copy
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import NodeError, UserError, check_at_least_one

# Tokens of a prompt that a rank computes at a time: what logits and activations take memory for.
PROMPT_TOKENS_AT_A_TIME = 4096

# Below it a softmax of float64 has nothing left but its largest entry, or overflows.
LEAST_TEMPERATURE = 1e-3

# A layout of one process; what a checkpoint was trained with says nothing here.
_ONE_PROCESS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "hierarchical_context_parallel_sizes": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "gradient_accumulation_fusion": False,
    "perform_initialization": False,
}


@dataclass(frozen=True)
class Request:
    """What to generate, and from what.

    Attributes:
        load: folder of the checkpoints.
        step: of the checkpoint; ``None`` for the latest.
        prompt: text.
        tokens: to generate at most.
        temperature: of the softmax; 0 takes the likeliest token.
        top_k: draw from so many of the likeliest tokens; ``None`` for all.
        seed: of the draws.
    """

    load: str
    prompt: str
    tokens: int = 128
    step: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 1

    def check(self) -> None:
        """Raises :class:`UserError` for a value that cannot work."""
        check_at_least_one("--tokens", self.tokens)
        check_at_least_one("--top-k", self.top_k)
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise UserError(
                f"--temperature {self.temperature}: must be 0, for the likeliest token, or at "
                f"least {LEAST_TEMPERATURE}"
            )
        if self.step is not None and self.step < 1:
            raise UserError(f"--step {self.step}: the number of a training step, at least 1")
        if not self.prompt:
            raise UserError("--prompt: is empty; give at least one character")


def generate(request: Request, ranks: int) -> str:
    """Generates on this rank; all ranks of the job call it, and all return the text.

    Raises:
        UserError: no such checkpoint, or not one of linear layers alone; the text would be longer
            than the model has positions.
    """
    request.check()
    saved = _saved(request)
    tokenizer = _Tokenizer(saved)
    prompt = tokenizer.ids(request.prompt)
    if not prompt:
        raise UserError("--prompt: has no tokens of this tokenizer")
    whole = len(prompt) + request.tokens
    if saved.position_embedding_type == "learned_absolute":
        most = saved.max_position_embeddings
        if whole > most:
            raise UserError(
                f"--tokens {request.tokens}: with a prompt of {len(prompt)} tokens the text has "
                f"{whole}, and the model has {most} learned positions; use at most "
                f"{max(0, most - len(prompt))}"
            )
    decoder = Decoder(saved, _folder(request), ranks)
    draws = torch.Generator().manual_seed(request.seed)
    ids: list[int] = []
    logits = decoder.read(prompt)
    for _ in range(request.tokens):
        chosen = choose(logits[: tokenizer.size], request, draws)
        if chosen == tokenizer.eod:
            break
        ids.append(chosen)
        if len(ids) < request.tokens:
            logits = decoder.read([chosen])
    return tokenizer.text(ids)


def choose(logits: Tensor, request: Request, draws: torch.Generator) -> int:
    """One token id by the request's rule, from logits ``[vocabulary]``."""
    if request.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double().cpu() / request.temperature
    if request.top_k is not None and request.top_k < len(scaled):
        scaled[scaled < scaled.topk(request.top_k).values[-1]] = float("-inf")
    return int(torch.multinomial(scaled.softmax(0), 1, generator=draws))


class Decoder:
    """A model of linear layers that reads on from where it stands.

    Args:
        saved: arguments of the run that wrote the checkpoint.
        folder: of the checkpoint itself.
        ranks: of this job, among which a prompt is split.

    Raises:
        UserError: the model is none of linear layers alone.
    """

    def __init__(self, saved: Any, folder: Path, ranks: int) -> None:
        check_model(saved)
        self._ranks = ranks
        self._place = 0
        self._states: dict[int, Any] = {}
        self._arguments = saved
        self._model, self._runtime = _build(saved, ranks)
        _load(self._model, folder)
        self._split = ranks > 1
        halo = saved.linear_conv_kernel_dim - 1 if self._runtime.preset.convolution else 0
        self._least = 2 * ranks * max(1, halo)

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads tokens after those read before; returns the logits ``[vocabulary]`` of the next."""
        rest = list(tokens)
        for part in self._split_parts(rest):
            self._forward(part, self._own(len(part)))
            rest = rest[len(part) :]
        if self._split:
            self._go_on_alone()
        while len(rest) > PROMPT_TOKENS_AT_A_TIME:
            self._forward(rest[:PROMPT_TOKENS_AT_A_TIME], None)
            rest = rest[PROMPT_TOKENS_AT_A_TIME:]
        return self._forward(rest, None)[0, -1].float()

    def _split_parts(self, tokens: list[int]) -> Iterator[list[int]]:
        """The parts of a prompt that split evenly over the ranks; the last token stays."""
        if not self._split:
            return
        unit, at = 2 * self._ranks, 0
        while True:
            count = min(self._ranks * PROMPT_TOKENS_AT_A_TIME, len(tokens) - 1 - at)
            count -= count % unit
            if count < self._least:
                return
            yield tokens[at : at + count]
            at += count

    def _own(self, count: int) -> Tensor:
        from megatron.core import mpu

        from .token_layout import zigzag_tokens

        return zigzag_tokens(mpu.get_context_parallel_rank(), self._ranks, count)

    def _forward(self, tokens: Sequence[int], own: Tensor | None) -> Tensor:
        from .lasp.runtime import Passage

        device = next(self._model.parameters()).device
        ids = torch.tensor([list(tokens)])
        positions = self._place + torch.arange(len(tokens))[None]
        if own is not None:
            ids, positions = ids[:, own], positions[:, own]
        with self._runtime.carrying(Passage(self._states, self._place)) as passage:
            logits = self._model(ids.to(device), positions.to(device), None)
        self._states = passage.leaving
        self._place += len(tokens)
        return logits

    def _go_on_alone(self) -> None:
        """Every rank has the states by now: the same weights, in a model that is not split."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        weights = self._model.state_dict()
        self._model, self._runtime = _build(self._arguments, 1)
        self._model.load_state_dict(weights, assign=True)
        self._split = False


def check_model(saved: Any) -> None:
    """Refuses a model whose layers are not all linear.

    Raises:
        UserError: naming the flag the checkpoint was trained with.
    """
    from .lasp.requirements import linear_layers

    preset = getattr(saved, "longseq_linear_attention", "none")
    if preset == "none":
        raise UserError(
            "the checkpoint's model has softmax attention, whose text needs a cache that grows "
            "with it: longseq generate is for --longseq-linear-attention; use Megatron's own "
            "inference for this one"
        )
    if getattr(saved, "hybrid_layer_pattern", None) is not None:
        raise UserError(
            f"the checkpoint has --hybrid-layer-pattern {saved.hybrid_layer_pattern}: "
            "longseq generate is for --linear-attention-freq; use Megatron's own inference"
        )
    if not all(linear_layers(saved)):
        raise UserError(
            f"the checkpoint's model has layers of softmax attention (--linear-attention-freq "
            f"{saved.linear_attention_freq}), whose text needs a cache that grows with it: longseq "
            "generate is for models of linear layers alone"
        )


def _saved(request: Request) -> Any:
    """The arguments of the run that wrote the checkpoint."""
    from .checkpoint import TRACKER, folder_of, saved_arguments
    from .config import options

    folder = Path(request.load)
    tracker = folder / TRACKER
    if request.step is not None:
        iteration = str(request.step)
        if not (folder / folder_of(iteration)).is_dir():
            there = sorted(path.name for path in folder.glob("iter_*"))
            raise NodeError(
                f"--step {request.step}: --load {folder} has no {folder_of(iteration)}; there are: "
                f"{', '.join(there) or 'none'}"
            )
    elif tracker.is_file():
        iteration = tracker.read_text().strip()
    else:
        raise NodeError(f"--load {folder}: there is no checkpoint (no {TRACKER})")
    saved = saved_arguments(folder, iteration)
    if saved is None:
        raise NodeError(
            f"--load {folder}: a checkpoint of the legacy format; convert it with Megatron's "
            "--ckpt-convert-format torch_dist"
        )
    for option in options():  # those that are younger than the checkpoint
        if not hasattr(saved, option.name):
            setattr(saved, option.name, option.default)
    return saved


def _folder(request: Request) -> Path:
    from .checkpoint import TRACKER, folder_of

    folder = Path(request.load)
    step = request.step
    return folder / folder_of((folder / TRACKER).read_text().strip() if step is None else str(step))


def _build(saved: Any, ranks: int) -> tuple[Any, Any]:
    """The model, in evaluation, and the runtime of its layers. Collective."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from . import compat, cpu_platform
    from .config import LongSeqTransformerConfig, options
    from .lasp.requirements import MODEL_OPTIONS
    from .lasp.runtime import follow_positions
    from .layer_specs import linear_runtime, longseq_layer_spec
    from .model_builder import LongSeqGPTModelBuilder

    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    args = copy.copy(saved)
    vars(args).update(_ONE_PROCESS, context_parallel_size=ranks)
    for option in options():  # but for the model, nothing of how it was trained
        if option.name not in MODEL_OPTIONS:
            setattr(args, option.name, option.default)
    if cpu_platform.is_installed():
        vars(args).update(cpu_platform.ARGUMENTS)
    config = compat.model_config(args, LongSeqTransformerConfig, longseq_layer_spec)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = LongSeqGPTModelBuilder(config).build_model(groups)
    model.to(device=torch.cuda.current_device(), dtype=config.transformer.params_dtype).eval()
    runtime = linear_runtime(config)
    follow_positions(model, runtime)
    return model, runtime


def _load(model: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(str(folder))
    described = model.sharded_state_dict(metadata=metadata)
    loaded = dist_checkpointing.load({"model": described}, str(folder))
    model.load_state_dict(loaded["model"])


class _Tokenizer:
    """Text to ids and back, by the tokenizer the model was trained with."""

    def __init__(self, saved: Any) -> None:
        from .data.tokenizer import BYTES_END_OF_DOCUMENT, ByteTokenizer

        built = _built_tokenizer(saved)
        self.size, self.eod = int(built.vocab_size), built.eod
        if saved.tokenizer_type == "NullTokenizer":
            if self.eod != BYTES_END_OF_DOCUMENT:
                raise UserError(
                    f"--tokenizer-type NullTokenizer --vocab-size {saved.vocab_size}: its ids are "
                    "no bytes, so that there is no text to them; only a corpus of `longseq "
                    "prepare-data` has bytes"
                )
            tokens = ByteTokenizer()
            self._encode, self.text = tokens.encode, tokens.decode
        else:
            self._encode, self.text = None, built.detokenize
            self._built = built

    def ids(self, text: str) -> list[int]:
        """The ids of a text."""
        if self._encode is None:
            return [int(i) for i in self._built.tokenize(text)]
        return [int(i) for i in self._encode(text.encode())]


def _built_tokenizer(saved: Any) -> Any:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = copy.copy(saved)
    args.rank = -1  # no rank of a run: nothing is logged
    try:
        return build_tokenizer(args)
    except Exception as error:  # tokenizer libraries raise whatever they like
        raise NodeError(
            f"--tokenizer-type {args.tokenizer_type}: the tokenizer of the checkpoint cannot be "
            f"built: {type(error).__name__}: {error}"
        ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a request."""
    parser.add_argument("--load", required=True, metavar="DIR", help="folder of the checkpoints")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: latest)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to go on from")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same, from a file of any length")
    parser.add_argument("--tokens", type=int, default=128, help="to generate (default 128)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of the draws; 0 takes the likeliest token"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")


def request_of(arguments: argparse.Namespace) -> Request:
    """The request that flags make.

    Raises:
        NodeError: the prompt's file cannot be read.
    """
    prompt = arguments.prompt
    if arguments.prompt_file is not None:
        try:
            prompt = Path(arguments.prompt_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise NodeError(
                f"--prompt-file {arguments.prompt_file}: cannot be read: {error}"
            ) from error
    return Request(
        load=arguments.load,
        prompt=prompt,
        tokens=arguments.tokens,
        step=arguments.step,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """``torchrun .. -m megatron_longseq.generation``: rank 0 prints the text."""
    from .pretrain_gpt import USER_ERROR_EXIT_CODE, prepare_process, should_print

    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        request = request_of(arguments)
        prepare_process()
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
        text = generate(request, torch.distributed.get_world_size())
        if torch.distributed.get_rank() == 0:
            print(text)
        torch.distributed.destroy_process_group()
    except UserError as error:
        if should_print(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
