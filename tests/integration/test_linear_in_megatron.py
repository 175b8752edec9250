"""Linear and hybrid models inside real Megatron: layouts equal to one process, checkpoints."""

import dataclasses
import os

import pytest
from training_runs import log, losses, train

from megatron_longseq.verification.session import _capture, _verdict

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 48 "
    "--max-position-embeddings 48 --micro-batch-size 2 --global-batch-size 4 --lr 0.01 "
    "--position-embedding-type none --tokenizer-type NullTokenizer --vocab-size 61 "
    "--make-vocab-size-divisible-by 8 --calculate-per-token-loss"
)
# The padded vocabulary of all of them.
VOCABULARY = "64"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
CP = "--context-parallel-size"
PP = "--pipeline-model-parallel-size 2"
BOTH = f"{SP} {CP} 2"
CONTIGUOUS = "--longseq-linear-layout contiguous"
HYBRID = (
    "gdn --num-layers 3 --linear-attention-freq 3 --position-embedding-type rope "
    "--longseq-context-parallel 2d --group-query-attention --num-query-groups 2"
)
PATTERN = (
    "gdn --hybrid-layer-pattern G-*- --position-embedding-type rope --num-layers 4 "
    "--longseq-context-parallel 2d --group-query-attention --num-query-groups 2"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
ZERO = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1"
)

# model, ranks, layout
LAYOUTS = {
    # Tensor x context parallelism, for every preset.
    "linear": ("linear", 4, BOTH),
    "retention": ("retention --position-embedding-type rope", 4, BOTH),
    "lightning": ("lightning", 4, BOTH),
    "lightning-fla": ("lightning-fla --longseq-feature-map silu", 4, BOTH),
    "simple-gla": ("simple-gla", 4, BOTH),
    "gla": ("gla", 4, BOTH),
    "deltanet": ("deltanet", 4, BOTH),
    "gdn, more value than key heads": (
        "gdn --linear-num-value-heads 8 --linear-num-key-heads 2 --linear-key-head-dim 6 "
        "--linear-value-head-dim 4 --swiglu --disable-bias-linear --normalization RMSNorm",
        4,
        f"{BOTH} {SELECTIVE}",
    ),
    "kda, more value than key heads": (
        "kda --linear-num-value-heads 4 --linear-num-key-heads 2",
        4,
        BOTH,
    ),
    # Decays of layers that a pipeline stage does not begin with.
    "context and pipeline": ("lightning", 4, f"{CP} 2 {PP}"),
    "tensor and pipeline": ("kda", 4, f"{SP} {PP}"),
    # What a part of them has to get right.
    "no sequence parallelism, norm over hidden": ("lightning", 2, TP),
    "no sequence parallelism, norm per head": ("kda", 4, f"{TP} {ZERO}"),
    "four ranks, full recompute, gather": ("gdn", 4, f"{CP} 4 {FULL} --longseq-scan all_gather"),
    "contiguous, three ranks, selective": ("kda", 3, f"{CP} 3 {CONTIGUOUS} {SELECTIVE}"),
    "contiguous, learned positions, blocks": (
        "linear --position-embedding-type learned_absolute",
        2,
        f"{CP} 2 {CONTIGUOUS} --longseq-scan all_scan {SELECTIVE} "
        "--recompute-modules core_attn layernorm",
    ),
    # Two sequence groups of two ranks: gradients add up over all four.
    "data x context, distributed optimizer": ("gla", 4, f"{CP} 2 {ZERO}"),
    "other parts": (
        "linear --longseq-feature-map identity --longseq-output-norm hidden "
        "--longseq-output-gate none",
        2,
        f"{CP} 2 --use-distributed-optimizer",
    ),
    "chunks, convolved, distributed optimizer": (
        "kda",
        2,
        f"{CP} 2 --longseq-sequence-chunks 3 {ZERO}",
    ),
    "chunks, contiguous, tensor parallel, selective": (
        "gdn",
        4,
        f"{SP} {CP} 2 --longseq-sequence-chunks 2 {CONTIGUOUS} {SELECTIVE}",
    ),
    "chunks, rotary positions": (
        "retention --position-embedding-type rope",
        2,
        f"{CP} 2 --longseq-sequence-chunks 4",
    ),
    "chunks, one rank, tied weights, learned positions": (
        "linear --position-embedding-type learned_absolute",
        1,
        "--longseq-sequence-chunks 8",
    ),
    "pattern of layers": (PATTERN, 4, BOTH),
    "pattern of layers, pipeline": (PATTERN, 4, f"{CP} 2 {PP} {FULL}"),
    "pattern of layers, interleaved": (
        PATTERN.replace("G-*-", "G-|*-|G-|*-"),
        4,
        f"{CP} 2 {PP} --use-distributed-optimizer",
    ),
    "hybrid, tensor parallel": (HYBRID, 2, SP),
    "hybrid, both": (HYBRID, 4, BOTH),
    "hybrid, four context ranks, tensor parallel": (HYBRID, 8, f"{SP} {CP} 4"),
    "hybrid, interleaved pipeline": (
        HYBRID.replace("--num-layers 3 --linear-attention-freq 3", "--num-layers 4 ")
        + " --linear-attention-freq [1,1,0,1]",
        4,
        f"{CP} 2 {PP} --num-virtual-stages-per-pipeline-rank 2",
    ),
}


def plans(cases):
    from megatron_longseq.run_config import known_arguments
    from megatron_longseq.verification.runs import verification_runs

    parser, found = known_arguments(), {}
    for name, (model, ranks, flags) in cases.items():
        words = f"{SHAPE} --longseq-linear-attention {model} {flags}".split()
        found[name] = verification_runs(
            words, parser, processes=ranks, against="one-process", precision="fp64", steps=1
        )
    return found


@pytest.fixture(scope="module")
def runs(megatron_ranks_fp64, tmp_path_factory):
    """The command lines of every layout; and the records of one process, shared by its layouts."""
    folder = tmp_path_factory.mktemp("verify")
    commands = megatron_ranks_fp64.run(plans, world_size=1, args=(LAYOUTS,))[0]
    known = {}

    def reference(argv, masked):
        key = (*argv[:-1], VOCABULARY)
        if key not in known:
            known[key] = folder / f"reference{len(known)}"
            megatron_ranks_fp64.run(
                _capture,
                world_size=1,
                args=([*key], 1, masked, str(known[key])),
                timeout_seconds=300,
            )
        return known[key]

    return commands, reference


# Between them every kind of recurrence, layout of tokens and way to split a model; the others are
# further combinations.
ALWAYS = (
    "lightning",
    "gla",
    "gdn, more value than key heads",
    "data x context, distributed optimizer",
    "chunks, convolved, distributed optimizer",
    "contiguous, three ranks, selective",
    "hybrid, both",
    "pattern of layers",
)


@pytest.mark.parametrize(
    "layout",
    [
        layout if layout in ALWAYS else pytest.param(layout, marks=pytest.mark.thorough)
        for layout in LAYOUTS
    ],
)
def test_every_layout_equals_one_process_in_double_precision(
    layout, runs, megatron_ranks_fp64, tmp_path
):
    commands, reference = runs
    os.symlink(reference(*commands[layout]["reference"][::2]), tmp_path / "reference")
    argv, ranks, masked = commands[layout]["candidate"]
    assert masked
    megatron_ranks_fp64.run(
        _capture,
        world_size=ranks,
        args=(argv, 1, masked, str(tmp_path / "candidate")),
        timeout_seconds=300,
    )
    verdict = megatron_ranks_fp64.run(
        _verdict, world_size=1, args=(str(tmp_path), "fp64"), timeout_seconds=300
    )[0]
    assert verdict["passed"], verdict
    worst = max(verdict[name]["relative"] for name in ("output", "loss", "gradient"))
    assert worst < 1e-12, verdict


# --- modules, alone ------------------------------------------------------------------------------


def start(context, **transformer):
    """Megatron's groups, and a transformer config with this package's options."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from megatron_longseq.config import LongSeqTransformerConfig

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=size // context, context_parallel_size=context
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return LongSeqTransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=size // context,
        context_parallel_size=context,
        transformer_impl="local",
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **transformer,
    )


def model(transformer, embedding="none"):
    """A GPT model of linear layers, and their runtime."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_longseq.layer_specs import linear_runtime, longseq_layer_spec
    from megatron_longseq.model_builder import LongSeqGPTModelBuilder, LongSeqGPTModelConfig

    config = LongSeqGPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=longseq_layer_spec,
        vocab_size=32,
        seq_length=32,
        position_embedding_type=embedding,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return LongSeqGPTModelBuilder(config).build_model(groups), linear_runtime(config)


def scans_and_gradients():
    """Scans of a step and its gradients, by how much is recomputed; and of two steps at once."""
    import torch

    transformer = start(2, longseq_linear_attention="kda")
    recomputes = {
        "nothing": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }
    tokens, found, weights = torch.arange(16)[None], {}, None
    for name, options in recomputes.items():
        gpt, runtime = model(dataclasses.replace(transformer, **options))
        if weights is None:
            weights = gpt.state_dict()
        gpt.load_state_dict(weights)
        started, begin = [], runtime.operator.scan.start
        runtime.operator.scan.start = lambda *a, _b=begin, _s=started, **k: (
            _s.append(1) or _b(*a, **k)
        )
        first, second = (gpt(tokens, tokens, None, labels=tokens).sum() for _ in range(2))
        with torch.no_grad():
            gpt.eval()(tokens, tokens, None)  # an evaluation while both are in flight
        evaluated = len(started) - 4
        gpt.train()
        second.backward()
        both = [p.grad.clone() for p in gpt.parameters()]
        first.backward()
        same = all(torch.equal(p.grad, 2 * g) for p, g in zip(gpt.parameters(), both, strict=True))
        found[name] = (len(started) - evaluated) // 2, evaluated, same, both
    wanted = found["nothing"][-1]
    return {
        name: (
            scans,
            evaluated,
            same,
            max((a - b).abs().max().item() for a, b in zip(gradients, wanted, strict=True)),
        )
        for name, (scans, evaluated, same, gradients) in found.items()
    }


def test_selective_recompute_scans_no_second_time_and_full_exactly_once_more(megatron_ranks_fp64):
    for found in megatron_ranks_fp64.run(scans_and_gradients, world_size=2):
        # Two layers: a scan forward and one backward each.
        assert {name: scans for name, (scans, *_) in found.items()} == {
            "nothing": 4,
            "selective": 4,
            "full": 6,
        }
        for scans, evaluated, same, difference in found.values():
            assert scans and evaluated == 2 and same and difference < 1e-12


def halves_and_whole():
    """Every preset's largest error of a sequence in two halves, with a state between them."""
    import torch

    worst, transformer = {}, None
    from megatron_longseq.lasp.presets import PRESETS

    for name in PRESETS:
        if transformer is None:
            transformer = start(1, longseq_linear_attention=name)
        else:
            sizes = {f.name: None for f in dataclasses.fields(transformer) if "linear_" in f.name}
            sizes = {n: v for n, v in sizes.items() if n in SIZES}
            transformer = dataclasses.replace(transformer, longseq_linear_attention=name, **sizes)
        gpt, _ = model(transformer, "rope" if PRESETS[name].rotary else "none")
        layer = gpt.decoder.layers[0].self_attention
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(12, 2, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        out_gradient = torch.randn(12, 2, 16, generator=generator, dtype=torch.float64)
        leaves = [x, *layer.parameters()]
        whole, none = layer(x)
        assert none is None
        wanted = torch.autograd.grad(whole, leaves, out_gradient)
        early, _, state = layer(x[:5], output_state=True)
        late, _, _ = layer(x[5:], state=state, output_state=True)
        halves = torch.cat((early, late))
        found = torch.autograd.grad(halves, leaves, out_gradient)
        pairs = [(halves, whole), *zip(found, wanted, strict=True)]
        worst[name] = max(
            ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs
        )
    return worst


SIZES = (
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def test_a_state_continues_a_sequence_in_every_preset(megatron_ranks_fp64):
    worst = megatron_ranks_fp64.run(halves_and_whole, world_size=1)[0]
    assert len(worst) == 9
    assert max(worst.values()) < 1e-10, worst


def ours_and_stock():
    """Our gdn and Megatron's GatedDeltaNet: parameters, checkpoint, outputs and gradients."""
    import torch
    import torch.nn.functional as F
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = start(
        1,
        longseq_linear_attention="gdn",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=4,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
    )
    gpt, _ = model(config)
    ours = gpt.decoder.layers[1].self_attention
    # Its kernels and its norm of keys are another package's, its plain torch path is not.
    common.HAVE_FLA = True
    common.l2norm = lambda x, dim=-1, eps=1e-6: x * torch.rsqrt(x.square().sum(dim, True) + eps)
    stock_config = dataclasses.replace(config, deterministic_mode=True)
    stock = GatedDeltaNet(
        stock_config,
        GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear),
        layer_number=2,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )

    def described(module):
        return {
            key: [(p.key, p.global_shape, p.local_shape, p.global_offset) for p in parts]
            for key, parts in (
                (key, entry.build() if hasattr(entry, "build") else [entry])
                for key, entry in module.sharded_state_dict("layer.").items()
                if "_extra_state" not in key
            )
        }

    assert described(ours) == described(stock)
    names = {n: (p.shape, p.dtype) for n, p in stock.named_parameters()}
    assert names == {n: (p.shape, p.dtype) for n, p in ours.named_parameters()}
    ours.load_state_dict(stock.state_dict())
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(70, 2, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    out_gradient = torch.randn(70, 2, 16, generator=generator, dtype=torch.float64)
    results = []
    for module in (ours, stock):
        out, bias = module(x, None)
        assert bias is None
        parameters = dict(module.named_parameters())
        leaves = [x, *(parameters[name] for name in names)]
        gradients = torch.autograd.grad(out, leaves, out_gradient)
        if module is stock:
            # Its gradients of the norm's weights are of each rank's own heads; ours are summed.
            torch.distributed.all_reduce(gradients[1 + list(names).index("out_norm.weight")])
        results.append([out, *gradients])
    worst = {}
    for what, a, b in zip(["out", "x", *names], *results, strict=True):
        worst[what] = ((a - b).abs().max() / b.abs().max()).item()
    return worst


def test_gdn_has_the_parameters_of_megatrons_layer_and_computes_the_same(megatron_ranks_fp64):
    for worst in megatron_ranks_fp64.run(ours_and_stock, world_size=2):
        assert len(worst) > 6 and max(worst.values()) < 1e-10, worst


# --- training -----------------------------------------------------------------------------------

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type none "
    "--max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--make-vocab-size-divisible-by 80 --longseq-linear-attention"
).split()
KDA = [*TINY, "kda"]
MIXED = [
    *TINY,
    *"lightning --linear-attention-freq 2 --position-embedding-type rope".split(),
    *"--longseq-context-parallel 2d".split(),
]
PATTERNED = [
    *TINY,
    *"gdn --hybrid-layer-pattern G-*-G- --position-embedding-type rope".split(),
    *"--longseq-context-parallel 2d".split(),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "first", "others"),
    [
        (KDA, (4, f"{SP} {CP} 2"), [(1, ""), (4, f"{PP} {CP} 2")]),
        (MIXED, (2, f"{CP} 2"), [(2, SP)]),
        (PATTERNED, (2, f"{CP} 2"), [(2, SP), (2, f"{PP} --hybrid-layer-pattern G-*|-G-")]),
    ],
    ids=["kda", "hybrid", "pattern of layers"],
)
def test_a_checkpoint_resumes_with_its_optimizer_in_other_layouts(
    model, first, others, megatron_ranks, tmp_path, corpus
):
    ranks, flags = first
    zero = "--use-distributed-optimizer"
    save = f"--save {tmp_path / 'c'} --save-interval 2"
    whole = train(
        megatron_ranks,
        tmp_path / "whole",
        f"{zero} {flags} {save}",
        processes=ranks,
        data=corpus,
        model=model,
    )
    load = f"--load {tmp_path / 'c'} --ckpt-step 2 --no-load-rng"
    for number, (ranks, flags) in enumerate(others):
        rest = train(
            megatron_ranks,
            tmp_path / f"rest{number}",
            f"{zero} {flags} {load}",
            processes=ranks,
            data=corpus,
            model=model,
        )
        assert losses(rest) == pytest.approx(losses(whole)[2:], rel=1e-5)


def test_a_pattern_names_the_layers_that_are_built(megatron_ranks, tmp_path):
    train(megatron_ranks, tmp_path, f"{CP} 2", processes=2, steps=1, model=PATTERNED)
    text = log(tmp_path)
    assert "2 layers on this rank: linear attention gdn, 4 key and 4 value heads of 16" in text
    assert (
        "1 layer on this rank: attention SelfAttention with 2D attention, 2 head-parallel" in text
    )
    assert "3 layers on this rank: MLP MLP" in text


def test_bf16_evaluation_and_the_start_up_lines(megatron_ranks, tmp_path, corpus):
    flags = f"{CP} 2 --eval-iters 1 --eval-interval 2"
    plain = train(megatron_ranks, tmp_path / "a", flags, processes=2, data=corpus, model=MIXED)
    half = train(
        megatron_ranks, tmp_path / "b", f"{flags} --bf16", processes=2, data=corpus, model=MIXED
    )
    assert losses(half) == pytest.approx(losses(plain), rel=5e-3)
    text = log(tmp_path / "a")
    assert "1 layer on this rank: linear attention lightning, 4 key and 4 value heads of 16" in text
    assert "states of 4 KiB per sequence over 2 ranks, zigzag, schedule auto" in text
    assert (
        "1 layer on this rank: attention SelfAttention with 2D attention, 2 head-parallel" in text
    )
    assert "validation loss at iteration 4" in log(tmp_path / "a", rank=1)
