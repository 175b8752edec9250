"""Full recompute that keeps what attention has computed: exact, and attention runs once."""

import dataclasses

import pytest
from training_runs import log, losses, train

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
LAYERS, TOKENS = 3, 24


def start(context, tensor=1, **transformer):
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from megatron_longseq.config import LongSeqTransformerConfig

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        hierarchical_context_parallel_sizes=[1, context] if context > 1 else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return LongSeqTransformerConfig(
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        context_parallel_size=context,
        transformer_impl="local",
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **transformer,
    )


def model(transformer):
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_longseq.layer_specs import longseq_layer_spec
    from megatron_longseq.model_builder import LongSeqGPTModelBuilder, LongSeqGPTModelConfig

    config = LongSeqGPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=longseq_layer_spec,
        vocab_size=32,
        seq_length=TOKENS,
        position_embedding_type="none",
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    gpt = LongSeqGPTModelBuilder(config).build_model(groups)
    return config.pre_wrap_hooks[0]([gpt])[0] if config.pre_wrap_hooks else gpt


class Attentions:
    """Counts the passes of attention around the ranks, forward, of every kind of layer."""

    def __init__(self):
        from megatron_longseq.attention_2d import attention
        from megatron_longseq.communication.scan import Scan
        from megatron_longseq.lasp.halo import CausalConvolution
        from megatron_longseq.metp import head_groups

        self.forward = 0
        self.scans = 0
        self.halos = 0
        for module in (attention, head_groups):
            module.ring_attention_forward = self.counted(module.ring_attention_forward, "forward")
        Scan.start = self.counted(Scan.start, "scans")
        CausalConvolution.pass_on = self.counted(CausalConvolution.pass_on, "halos")

    def counted(self, function, name):
        def call(*args, **kwargs):
            setattr(self, name, getattr(self, name) + 1)
            return function(*args, **kwargs)

        return call

    def take(self):
        counts = self.forward, self.scans, self.halos
        self.forward = self.scans = self.halos = 0
        return counts


def in_every_way(context, tensor, options):
    """Counts, losses and gradients of three micro-batches in flight, by what is recomputed."""
    import torch

    transformer = start(context, tensor, **options)
    counts, found, weights = Attentions(), {}, None
    keep = {"longseq_keep_attention_output": True}
    ways = {
        "nothing": {},
        "full": FULL,
        "kept": FULL | keep,
        "on the host": FULL | keep | {"longseq_keep_attention_offload": True},
        "two of three layers": FULL | keep | {"longseq_keep_attention_layers": 0.67},
        "half of the tokens": FULL | keep | {"longseq_keep_attention_tokens": 0.5},
        "a block of one": FULL | keep | {"recompute_method": "block", "recompute_num_layers": 1},
    }
    if options.get("longseq_context_parallel") != "2d":
        del ways["half of the tokens"]  # refused: only 2D attention can keep a part of them
    batches = [(torch.arange(TOKENS // context)[None] + i) % 32 for i in range(3)]
    for name, changes in ways.items():
        gpt = model(dataclasses.replace(transformer, **changes))
        if weights is None:
            weights = gpt.state_dict()
        gpt.load_state_dict(weights)
        results = []
        # As a pipeline has them: forward of all, then backward in the order of forward.
        for order in (range(3), reversed(range(3))):
            gpt.zero_grad()
            losses = [gpt(batch, batch, None, labels=batch).sum() for batch in batches]
            with torch.no_grad():  # an evaluation while they are in flight
                gpt.eval()(batches[0], batches[0], None)
            gpt.train()
            for index in order:
                losses[index].backward()
            results.append([p.grad.clone() for p in gpt.parameters()])
        found[name] = counts.take(), results
    wanted = found["nothing"][1]
    return {
        name: (
            counted,
            max(
                (a - b).abs().max().item() / max(b.abs().max().item(), 1e-3)
                for both in zip(results, wanted, strict=True)
                for a, b in zip(*both, strict=True)
            ),
        )
        for name, (counted, results) in found.items()
    }


def test_softmax_attention_runs_once_per_layer_and_micro_batch(megatron_ranks_fp64):
    options = {"longseq_context_parallel": "2d", "num_query_groups": 2}
    for found in megatron_ranks_fp64.run(in_every_way, world_size=2, args=(2, 1, options)):
        assert max(difference for _, difference in found.values()) < 1e-12
        # Two orders, each three micro-batches and one evaluation, of three layers.
        once, again = 2 * 4 * LAYERS, 2 * 3
        forwards = {name: counts[0] for name, (counts, _) in found.items()}
        assert forwards == {
            "nothing": once,
            "full": once + again * LAYERS,
            "kept": once,
            "on the host": once,
            "two of three layers": once + again,
            "half of the tokens": once + again * LAYERS,  # over fewer rows
            "a block of one": once,
        }


def test_states_of_linear_layers_do_not_travel_again(megatron_ranks_fp64):
    options = {"longseq_linear_attention": "gdn"}
    for found in megatron_ranks_fp64.run(in_every_way, world_size=2, args=(2, 1, options)):
        assert max(difference for _, difference in found.values()) < 1e-12
        (_, scans, halos), _ = found["nothing"]
        assert scans and halos
        assert found["kept"][0] == found["nothing"][0] == found["a block of one"][0]
        assert found["on the host"][0] == found["nothing"][0]
        assert found["full"][0][1] == scans + 2 * 3 * LAYERS
        assert found["full"][0][2] == halos + 2 * 3 * LAYERS


def test_metp_circulates_no_keys_again(megatron_ranks_fp64):
    options = {"longseq_tensor_parallel": "metp"}
    for found in megatron_ranks_fp64.run(in_every_way, world_size=2, args=(1, 2, options)):
        assert max(difference for _, difference in found.values()) < 1e-12
        assert found["kept"][0] == found["on the host"][0] == found["nothing"][0]
        assert found["full"][0][0] == found["nothing"][0][0] + 2 * 3 * LAYERS * 2  # two shards


def behind_frozen_weights():
    """Largest difference of gradients, kept against not recomputed, the embedding being frozen."""
    import torch

    config = start(1, longseq_context_parallel="2d")
    keep = {"longseq_keep_attention_output": True}
    batch, found = torch.arange(TOKENS)[None], []
    weights = None
    for changes in ({}, FULL | keep):
        gpt = model(dataclasses.replace(config, **changes))
        weights = weights or gpt.state_dict()
        gpt.load_state_dict(weights)
        gpt.embedding.requires_grad_(False)
        gpt(batch, batch, None, labels=batch).sum().backward()
        found.append({n: p.grad for n, p in gpt.decoder.named_parameters()})
    plain, kept = found
    return max((plain[name] - kept[name]).abs().max().item() for name in plain)


def test_layers_behind_frozen_weights_have_their_gradients(megatron_ranks_fp64):
    assert megatron_ranks_fp64.run(behind_frozen_weights, world_size=1)[0] < 1e-12


def bytes_kept():
    """What a layer's forward leaves for backward, more than if it kept nothing of attention."""
    import torch

    from megatron_longseq.measurement import LiveBytes

    config = start(2, longseq_context_parallel="2d", longseq_keep_attention_output=True, **FULL)
    layer = model(config).decoder.layers[1]
    hidden = torch.randn(TOKENS // 2, 1, 16, requires_grad=True)
    held = {}
    for share in (1.0, 0.0, 1.0, 0.5, 0.0):  # the first time buffers are made
        layer.kept_share = share
        with LiveBytes() as live:
            live.include(hidden, layer)
            before = live.current()
            out, _ = layer(hidden_states=hidden, attention_mask=None)
            held[share] = live.current() - before - out.untyped_storage().nbytes()
        out.sum().backward()
    return held[1.0] - held[0.0], held[0.5] - held[0.0], hidden.element_size()


def test_bytes_kept_equal_the_formula(megatron_ranks_fp64):
    for kept, half, element in megatron_ranks_fp64.run(bytes_kept, world_size=2):
        tokens, hidden, heads = TOKENS // 2, 16, 4
        # Attention's output, and a log-sum-exp per head in the dtype of the sums.
        assert kept == tokens * (hidden + heads) * element
        assert half == kept / 2


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(
            "--context-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            4,
            id="interleaved pipeline",
        ),
    ],
)
def test_a_run_keeps_its_losses(megatron_ranks, tmp_path, corpus, flags, ranks):
    two_d = f"--longseq-context-parallel 2d {flags}"
    plain = train(megatron_ranks, tmp_path / "plain", two_d, processes=ranks, data=corpus)
    kept = train(
        megatron_ranks,
        tmp_path / "kept",
        f"{two_d} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --longseq-keep-attention-output --longseq-keep-attention-offload",
        processes=ranks,
        data=corpus,
    )
    assert losses(kept) == pytest.approx(losses(plain), rel=1e-6)
    assert "recomputed but for its attention, kept in host memory" in log(tmp_path / "kept")
