"""METP inside real Megatron: layouts equal to one process, overlap that changes nothing, moves."""

import pytest
from training_runs import MODEL, RUN, log, losses, train

from megatron_longseq.errors import UserError
from megatron_longseq.launch import RankFailure
from megatron_longseq.verification.session import verify

METP = "--longseq-tensor-parallel metp --sequence-parallel"
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
CP2 = "--context-parallel-size 2 --longseq-context-parallel 2d"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
NORM = "--recompute-granularity selective --recompute-modules layernorm"
SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 48 --seq-length 24 --max-position-embeddings 24 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.01 --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8"
)
YARN = (
    "--position-embedding-type yarn --yarn-original-max-position-embeddings 16 "
    "--rotary-scaling-factor 4 --mscale 1.3"
)
MOE = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1] "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 48"
)

# ranks, what splits them, and what else is switched on; each option stands in one row at least.
LAYOUTS = {
    "tp 2: learned positions, untied, 3 micro-batches": (
        2,
        f"{TP2} --position-embedding-type learned_absolute "
        "--untie-embeddings-and-output-weights --global-batch-size 6",
    ),
    "tp 4 over 2 kv heads: swiglu, rms, q/k norm, qkv bias, scores as a matrix": (
        4,
        f"{TP4} --swiglu --disable-bias-linear --normalization RMSNorm --qk-layernorm "
        "--add-qkv-bias --rotary-percent 0.5 --longseq-attention-kernel reference",
    ),
    "tp 3: squared relu, interleaved rope, full recompute": (
        3,
        "--tensor-model-parallel-size 3 --hidden-size 48 --num-attention-heads 6 "
        "--num-query-groups 3 --make-vocab-size-divisible-by 3 --squared-relu "
        f"--rotary-interleaved {FULL}",
    ),
    "tp 4: all shards a step, tiles, layers without positions": (
        4,
        f"{TP4} --num-query-groups 4 --longseq-metp-shards-per-step 4 --longseq-mlp-tiles 3 "
        "--no-rope-freq 2 --kv-channels 12",
    ),
    "tp 2 x cp 2: one kv head, yarn, norm recompute": (
        4,
        f"{TP2} {CP2} --num-query-groups 1 {YARN} {NORM}",
    ),
    "tp 2 x pp 2: tied, 3 micro-batches": (
        4,
        f"{TP2} --pipeline-model-parallel-size 2 --global-batch-size 6 --qk-l2-norm {NORM}",
    ),
    "tp 2 x pp 2 interleaved: per-token loss": (
        4,
        f"{TP2} --pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8 "
        "--num-virtual-stages-per-pipeline-rank 2 --calculate-per-token-loss",
    ),
    "tp 2 x dp 2: distributed optimizer, all overlaps, geglu": (
        4,
        f"{TP2} --use-distributed-optimizer {OVERLAP} --quick-geglu --glu-linear-offset 1 "
        "--activation-func-clamp-value 0.2 --position-embedding-type none --global-batch-size 8",
    ),
    "tp 2, experts in the second layer": (2, f"{TP2} {MOE}"),
    "tp 4 over 2 kv heads, switched to tensor parallel": (
        4,
        f"{TP4} --longseq-metp-min-tokens 1000 --recompute-granularity selective --qk-layernorm",
    ),
    "tp 2 x cp 2, switched to tensor parallel": (
        4,
        f"{TP2} {CP2} --longseq-metp-min-tokens auto --swiglu --rotary-interleaved",
    ),
}


# Further combinations of what the others have.
THOROUGH = (
    "tp 3: squared relu, interleaved rope, full recompute",
    "tp 2 x pp 2 interleaved: per-token loss",
    "tp 4 over 2 kv heads, switched to tensor parallel",
)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.thorough) if layout in THOROUGH else layout
        for layout in LAYOUTS
    ],
)
def test_every_layout_equals_one_process_in_double_precision(layout, megatron_ranks_fp64):
    processes, flags = LAYOUTS[layout]
    verdict = verify(
        megatron_ranks_fp64,
        flags=f"{SHAPE} {METP} {flags}".split(),
        processes=processes,
        steps=2,
    )
    assert verdict["passed"], verdict
    assert max(verdict[name]["relative"] for name in ("output", "loss", "gradient")) < 1e-12


def captured(argv, seed=1, bare=False):
    """Losses, gradients of the first step and last parameters of a run; optionally a wrong one.

    ``bare``: an MLP that reads its weights instead of calling the layers that own them.
    """
    from megatron_longseq.metp.mlp import METPMLP
    from megatron_longseq.verification.capture import capture_run

    if bare:

        def forward(self, hidden_states, per_token_scale=None, **_):
            w1, w2 = self.linear_fc1, self.linear_fc2
            out = self.runtime.chain(
                hidden_states, w1.weight, w2.weight, f=self.activate, bias=w1.bias
            )
            return out, w2.bias

        METPMLP.forward = forward
    record = capture_run(argv, seed, False)
    return record.losses, [p.data for p in record.gradients], [p.data for p in record.parameters]


def equal(first, second):
    """Whether two runs are the same bit for bit, on every rank."""
    import torch

    def tensors(run):
        return [data for rank in run for kind in rank[1:] for data in kind]

    if [rank[0] for rank in first] != [rank[0] for rank in second]:
        return False
    return all(map(torch.equal, tensors(first), tensors(second)))


@pytest.fixture(scope="module")
def without_overlap(megatron_ranks):
    return overlap_run(megatron_ranks, "")


def overlap_run(pool, flags, **more):
    """Three steps of tp 2 x dp 2; without clipping, whose norm is summed bucket by bucket."""
    argv = (
        f"{SHAPE} {METP} {TP2} --use-distributed-optimizer --clip-grad 0 --lr 0.1 --num-layers 3 "
        "--global-batch-size 8 --lr-decay-iters 3 --train-iters 3 --eval-iters 0 "
        f"--eval-interval 1000 --log-interval 1000 --mock-data {flags}"
    ).split()
    return pool.run(captured, world_size=4, args=(argv,), kwargs=more, timeout_seconds=100)


@pytest.mark.parametrize(
    "flags",
    ["--overlap-grad-reduce --overlap-param-gather", OVERLAP],
    ids=["buckets by default", "buckets of one"],
)
def test_overlap_changes_nothing_bit_for_bit(flags, without_overlap, megatron_ranks):
    steps = without_overlap[0][0]
    assert {step for step, *_ in steps} == {0, 1, 2}
    assert len(set(steps)) > 3, "it must learn, or equality says nothing"
    assert equal(overlap_run(megatron_ranks, flags), without_overlap)


def test_a_module_that_reads_its_weights_bare_fails(without_overlap, megatron_ranks):
    """Why layers are called: without overlap reading is right; with it nobody waits for weights.

    Megatron finds a gathering that nobody has waited for when it starts the next one; in buckets
    that other modules wait for as well, it would not.
    """
    assert equal(overlap_run(megatron_ranks, "", bare=True), without_overlap)
    with pytest.raises(RankFailure, match="param_gather_handle is None"):
        overlap_run(megatron_ranks, OVERLAP, bare=True)


def test_a_checkpoint_moves_from_stock_to_metp_and_back_with_its_optimizer(
    megatron_ranks, tmp_path, corpus
):
    flags = "--use-distributed-optimizer --sequence-parallel"
    whole = losses(train(megatron_ranks, tmp_path / "whole", steps=6, data=corpus))
    found, load = [], ""
    for name, processes, layout in (
        ("tp4", 4, f"{TP4} {flags}"),
        ("metp2", 2, f"{TP2} {flags} {METP} --overlap-grad-reduce --overlap-param-gather"),
        ("tp1", 1, "--use-distributed-optimizer"),
    ):
        save = f"--save {tmp_path / 'c'} --save-interval 2 --exit-interval {len(found) + 2}"
        steps = train(
            megatron_ranks,
            tmp_path / name,
            f"{layout} {load} {save if name != 'tp1' else ''}",
            processes=processes,
            steps=6,
            data=corpus,
        )
        assert len(steps) == 2, name
        found += losses(steps)
        load = f"--load {tmp_path / 'c'} --no-load-rng"
    assert found == pytest.approx(whole, rel=1e-6)


@pytest.fixture(scope="module")
def stock(megatron_ranks, tmp_path_factory, corpus):
    """Losses of stock Megatron in one process, and those of an evaluation in between."""
    folder = tmp_path_factory.mktemp("stock")
    found = losses(train(megatron_ranks, folder, EVALUATE, data=corpus))
    return found, validation(folder, 0)


EVALUATE = "--eval-iters 1 --eval-interval 2"


def validation(folder, rank):
    lines = [x for x in log(folder, rank).splitlines() if "validation loss at iteration" in x]
    return [float(line.split("lm loss value: ")[1].split()[0]) for line in lines]


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        pytest.param("", 1e-6, marks=pytest.mark.thorough),
        pytest.param("--bf16", 5e-3, marks=pytest.mark.thorough),
        # A scale at which no step overflows, so that all steps count.
        ("--fp16 --initial-loss-scale 1024 --loss-scale-window 2", 5e-3),
        ("--bf16 --accumulate-allreduce-grads-in-fp32 --longseq-metp-min-tokens 100", 5e-3),
    ],
    ids=["fp32", "bf16", "fp16", "bf16, switched"],
)
def test_narrow_precisions_and_evaluation_between_steps(
    precision, tolerance, stock, megatron_ranks, tmp_path, corpus
):
    flags = f"{METP} {TP2} {EVALUATE} {precision}"
    found = losses(train(megatron_ranks, tmp_path, flags, processes=2, data=corpus))
    assert found == pytest.approx(stock[0], rel=tolerance)
    evaluated = validation(tmp_path, rank=1)
    assert len(evaluated) > 1 and evaluated == pytest.approx(stock[1], rel=tolerance)
    if "fp16" in precision and "bf16" not in precision:
        assert "number of skipped iterations:   0" in log(tmp_path, rank=1)
    if "min-tokens" in precision:
        said = "METP: micro-batches of 64 tokens compute as tensor parallel (below"
        assert log(tmp_path).count(said) == 1 and said not in log(tmp_path, rank=1)
        counted = f"METP: computed {4 * len(found)} micro-batches of 64 tokens as tensor parallel"
        assert log(tmp_path).count(counted) == 1


def test_the_start_up_lines_say_what_was_built(megatron_ranks, tmp_path):
    train(megatron_ranks, tmp_path, f"{METP} {TP2}", processes=2, steps=1)
    text = log(tmp_path)
    assert "METP attention, 2 steps of 2 heads, K/V of 2 ranks pass by, kernel aten" in text
    assert "METP MLP, 2 weight shards of" in text


@pytest.mark.parametrize(
    ("processes", "flags", "parts"),
    [
        (1, "", ["--tensor-model-parallel-size 1", "at least 2"]),
        (2, f"{TP2} --seq-length 62", ["--seq-length 62", "multiple of 4"]),
        (
            2,
            f"{TP2} --spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec",
            ["--spec megatron.core", "--longseq-tensor-parallel metp would have no effect"],
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name_before_the_first_step(
    processes, flags, parts, megatron_ranks, tmp_path
):
    with pytest.raises(UserError) as error:
        train(megatron_ranks, tmp_path, f"{METP} {flags}", processes=processes)
    for part in parts:
        assert part in str(error.value)


def entry_point(argv):
    """The exit status of the entry point on this rank."""
    from megatron_longseq.pretrain_gpt import main

    return main(argv)


def test_a_refusal_is_said_once_and_every_rank_fails(megatron_ranks, tmp_path):
    flags = f"--mock-data --train-iters 2 {METP} {TP2} --mtp-num-layers 1"
    argv = [*MODEL, *RUN, *flags.split()]
    statuses = megatron_ranks.run(
        entry_point, world_size=2, args=(argv,), log_directory=tmp_path / "logs"
    )
    assert statuses == [2, 2]
    printed = log(tmp_path, 0) + log(tmp_path, 1)
    assert printed.count("error: --mtp-num-layers 1") == 1
    assert "Traceback" not in printed and "iteration " not in printed
