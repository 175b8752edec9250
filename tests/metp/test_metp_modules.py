"""METP's modules in Megatron's GPT model against Megatron's own on the same weights, in fp64.

Two ranks build models of both kinds in one process and run them by turns. Each function below is
one claim; all claims run in one pair of ranks.
"""

import traceback

import pytest

RANKS = 2
VOCABULARY = 48
LONG, SHORT = 24, 8


class Models:
    """Models of one set of weights, which stock tensor parallelism and METP share."""

    def __init__(self):
        import torch
        from megatron.core import parallel_state, tensor_parallel

        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
        tensor_parallel.model_parallel_cuda_manual_seed(3)
        self.rank = torch.distributed.get_rank()

    def build(self, method, *, model=None, like=None, hook=True, **options):
        """Returns (model, METP runtime); ``like`` gives the weights."""
        import torch
        from megatron.core.process_groups_config import ProcessGroupCollection

        from megatron_longseq.config import LongSeqTransformerConfig
        from megatron_longseq.layer_specs import longseq_layer_spec
        from megatron_longseq.model_builder import LongSeqGPTModelBuilder, LongSeqGPTModelConfig

        given = {
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 24,
            "tensor_model_parallel_size": RANKS,
            "sequence_parallel": True,
            "pipeline_dtype": torch.float64,
            "params_dtype": torch.float64,
            "transformer_impl": "local",
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "qk_layernorm": True,
            "init_method_std": 0.2,
            "longseq_tensor_parallel": method,
        }
        config = LongSeqGPTModelConfig(
            transformer=LongSeqTransformerConfig(**given | options),
            transformer_layer_spec=longseq_layer_spec,
            vocab_size=VOCABULARY,
            seq_length=LONG,
            **{"position_embedding_type": "learned_absolute"} | (model or {}),
        )
        built = LongSeqGPTModelBuilder(config).build_model(
            ProcessGroupCollection.use_mpu_process_groups()
        )
        if hook:
            for each in config.pre_wrap_hooks:
                (built,) = each([built])
        if like is not None:
            built.load_state_dict(like.state_dict())
        return built, vars(config).get("_longseq_metp")

    def batch(self, length=LONG, seed=0, rows=2):
        """Tokens, positions, labels and the weight of each loss: the same on both ranks."""
        import torch

        generator = torch.Generator().manual_seed(100 * length + seed)
        tokens, labels = torch.randint(VOCABULARY, (2, rows, length), generator=generator)
        positions = torch.arange(length).expand(rows, length)
        return tokens, positions, labels, torch.rand(rows, length, generator=generator)

    def loss(self, model, length=LONG, seed=0, **more):
        """Masked, weighted losses ``[b, s]`` of a forward."""
        tokens, positions, labels, weight = self.batch(length, seed)
        return model(tokens, positions, None, labels=labels, **more) * weight

    def gradients(self, model):
        """Gradients as the optimizer sees them: of replicated weights the sum over the ranks."""
        import torch

        found = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            grad = parameter.grad.clone()
            norm = "q_layernorm" in name or "k_layernorm" in name
            if getattr(parameter, "sequence_parallel", False) or norm:
                torch.distributed.all_reduce(grad)
            found[name] = grad
            parameter.grad = None
        return found

    def step(self, model, length=LONG, seed=0):
        losses = self.loss(model, length, seed)
        losses.sum().backward()
        return losses.detach(), self.gradients(model)


def close(found, expected, what=""):
    import torch

    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-13, msg=lambda m: f"{what}: {m}"
    )


def same(found, expected):
    """A step (losses, gradients) equals another."""
    close(found[0], expected[0], "loss")
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        close(grad, expected[1][name], name)


def refusal(call):
    from megatron_longseq.errors import UserError

    try:
        call()
    except UserError as error:
        return str(error)
    return "accepted"


# --- the claims -------------------------------------------------------------------------------


def parameters_are_those_of_megatron(m):
    """Names, order, shapes and every attribute that Megatron's optimizer and DDP read."""
    for options in ({}, {"gated_linear_unit": True, "add_bias_linear": False}):
        stock, metp = (m.build(method, **options)[0] for method in ("megatron", "metp"))
        names = [name for name, _ in stock.named_parameters()]
        assert names == [name for name, _ in metp.named_parameters()]
        for name, one in stock.named_parameters():
            other = metp.get_parameter(name)
            assert one.shape == other.shape, name
            marks = [dict(vars(p)) for p in (one, other)]
            # Each rank adds the positions of its own tokens: a sum over the ranks, which Megatron
            # makes of what is marked so.
            if name == "embedding.position_embeddings.weight":
                assert marks[1].pop("sequence_parallel") is True
                marks[0].pop("sequence_parallel", None)
            assert marks[0] == marks[1], name


def losses_and_gradients_are_those_of_megatron(m):
    for options, model in (
        ({}, {}),
        ({}, {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}),
        ({"qk_layernorm": False, "longseq_metp_min_tokens": "1000"}, {}),
    ):
        stock, _ = m.build("megatron", model=model, qk_layernorm=options.get("qk_layernorm", True))
        metp, _ = m.build("metp", model=model, like=stock, **options)
        same(m.step(metp), m.step(stock))


def logits_are_in_natural_order(m):
    """Without labels, as an evaluation harness asks: also between steps, at another length."""
    import torch

    stock, _ = m.build("megatron")
    metp, _ = m.build("metp", like=stock)
    before = m.step(metp)
    for model in (stock, metp):
        model.eval()
    with torch.no_grad():
        for length in (LONG, SHORT):
            tokens, positions, labels, _ = m.batch(length)
            close(metp(tokens, positions, None), stock(tokens, positions, None), "logits")
            evaluated = [x(tokens, positions, None, labels=labels) for x in (metp, stock)]
            close(*evaluated, "validation loss")
    metp.train()
    after = m.step(metp)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(grad, after[1][name]) for name, grad in before[1].items())


def labels_may_come_by_place(m):
    import torch

    model, _ = m.build("metp")
    tokens, positions, labels, _ = m.batch()
    by_name = model(tokens, positions, None, labels=labels)
    assert torch.equal(model(tokens, positions, None, None, labels), by_name)


def parameters_are_not_written_to(m):
    """Nor is what the ring receives ever one of them: forward and backward leave all as it was."""
    import torch

    model, _ = m.build("metp")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        m.step(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


FROZEN = {
    "embedding": ["embedding."],
    "attention": ["linear_qkv", "linear_proj", "q_layernorm"],
    "one of two": ["linear_fc1.weight", "linear_qkv.weight", "k_layernorm"],
    "biases": ["bias"],
    "MLP": ["linear_fc"],
    "first layer": ["embedding.", "decoder.layers.0."],
    "all but the norms": ["embedding.", "linear_", "output_layer"],
    "output": ["output_layer"],
}


def frozen_weights_get_no_gradient_and_change_no_other(m):
    model, _ = m.build("metp", model={"share_embeddings_and_output_weights": False})
    whole = m.step(model)
    for case, patterns in FROZEN.items():
        frozen = {n for n, _ in model.named_parameters() if any(p in n for p in patterns)}
        assert frozen, case
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        losses, gradients = m.step(model)
        assert not frozen & gradients.keys(), case
        expected = {n: g for n, g in whole[1].items() if n not in frozen}
        same((losses, gradients), (whole[0], expected))


def gradients_may_add_up_in_main_grad(m):
    """Megatron's gradient_accumulation_fusion, over two micro-batches, tied weights included."""
    import torch

    stock, _ = m.build("megatron")
    metp, _ = m.build("metp", like=stock)
    for seed in (0, 1):
        m.loss(stock, seed=seed).sum().backward()
    expected = m.gradients(stock)
    metp.config.gradient_accumulation_fusion = True
    for module in metp.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True
    ready = dict.fromkeys((n for n, _ in metp.named_parameters()), 0)
    for name, parameter in metp.named_parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
        parameter.zero_out_wgrad = name == "embedding.word_embeddings.weight"

        def collect(p, name=name):
            # What Megatron's DDP does when a gradient is ready.
            ready[name] += 1
            assert p.grad is not None
            if not p.grad_added_to_main_grad or p.zero_out_wgrad:
                p.main_grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
    for seed in (0, 1):
        m.loss(metp, seed=seed).sum().backward()
    assert set(ready.values()) == {2}, ready
    for name, parameter in metp.named_parameters():
        # Of the big weights DDP must not add what came through autograd.
        assert parameter.grad_added_to_main_grad == (
            parameter.dim() == 2 and "position" not in name
        )
        parameter.grad = parameter.main_grad
    found = m.gradients(metp)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        close(found[name], grad, name)


def the_switch_follows_the_length_of_each_micro_batch(m):
    """Alternating lengths, on either side of the limit; counted, and said once for each."""
    import contextlib
    import io

    import torch

    stock, _ = m.build("megatron")
    limit = 2 * (LONG + SHORT) // 2
    metp, runtime = m.build("metp", like=stock, longseq_metp_min_tokens=str(limit))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for seed, length in enumerate([LONG, SHORT, LONG, SHORT, SHORT]):
            same(m.step(metp, length, seed), m.step(stock, length, seed))
        in_flight = [m.loss(metp, length).sum() for length in (SHORT, LONG)]
        for loss in in_flight:
            loss.backward()
        with torch.no_grad():
            m.loss(metp)  # an evaluation does not count
    assert dict(runtime.chosen) == {("METP", 2 * LONG): 3, ("tensor parallel", 2 * SHORT): 4}
    assert "3 micro-batches of 48 tokens as METP" in runtime.summary()
    lines = printed.getvalue().splitlines()
    announced = [
        f"METP: micro-batches of 48 tokens compute as METP (at least --longseq-metp-min-tokens, "
        f"{limit})",
        f"METP: micro-batches of 16 tokens compute as tensor parallel (below "
        f"--longseq-metp-min-tokens, {limit})",
    ]
    assert lines == (announced if m.rank == 0 else [])
    sum(m.loss(stock, length).sum() for length in (SHORT, LONG)).backward()
    expected = m.gradients(stock)
    for name, grad in m.gradients(metp).items():
        close(grad, expected[name], name)


def a_length_that_does_not_split_is_refused_when_it_comes(m):
    model, _ = m.build("metp")
    message = refusal(lambda: m.loss(model, length=18))
    assert "18 tokens" in message and "nearest" in message, message


def two_models_with_other_head_counts_share_a_process(m):
    import torch

    models = [
        m.build("metp", num_attention_heads=heads, num_query_groups=groups)[0]
        for heads, groups in ((4, 1), (8, 8))
    ]
    alone = [m.step(model) for model in models]
    first, second = (m.loss(model) for model in models)
    with torch.no_grad():
        m.loss(models[0].eval())
    second.sum().backward()
    first.sum().backward()
    for model, losses, step in zip(models, (first, second), alone, strict=True):
        assert torch.equal(losses, step[0])
        found = m.gradients(model)
        assert all(torch.equal(grad, found[name]) for name, grad in step[1].items())


def dropout_draws_what_sequence_parallelism_draws(m):
    """The same places of the local tensors, other places on the other rank."""
    import torch
    from megatron.core import tensor_parallel

    dropped, states = [], []
    tracker = tensor_parallel.get_cuda_rng_tracker()
    stock, _ = m.build("megatron", hidden_dropout=0.5)
    metp, _ = m.build("metp", like=stock, hidden_dropout=0.5)
    for model in (stock, metp):
        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        seen = []
        handle = model.embedding.register_forward_hook(lambda *a, to=seen: to.append(a[2] == 0))
        m.loss(model).sum().backward()
        model.zero_grad()
        handle.remove()
        dropped.append(seen[0])
        states.append({name: state.clone() for name, state in tracker.get_states().items()})
    assert torch.equal(*dropped)
    assert 0.3 < dropped[0].double().mean() < 0.7
    assert all(torch.equal(state, states[1][name]) for name, state in states[0].items())
    everyone = [torch.empty_like(dropped[1]) for _ in range(RANKS)]
    torch.distributed.all_gather(everyone, dropped[1].contiguous())
    assert not torch.equal(*everyone)


def recomputation_drops_what_the_forward_dropped(m):
    import torch
    from megatron.core import tensor_parallel

    options = {"hidden_dropout": 0.5}
    plain, _ = m.build("metp", **options)
    steps = []
    for recompute in (
        {},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ):
        model, _ = m.build("metp", like=plain, **options, **recompute)
        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        steps.append(m.step(model))
    for losses, gradients in steps[1:]:
        assert torch.equal(losses, steps[0][0])
        assert all(torch.equal(grad, steps[0][1][name]) for name, grad in gradients.items())


def recomputed_norms_are_not_kept(m):
    """Of five hidden states per layer, held for backward, the two norms' outputs go."""
    from megatron_longseq.measurement import saved_for_backward

    held = {}
    for layers in (1, 3):
        for name, recompute in (
            ("plain", {}),
            (
                "norm",
                {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            ),
        ):
            model, _ = m.build(
                "metp",
                num_layers=layers,
                model={"position_embedding_type": "none"},
                qk_layernorm=False,
                **recompute,
            )
            with saved_for_backward(exclude=[model]) as saved:
                losses = m.loss(model)
            held[layers, name] = saved.live_bytes()
            losses.sum().backward()
    hidden = 2 * LONG // RANKS * 16 * 8  # [n, h] in fp64
    tokens = 2 * LONG // RANKS * 8
    per_layer = {name: (held[3, name] - held[1, name]) / 2 for name in ("plain", "norm")}
    # Beside them: log-sum-exp of 4 heads; mean and deviation of two norms.
    assert per_layer["plain"] == 5 * hidden + 4 * tokens + 4 * tokens, per_layer
    assert per_layer["norm"] == 3 * hidden + 4 * tokens, per_layer


def what_reaches_the_model_at_run_time_is_refused_by_name(m):
    import torch

    model, _ = m.build("metp")
    tokens, positions, labels, _ = m.batch()

    def call(*args, **more):
        return refusal(lambda: model(tokens, positions, None, *args, **more))

    nothing = torch.zeros(2, LONG, dtype=torch.bool)
    hidden = torch.zeros(LONG // RANKS, 2, 16)
    for name, message in {
        "padding_mask": call(labels=labels, padding_mask=nothing),
        "packed_seq_params": call(labels=labels, packed_seq_params=object()),
        "decoder_input": call(hidden, labels),
        "inference_context": call(inference_context=object()),
        "inference_params": call(inference_params=object()),
    }.items():
        assert f"was given {name}" in message, (name, message)
        assert "--longseq-tensor-parallel megatron" in message
    assert "output_processor" in call(labels=labels, output_processor=lambda **_: None)
    attention = model.decoder.layers[0].self_attention
    for name in ("attention_bias", "key_value_states", "rotary_pos_cos", "sequence_len_offset"):
        message = refusal(lambda name=name: attention(hidden, None, **{name: hidden}))
        assert f"was given {name}" in message, (name, message)


def what_metp_cannot_fit_is_refused_when_the_model_is_built(m):
    import torch

    from megatron_longseq.metp.language_model import InstallMetp, install

    outside, runtime = m.build(
        "metp", hook=False, model={"scatter_embedding_sequence_parallel": False}
    )
    assert "scatter_embedding_sequence_parallel" in refusal(lambda: install(outside, runtime))
    assert "is a Linear" in refusal(lambda: install(torch.nn.Linear(1, 1), runtime))
    own, runtime = m.build("metp", hook=False)
    own.output_layer = torch.nn.Linear(1, 1)
    assert "has a Linear where it knows ColumnParallelLinear" in refusal(
        lambda: install(own, runtime)
    )
    masked, runtime = m.build("metp")
    masked.decoder.layers[0].self_attention.attn_mask_type = masked_type()
    assert "attention mask padding" in refusal(lambda: m.loss(masked))
    assert InstallMetp(runtime) == InstallMetp(runtime) != InstallMetp(object())


def masked_type():
    from megatron.core.transformer.enums import AttnMaskType

    return AttnMaskType.padding


def a_full_mask_sees_every_token(m):
    """attn_mask_type no_mask: bidirectional attention, against the stock module's own."""
    from megatron.core.transformer.enums import AttnMaskType

    stock, _ = m.build("megatron")
    metp, _ = m.build("metp", like=stock)
    causal = m.step(metp)
    for model in (stock, metp):
        for layer in model.decoder.layers:
            layer.self_attention.attn_mask_type = AttnMaskType.no_mask
    for layer in stock.decoder.layers:
        softmax = layer.self_attention.core_attention.scale_mask_softmax
        softmax.attn_mask_type = AttnMaskType.no_mask
        softmax.mask_func = None
    full = m.step(metp)
    same(full, m.step(stock))
    assert not full[0].allclose(causal[0])


def modules_describe_themselves(m):
    model, _ = m.build("metp", longseq_mlp_tiles=2)
    layer = model.decoder.layers[0]
    assert layer.self_attention.describe().startswith(
        "METP attention, 2 steps of 2 heads, K/V of 2"
    )
    assert "2 weight shards" in layer.mlp.describe() and "rows in 2 tiles" in layer.mlp.describe()


CLAIMS = [
    parameters_are_those_of_megatron,
    losses_and_gradients_are_those_of_megatron,
    logits_are_in_natural_order,
    labels_may_come_by_place,
    parameters_are_not_written_to,
    frozen_weights_get_no_gradient_and_change_no_other,
    gradients_may_add_up_in_main_grad,
    the_switch_follows_the_length_of_each_micro_batch,
    a_length_that_does_not_split_is_refused_when_it_comes,
    two_models_with_other_head_counts_share_a_process,
    dropout_draws_what_sequence_parallelism_draws,
    recomputation_drops_what_the_forward_dropped,
    recomputed_norms_are_not_kept,
    what_reaches_the_model_at_run_time_is_refused_by_name,
    what_metp_cannot_fit_is_refused_when_the_model_is_built,
    a_full_mask_sees_every_token,
    modules_describe_themselves,
]


def all_claims():
    import contextlib

    models, found = Models(), {}
    for claim in CLAIMS:
        try:
            claim(models)
        except Exception:
            with contextlib.suppress(Exception):
                found[claim.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def failures(megatron_ranks_fp64):
    return megatron_ranks_fp64.run(all_claims, world_size=RANKS, timeout_seconds=200)


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_in_megatrons_model(claim, failures):
    failed = [rank[claim] for rank in failures if claim in rank]
    assert not failed, "\n".join(failed)
