"""Windows, sinks and packed documents in real Megatron: every layout equals one process."""

import json
import os
import pickle
from itertools import pairwise

import pytest
from training_runs import losses, train

from megatron_longseq.cli import main
from megatron_longseq.errors import UserError
from megatron_longseq.verification.session import _plan, _verdict, verify

TWO_D = "--longseq-context-parallel 2d"
PACKED = "--dataloader-inter-document-masking"
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 96 --seq-length 48 --max-position-embeddings 48 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8"
)
SINKS = "--window-size 7,0 --window-attn-skip-freq [1,0] --softmax-type learnable"


def thorough_but(layouts, *always):
    """The layouts, of which only some run in every run of the tests."""
    marks = {name: () if name in always else (pytest.mark.thorough,) for name in layouts}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


# --- windows and sinks, against stock Megatron in one process -----------------------------------

LAYOUTS = {
    "ring 2": (2, f"{SINKS} --context-parallel-size 2 --longseq-head-parallel-size 1"),
    "2 x 2, recompute": (
        4,
        "--window-size 11,0 --softmax-type learnable --context-parallel-size 4 "
        "--longseq-head-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --longseq-keep-attention-output",
    ),
    "tp 2 x cp 2": (
        4,
        f"{SINKS} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "heads 4 of 2 groups, off by one": (
        4,
        "--softmax-type off-by-one --context-parallel-size 4 --longseq-head-parallel-size 4",
    ),
    "dp 2, zero 1": (
        4,
        f"{SINKS} --context-parallel-size 2 --use-distributed-optimizer --calculate-per-token-loss",
    ),
}


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, "2 x 2, recompute"))
def test_windows_and_sinks_equal_stock_attention_in_one_process(layout, megatron_ranks_fp64):
    processes, flags = LAYOUTS[layout]
    verdict = verify(
        megatron_ranks_fp64,
        flags=f"{SHAPE} {TWO_D} {flags}".split(),
        processes=processes,
        steps=2,
    )
    assert verdict["passed"], verdict
    assert max(verdict[name]["relative"] for name in ("output", "loss", "gradient")) < 1e-10


@pytest.mark.thorough
def test_a_checkpoint_with_sinks_goes_to_stock_attention_and_back(megatron_ranks, tmp_path):
    sinks = "--softmax-type learnable"
    whole = losses(train(megatron_ranks, tmp_path / "whole", sinks))
    there = f"--save {tmp_path / 'c'} --save-interval 2 --exit-interval 2"
    two_d = f"{sinks} {TWO_D} --context-parallel-size 2 --tensor-model-parallel-size 2"
    first = train(megatron_ranks, tmp_path / "2d", f"{two_d} {there}", processes=4)
    back = f"--load {tmp_path / 'c'} --save {tmp_path / 'c'} --save-interval 4 --exit-interval 4"
    second = train(megatron_ranks, tmp_path / "stock", f"{sinks} --no-load-rng {back}")
    third = train(
        megatron_ranks,
        tmp_path / "again",
        f"{two_d} --load {tmp_path / 'c'} --no-load-rng",
        processes=4,
    )
    assert losses(first) + losses(second) + losses(third) == pytest.approx(whole, rel=1e-6)


# --- packed documents, against dense masks and separate documents in one process ----------------


def documents_of(index, length):
    """Boundaries of the documents of a sample: some of one token, cut anywhere."""
    import random

    rng = random.Random(index)
    return [0, *sorted(rng.sample(range(1, length), 5)), length]


def capture(argv, seed, masked, directory, reference):
    """As a verification captures, with documents in the data; the reference knows no plan."""
    import torch

    from megatron_longseq.verification import capture

    item = capture.RandomTokens.__getitem__

    def packed(self, index):
        sample, length = item(self, index), self._args.seq_length
        ends = documents_of(index, length)
        filled = torch.full((length + 1,), length, dtype=torch.int32)
        filled[: len(ends)] = torch.tensor(ends)
        sizes = torch.tensor(ends).diff()
        places = torch.cat([torch.arange(size) for size in sizes.tolist()])
        return sample | {
            "cu_seqlens": filled,
            "max_seqlen": sizes.max().to(torch.int32),
            "position_ids": places,
        }

    capture.RandomTokens.__getitem__ = packed
    if reference:
        compute_by_definition()
    record = capture.capture_run(argv, seed, masked)
    os.makedirs(directory, exist_ok=True)
    with open(f"{directory}/rank{os.environ['RANK']}.pickle", "wb") as file:
        pickle.dump(record, file)


def compute_by_definition():
    """Softmax attention by a dense mask; linear attention of each document by itself."""
    import torch
    from masks import dense_mask, masked_attention

    from megatron_longseq.attention_2d.core_attention import TwoDCoreAttention
    from megatron_longseq.lasp.layer import LinearAttention

    def dense(self, query, key, value, *_args, packed_seq_params, **_kwargs):
        outs = []
        for row, boundaries in enumerate(packed_seq_params.boundaries):
            visible = dense_mask(len(query), window=self.window, boundaries=list(boundaries))
            tensors = (tensor[:, row : row + 1] for tensor in (query, key, value))
            sink = self.softmax_offset
            outs.append(masked_attention(*tensors, visible, sink, self.softmax_scale)[0])
        return torch.cat(outs, 1).flatten(2)

    attend = LinearAttention._attend

    def one_by_one(self, *tensors, documents, **options):
        gates = {name: options.pop(name) for name in ("log_decay", "beta")}
        rows = []
        for row, boundaries in enumerate(documents.boundaries):
            parts = []
            for start, end in pairwise(boundaries):
                cut = (slice(row, row + 1), slice(start, end))
                own = {n: g if g is None or g.dim() == 1 else g[cut] for n, g in gates.items()}
                here = (tensor[cut] for tensor in tensors)
                parts.append(attend(self, *here, documents=None, **own, **options)[0])
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows), None

    TwoDCoreAttention.forward = dense
    LinearAttention._attend = one_by_one


def compared(pool, folder, flags, processes):
    """The verdict on a run with documents against one process that computes by definition."""
    shape = SHAPE
    if "2d" not in flags:  # heads and positions that only softmax attention has
        shape = SHAPE.replace("--group-query-attention --num-query-groups 2 ", "")
        shape = shape.replace("embedding-type rope", "embedding-type none")
    flags = f"{shape} {PACKED} {flags}".split()
    plan = pool.run(_plan, world_size=1, args=(None, flags, processes, "one-process", "fp64", 2))[0]
    for name, (argv, count, masked) in plan.items():
        reference = name == "reference"
        if reference and TWO_D.split()[0] in flags:
            argv = [*argv, *TWO_D.split()]
        args = (argv, 1, masked, f"{folder}/{name}", reference)
        pool.run(capture, world_size=count, args=args, timeout_seconds=100)
    return pool.run(_verdict, world_size=1, args=(str(folder), "fp64"))[0]


LINEAR = "--longseq-linear-attention"
SIZES = "--context-parallel-size {} --longseq-head-parallel-size {}"
PACKED_LAYOUTS = {
    "ring 2": (2, f"{TWO_D} {SIZES.format(2, 1)}"),
    "learned positions": (
        2,
        f"{TWO_D} {SIZES.format(2, 2)} --position-embedding-type learned_absolute",
    ),
    "2 x 2, window and sinks, full recompute": (
        4,
        f"{TWO_D} {SIZES.format(4, 2)} {SINKS} --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "tp 2 x cp 2": (
        4,
        f"{TWO_D} {SIZES.format(2, 1)} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "three stages": (
        3,
        f"{TWO_D} --pipeline-model-parallel-size 3 --num-layers 3",
    ),
    "linear, cp 2": (2, f"{LINEAR} linear --context-parallel-size 2"),
    "hybrid, cp 4": (
        4,
        f"{LINEAR} gla --linear-attention-freq 2 {TWO_D} {SIZES.format(4, 1)}",
    ),
    "retention, tp 2 x cp 2, kept": (
        4,
        f"{LINEAR} retention --linear-attention-freq 2 {TWO_D} {SIZES.format(2, 2)} "
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --longseq-keep-attention-output",
    ),
}


@pytest.mark.parametrize("layout", thorough_but(PACKED_LAYOUTS, "hybrid, cp 4"))
def test_packed_documents_equal_their_definition_in_one_process(
    layout, megatron_ranks_fp64, tmp_path
):
    processes, flags = PACKED_LAYOUTS[layout]
    verdict = compared(megatron_ranks_fp64, tmp_path, flags, processes)
    assert verdict["passed"], verdict
    assert max(verdict[name]["relative"] for name in ("output", "loss", "gradient")) < 1e-10


@pytest.mark.thorough
def test_a_corpus_of_documents_trains_packed(megatron_ranks, tmp_path):
    # Megatron #6156, PR #7238: packed rows with context parallelism were not reachable.
    lines = [json.dumps({"text": f"{n} squared is {n * n}." * (n % 3 + 1)}) for n in range(400)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    corpus = tmp_path / "short"
    assert main(["prepare-data", f"{corpus}.jsonl", "--output", str(corpus)]) == 0
    plain = f"{TWO_D} --eod-mask-loss --calculate-per-token-loss"
    flags = f"{plain} {PACKED} --eval-iters 1 --eval-interval 2"
    one = losses(train(megatron_ranks, tmp_path / "one", flags, data=corpus))
    found = train(
        megatron_ranks,
        tmp_path / "two",
        f"{flags} --context-parallel-size 2",
        processes=2,
        data=corpus,
    )
    across = losses(train(megatron_ranks, tmp_path / "across", plain, data=corpus))
    assert losses(found) == pytest.approx(one, rel=1e-5)
    assert one != pytest.approx(across, rel=1e-3)


LENGTHS = (7, 30, 1)  # padded to 8, 32 and 4 for two ranks


def thd_documents(head_parallel):
    """Losses of tokens and summed gradients of a model on documents in Megatron's thd format."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_longseq.config import LongSeqTransformerConfig
    from megatron_longseq.layer_specs import longseq_layer_spec
    from megatron_longseq.model_builder import LongSeqGPTModelBuilder, LongSeqGPTModelConfig
    from megatron_longseq.token_layout import document_zigzag_tokens

    dist.init_process_group("gloo")
    ranks, here = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(
        context_parallel_size=ranks,
        hierarchical_context_parallel_sizes=[head_parallel, ranks // head_parallel],
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    transformer = LongSeqTransformerConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        context_parallel_size=ranks,
        transformer_impl="local",
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=False,
        softmax_type="learnable",
        longseq_context_parallel="2d",
        longseq_head_parallel_size=head_parallel,
    )
    config = LongSeqGPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=longseq_layer_spec,
        vocab_size=32,
        seq_length=44,
        position_embedding_type="rope",
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = LongSeqGPTModelBuilder(config).build_model(groups)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, 32, (length,), generator=generator) for length in LENGTHS]

    def losses_of(tokens, real, padded, mine):
        """Of the tokens at ``mine``; padding counts nothing."""
        starts = torch.tensor(padded[:-1]).unsqueeze(1)
        row = torch.arange(padded[-1])
        lengths = torch.tensor(real).diff().unsqueeze(1)
        counted = ((row >= starts) & (row < starts + lengths)).any(0)[mine].float()
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=torch.tensor(real, dtype=torch.int32),
            cu_seqlens_kv=torch.tensor(real, dtype=torch.int32),
            cu_seqlens_q_padded=torch.tensor(padded, dtype=torch.int32),
            cu_seqlens_kv_padded=torch.tensor(padded, dtype=torch.int32),
            max_seqlen_q=max(LENGTHS) + 2,
            max_seqlen_kv=max(LENGTHS) + 2,
        )
        part = tokens[mine][None]
        found = model(part, mine[None], None, labels=part, packed_seq_params=packed)[0] * counted
        found.sum().backward()
        return found.detach()

    if ranks == 1:  # each document by itself: no plan has more than one
        found = []
        for document in documents:
            real, even = len(document), len(document) + len(document) % 2
            tokens = torch.zeros(even, dtype=torch.long)
            tokens[:real] = document
            found.append(losses_of(tokens, [0, real], [0, even], torch.arange(even))[:real])
        whole = torch.cat(found)
    else:
        real, padded = [0], [0]
        for length in LENGTHS:
            real.append(real[-1] + length)
            padded.append(padded[-1] - (-length // (2 * ranks)) * 2 * ranks)
        tokens = torch.zeros(padded[-1], dtype=torch.long)
        for start, document in zip(padded, documents, strict=False):
            tokens[start : start + len(document)] = document
        mine = document_zigzag_tokens(here, ranks, padded)
        row = torch.zeros(padded[-1], dtype=torch.float64)
        row[mine] = losses_of(tokens, real, padded, mine)
        dist.all_reduce(row)
        whole = torch.cat([row[a : a + n] for a, n in zip(padded, LENGTHS, strict=False)])
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else parameter.main_grad
        dist.all_reduce(gradient)
        gradients[name] = gradient
    return whole, gradients


@pytest.mark.parametrize(
    ("processes", "head_parallel"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.thorough)]
)
def test_documents_in_megatrons_own_packed_format_equal_each_by_itself(
    processes, head_parallel, megatron_ranks_fp64
):
    alone, gradients = megatron_ranks_fp64.run(thd_documents, world_size=1, args=(1,))[0]
    assert "decoder.layers.0.self_attention.core_attention.softmax_offset" in gradients
    results = megatron_ranks_fp64.run(thd_documents, world_size=processes, args=(head_parallel,))
    for whole, found in results:
        assert (whole - alone).abs().max() < 1e-10
        for name, expected in gradients.items():
            assert (found[name] - expected).abs().max() <= 1e-10 * expected.abs().max(), name


@pytest.mark.parametrize(
    ("processes", "flags", "parts"),
    [
        (1, f"{PACKED}", [PACKED, "use --longseq-context-parallel 2d"]),
        (
            1,
            f"{PACKED} {LINEAR} gdn {TWO_D} --linear-attention-freq 2",
            ["convolution", "choose a model without one: linear, retention"],
        ),
        (1, f"{PACKED} {LINEAR} gla --longseq-sequence-chunks 2", ["from chunk to chunk"]),
        (1, f"{PACKED} {TWO_D} --mtp-num-layers 1", ["document by document"]),
        (1, f"{TWO_D} --sft", ["--sft", PACKED]),
        (1, f"{TWO_D} --window-size 4,1", ["--window-size", "use W,0"]),
    ],
)
def test_what_packed_rows_and_windows_cannot_be_is_refused_by_name(
    processes, flags, parts, megatron_ranks, tmp_path
):
    with pytest.raises(UserError) as error:
        train(megatron_ranks, tmp_path, flags, processes=processes)
    for part in parts:
        assert part in str(error.value)
