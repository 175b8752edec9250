"""2D attention inside real Megatron: layouts equal to one process, checkpoints that move."""

import pytest
from training_runs import CONTINUE, MODEL, RUN, log, losses, train

from megatron_longseq.errors import UserError
from megatron_longseq.verification.session import _capture, _plan, _verdict, verify

TWO_D = "--longseq-context-parallel 2d"
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 96 --seq-length 48 --max-position-embeddings 48 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8"
)
MOE = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0 "
    "--expert-model-parallel-size 2"
)

# ranks, what splits them, and what else is switched on
LAYOUTS = {
    "one rank": (1, ""),
    "ring 2": (2, "--context-parallel-size 2 --longseq-head-parallel-size 1"),
    "heads 2, partial rope": (2, "--context-parallel-size 2 --rotary-percent 0.5"),
    "heads 4 of 2 groups": (4, "--context-parallel-size 4 --longseq-head-parallel-size 4"),
    "2 x 2, selective recompute": (
        4,
        "--context-parallel-size 4 --longseq-head-parallel-size 2 "
        "--recompute-granularity selective --rotary-interleaved",
    ),
    "ring 3": (3, "--context-parallel-size 3"),
    "tp 2, sequence parallel": (
        4,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--qk-layernorm",
    ),
    "pp 2 interleaved": (
        4,
        "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-virtual-stages-per-pipeline-rank 2 --longseq-head-parallel-size 1",
    ),
    "dp 2, zero 1, overlap": (
        4,
        "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --ddp-bucket-size 1 --calculate-per-token-loss",
    ),
    "experts": (4, f"--context-parallel-size 2 {MOE} --moe-token-dispatcher-type alltoall"),
    "queries go round": (
        4,
        "--context-parallel-size 4 --longseq-head-parallel-size 1 --longseq-backward-ring queries "
        "--num-query-groups 4",
    ),
    "heads that divide no ranks": (
        4,
        "--context-parallel-size 4 --longseq-head-parallel-size 4 --num-attention-heads 6 "
        "--num-query-groups 3 --kv-channels 16 --softmax-type learnable",
    ),
    "padded": (
        4,
        "--seq-length 41 --longseq-pad-sequence --context-parallel-size 2 "
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "padded, metp": (
        2,
        "--seq-length 37 --longseq-pad-sequence --tensor-model-parallel-size 2 "
        "--sequence-parallel --longseq-tensor-parallel metp --calculate-per-token-loss",
    ),
    "padded, pipeline": (
        4,
        "--seq-length 43 --longseq-pad-sequence --context-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
    ),
    "full recompute": (
        2,
        "--context-parallel-size 2 --longseq-head-parallel-size 1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --normalization RMSNorm",
    ),
}


# Between them every kind of parallelism; the others are further combinations.
ALWAYS = (
    "heads 4 of 2 groups",
    "tp 2, sequence parallel",
    "pp 2 interleaved",
    "dp 2, zero 1, overlap",
    "experts",
    "heads that divide no ranks",
    "padded",
)


@pytest.mark.parametrize(
    "layout",
    [
        layout if layout in ALWAYS else pytest.param(layout, marks=pytest.mark.thorough)
        for layout in LAYOUTS
    ],
)
def test_every_layout_equals_one_process_in_double_precision(layout, megatron_ranks_fp64):
    processes, flags = LAYOUTS[layout]
    verdict = verify(
        megatron_ranks_fp64,
        flags=f"{SHAPE} {TWO_D} {flags}".split(),
        processes=processes,
        steps=2,
    )
    assert verdict["passed"], verdict
    assert max(verdict[name]["relative"] for name in ("output", "loss", "gradient")) < 1e-12


def capture_with_even_masks(argv, seed, _masked, directory):
    """Masks tokens so that every context-parallel rank counts as many for the further tokens.

    Megatron divides that loss by each rank's own count of tokens that have a further one, and the
    rank with the end of the sequence has fewer: then two layouts differ, whatever computes them.
    """
    from megatron_longseq.verification import capture

    item = capture.RandomTokens.__getitem__

    def masked(self, index):
        sample = item(self, index)
        sample["loss_mask"][[0, self._args.seq_length // 4 + 1]] = 0.0
        return sample

    capture.RandomTokens.__getitem__ = masked
    _capture(argv, seed, False, directory)


def test_prediction_of_further_tokens_equals_one_process(megatron_ranks_fp64, tmp_path):
    flags = (
        f"{SHAPE} {TWO_D} --context-parallel-size 2 --longseq-head-parallel-size 1 "
        "--mtp-num-layers 1 --calculate-per-token-loss"
    ).split()
    plan = megatron_ranks_fp64.run(
        _plan, world_size=1, args=(None, flags, 2, "one-process", "fp64", 2)
    )[0]
    for name, (argv, processes, masked) in plan.items():
        args = (argv, 1, masked, f"{tmp_path}/{name}")
        megatron_ranks_fp64.run(capture_with_even_masks, world_size=processes, args=args)
    verdict = megatron_ranks_fp64.run(_verdict, world_size=1, args=(str(tmp_path), "fp64"))[0]
    assert verdict["passed"], verdict


@pytest.fixture(scope="module")
def stock(megatron_ranks, tmp_path_factory, corpus):
    """A checkpoint of stock Megatron in one process, and its losses from there on."""
    folder = tmp_path_factory.mktemp("stock")
    save = f"--save {folder / 'weights'} --save-interval 2 --exit-interval 2"
    train(megatron_ranks, folder / "first", save, data=corpus)
    start = f"--load {folder / 'weights'} {' '.join(CONTINUE)}"
    return start, losses(train(megatron_ranks, folder / "one", start, data=corpus))


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, "--context-parallel-size 2"),
        (4, "--context-parallel-size 4 --longseq-head-parallel-size 2"),
        pytest.param(
            4,
            "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            4,
            "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_five_steps_from_a_stock_checkpoint_have_the_losses_of_one_process(
    processes, flags, stock, megatron_ranks, tmp_path, corpus
):
    start, reference = stock
    found = train(
        megatron_ranks, tmp_path, f"{start} {TWO_D} {flags}", processes=processes, data=corpus
    )
    assert losses(found) == pytest.approx(reference, rel=1e-6)


def test_a_checkpoint_goes_back_to_stock_with_its_optimizer(megatron_ranks, tmp_path, corpus):
    flags = "--use-distributed-optimizer"
    whole = losses(train(megatron_ranks, tmp_path / "whole", flags, data=corpus))
    save = f"--save {tmp_path / 'c'} --save-interval 2 --exit-interval 2"
    first = train(
        megatron_ranks,
        tmp_path / "2d",
        f"{flags} {TWO_D} --context-parallel-size 2 {save}",
        processes=2,
        data=corpus,
    )
    rest = train(
        megatron_ranks,
        tmp_path / "tp",
        f"{flags} --tensor-model-parallel-size 2 --load {tmp_path / 'c'} --no-load-rng",
        processes=2,
        data=corpus,
    )
    assert losses(first) + losses(rest) == pytest.approx(whole, rel=1e-6)


def test_bf16_and_evaluation_between_steps(megatron_ranks, tmp_path, corpus):
    evaluate = "--eval-iters 1 --eval-interval 2"
    flags = f"{TWO_D} --context-parallel-size 2 {evaluate}"
    plain = losses(train(megatron_ranks, tmp_path / "plain", evaluate, data=corpus))
    found = train(megatron_ranks, tmp_path / "2d", flags, processes=2, data=corpus)
    narrow = f"{flags} --bf16 --longseq-ring-gradient-dtype input --longseq-head-parallel-size 1"
    half = train(megatron_ranks, tmp_path / "half", narrow, processes=2, data=corpus)
    assert losses(found) == pytest.approx(plain, rel=1e-6)
    assert losses(half) == pytest.approx(plain, rel=5e-3)
    assert "validation loss at iteration 4" in log(tmp_path / "2d", rank=1)


def test_the_start_up_lines_say_the_factorisation_and_why(megatron_ranks, tmp_path):
    flags = f"{TWO_D} --context-parallel-size 4"
    train(megatron_ranks, tmp_path, flags, processes=4, steps=1)
    text = log(tmp_path)
    assert "2D attention, 2 head-parallel x 2 ring, kernel aten" in text
    assert "head-parallel size 2: 4 would fit too, but it would replicate the 2 key/value" in text
    assert "head parallel 2: [0 1] [2 3]" in text and "ring 2: [0 2] [1 3]" in text


# Queries and keys 24 wide, values 16.
LATENT = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --multi-latent-attention "
    "--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--rope-type rope --ffn-hidden-size 96 --seq-length 48 --max-position-embeddings 48 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8"
)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (4, "--context-parallel-size 4 --longseq-head-parallel-size 2"),
        pytest.param(
            4,
            "--context-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
            "--longseq-keep-attention-output",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_latent_attention_equals_dense_attention_in_one_process(
    processes, flags, megatron_ranks_fp64, tmp_path
):
    flags = f"{LATENT} {TWO_D} {flags}".split()
    plan = megatron_ranks_fp64.run(
        _plan, world_size=1, args=(None, flags, processes, "one-process", "fp64", 2)
    )[0]
    # Without Transformer Engine Megatron has no core for it: the plain kernel, in one block.
    plan["reference"][0].extend([*TWO_D.split(), "--longseq-attention-kernel", "reference"])
    for name, (argv, ranks, masked) in plan.items():
        args = (argv, 1, masked, f"{tmp_path}/{name}")
        megatron_ranks_fp64.run(_capture, world_size=ranks, args=args)
    verdict = megatron_ranks_fp64.run(_verdict, world_size=1, args=(str(tmp_path), "fp64"))[0]
    assert verdict["passed"], verdict
    assert max(verdict[name]["relative"] for name in ("output", "loss", "gradient")) < 1e-12


def test_a_length_that_no_rank_divides_trains_as_one_process_does(megatron_ranks, tmp_path, corpus):
    evaluate = "--seq-length 61 --eval-iters 1 --eval-interval 2 --micro-batch-size 2"
    plain = losses(train(megatron_ranks, tmp_path / "plain", evaluate, data=corpus))
    flags = f"{TWO_D} --context-parallel-size 4 --longseq-pad-sequence {evaluate}"
    found = train(megatron_ranks, tmp_path / "2d", flags, processes=4, data=corpus)
    assert losses(found) == pytest.approx(plain, rel=1e-6)

    def validation(folder, last):
        lines = log(folder, last).splitlines()
        found = [line.split("lm loss value:")[1].split("|")[0] for line in lines if "PPL" in line]
        return [float(value) for value in found]

    expected = validation(tmp_path / "plain", 0)
    assert expected and validation(tmp_path / "2d", 3) == pytest.approx(expected, rel=1e-6)


def test_padding_is_no_part_of_a_packed_document(megatron_ranks, tmp_path, corpus):
    flags = f"{TWO_D} --dataloader-inter-document-masking --seq-length 58 --micro-batch-size 2"
    plain = losses(train(megatron_ranks, tmp_path / "plain", flags, data=corpus))
    split = f"{flags} --longseq-pad-sequence --context-parallel-size 4"
    found = train(megatron_ranks, tmp_path / "2d", split, processes=4, data=corpus)
    assert losses(found) == pytest.approx(plain, rel=1e-6)


def test_a_recomputed_layer_drops_what_it_has_dropped(megatron_ranks, tmp_path, corpus):
    flags = (
        f"{TWO_D} --context-parallel-size 2 --attention-dropout 0.3 "
        "--longseq-attention-kernel reference"
    )
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ways = {
        "none": "",
        "selective": "--recompute-granularity selective",
        "full": full,
        "kept": f"{full} --longseq-keep-attention-output",
    }
    found = {
        name: losses(
            train(megatron_ranks, tmp_path / name, f"{flags} {way}", processes=2, data=corpus)
        )
        for name, way in ways.items()
    }
    for name in ways:
        assert found[name] == pytest.approx(found["none"], rel=1e-6), name
    without = f"{TWO_D} --context-parallel-size 2"
    plain = losses(train(megatron_ranks, tmp_path / "0", without, processes=2, data=corpus))
    assert plain != pytest.approx(found["none"], rel=1e-4)
    assert "kernel reference, dropout 0.3" in log(tmp_path / "none")


def two_models_of_different_heads():
    """Outputs of two models built in one process, run by turns, against each alone."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_longseq.config import LongSeqTransformerConfig
    from megatron_longseq.layer_specs import longseq_layer_spec
    from megatron_longseq.model_builder import LongSeqGPTModelBuilder, LongSeqGPTModelConfig

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        context_parallel_size=2, hierarchical_context_parallel_sizes=[1, 2]
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    models = []
    for heads in (2, 6):
        transformer = LongSeqTransformerConfig(
            num_layers=1,
            hidden_size=24,
            num_attention_heads=heads,
            context_parallel_size=2,
            transformer_impl="local",
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            longseq_context_parallel="2d",
            longseq_head_parallel_size=1,
        )
        config = LongSeqGPTModelConfig(
            transformer=transformer,
            transformer_layer_spec=longseq_layer_spec,
            vocab_size=32,
            seq_length=16,
            position_embedding_type="rope",
        )
        builder = LongSeqGPTModelBuilder(config)
        models.append(builder.build_model(ProcessGroupCollection.use_mpu_process_groups()))
    tokens = torch.arange(8)[None]

    def step(model):
        loss = model(tokens, tokens, None, labels=tokens).sum()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return loss.item(), gradients

    alone = [step(model) for model in models]
    first, second = (model(tokens, tokens, None, labels=tokens).sum() for model in models)
    with torch.no_grad():
        models[0].eval()(tokens, tokens, None)  # an evaluation while both are in flight
    second.backward()
    first.backward()
    for model, (loss, gradients), value in zip(models, alone, (first, second), strict=True):
        assert value.item() == loss
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))
    return True


def test_two_models_with_other_head_counts_share_a_process(megatron_ranks):
    assert megatron_ranks.run(two_models_of_different_heads, world_size=2) == [True, True]


@pytest.mark.parametrize(
    ("processes", "flags", "parts"),
    [
        (
            4,
            "--context-parallel-size 4 --longseq-head-parallel-size 3",
            ["--longseq-head-parallel-size 3", "4 query heads", "nearest: 1, 2, 4"],
        ),
        (
            8,
            "--context-parallel-size 8 --longseq-head-parallel-size 8",
            ["--longseq-head-parallel-size 8", "at most the 4 query heads", "nearest: 1, 2, 4"],
        ),
        (2, "--longseq-head-parallel-size 2", ["--context-parallel-size is 1"]),
        (
            2,
            "--context-parallel-size 2 --seq-length 66",
            ["--seq-length 66", "nearest: 64, 68", "--longseq-pad-sequence"],
        ),
        (
            2,
            "--context-parallel-size 2 --seq-length 63 --longseq-pad-sequence --num-experts 2",
            ["--longseq-pad-sequence with --num-experts 2", "leave one of the two out"],
        ),
        (
            2,
            "--context-parallel-size 2 --seq-length 62 --longseq-pad-sequence --mtp-num-layers 1",
            ["--longseq-pad-sequence with --mtp-num-layers 1"],
        ),
        (1, "--seq-length 57", ["--seq-length 57", "nearest: 56, 58", "--longseq-pad-sequence"]),
        (
            2,
            "--context-parallel-size 2 --longseq-backward-ring queries",
            ["--longseq-backward-ring queries", "no effect without a ring: --longseq-head-para"],
        ),
        (
            2,
            "--context-parallel-size 2 --longseq-head-parallel-size 1 --attention-dropout 0.1 "
            "--longseq-attention-kernel reference --longseq-backward-ring queries",
            ["--longseq-backward-ring queries: with --attention-dropout 0.1", "use auto or keys"],
        ),
        (
            2,
            "--context-parallel-size 2 --longseq-pad-sequence --seq-length 62 "
            "--max-position-embeddings 62",
            ["--max-position-embeddings 62", "fills 62 tokens up to 64", "nearest: 64"],
        ),
        (
            1,
            "--attention-dropout 0.1",
            ["--attention-dropout 0.1", "several times slower", "--longseq-attention-kernel ref"],
        ),
        (2, "--context-parallel-size 2 --cp-comm-type p2p", ["--cp-comm-type p2p"]),
        (
            2,
            "--context-parallel-size 2 --hierarchical-context-parallel-sizes 1 2",
            ["--hierarchical-context-parallel-sizes 1 2", "--longseq-head-parallel-size"],
        ),
        (1, "--attention-backend flash", ["--attention-backend flash", "--longseq-attention-ker"]),
        (1, "--longseq-comm-timeout-seconds 0", ["--longseq-comm-timeout-seconds 0"]),
        (1, "--longseq-comm-timeout-seconds inf", ["--longseq-comm-timeout-seconds inf"]),
        (
            1,
            "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec",
            ["--spec megatron.core", "--longseq-context-parallel 2d would have no effect"],
        ),
        (1, "--longseq-attention-kernel flash", ["kernel 'flash' cannot be used", "aten"]),
        (1, "--window-size 4,2", ["--window-size", "a token sees none after it; use W,0"]),
    ],
)
def test_what_cannot_work_is_refused_by_name_before_the_first_step(
    processes, flags, parts, megatron_ranks, tmp_path
):
    with pytest.raises(UserError) as error:
        train(megatron_ranks, tmp_path, f"{TWO_D} {flags}", processes=processes)
    for part in parts:
        assert part in str(error.value)


def test_latent_attention_over_tensor_parallel_local_layers_is_refused(megatron_ranks, tmp_path):
    flags = f"{TWO_D} --tensor-model-parallel-size 2 --max-position-embeddings 64"
    with pytest.raises(UserError, match="--tensor-model-parallel-size 2: with --multi-latent-att"):
        train(megatron_ranks, tmp_path, flags, processes=2, model=LATENT.split())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("", "--multi-latent-attention: .* no core attention for it; add --longseq-context-par"),
        (
            f"{TWO_D} --dataloader-inter-document-masking",
            "--dataloader-inter-document-masking is refused .with --multi-latent-attention",
        ),
    ],
)
def test_latent_attention_that_cannot_run_is_refused(flags, text, megatron_ranks, tmp_path):
    with pytest.raises(UserError, match=text):
        train(
            megatron_ranks,
            tmp_path,
            f"{flags} --max-position-embeddings 64",
            model=LATENT.split(),
        )


def test_the_length_of_samples_may_bear_its_other_name(megatron_ranks, tmp_path):
    plain = train(megatron_ranks, tmp_path / "plain", steps=1)
    run = [word.replace("--seq-length", "--encoder-seq-length") for word in RUN]
    assert losses(train(megatron_ranks, tmp_path / "b", steps=1, run=run)) == losses(plain)
    with pytest.raises(UserError, match="--longseq-pad-sequence: needs --seq-length N"):
        train(megatron_ranks, tmp_path / "c", "--longseq-pad-sequence", run=run)


def weight_of_nothing():
    import torch
    import torch.distributed as dist

    from megatron_longseq.sequence_padding import weight_of_rank

    dist.init_process_group("gloo")
    counts = (0, 0), (3, 1), (4, 0)
    rank = dist.get_rank()
    return [float(weight_of_rank(torch.tensor(c[rank]), dist.group.WORLD)) for c in counts]


def test_a_rank_weighs_what_it_has_of_the_tokens_and_nothing_is_no_number(megatron_ranks):
    first, second = megatron_ranks.run(weight_of_nothing, world_size=2)
    assert first[1:] == [1.5, 2.0] and second[1:] == [0.5, 0.5]
    assert all(0 * weight[0] == 0 for weight in (first, second))


def test_options_of_2d_attention_without_it_are_refused(megatron_ranks, tmp_path):
    with pytest.raises(UserError, match="has no effect without --longseq-context-parallel 2d"):
        train(megatron_ranks, tmp_path, "--longseq-attention-kernel aten")
    assert "--longseq-context-parallel 2d" not in MODEL
