"""``longseq verify`` proves layouts equal to 1e-10, and notices what is wrong and where."""

import json

import pytest
import torch

from megatron_longseq.cli import main
from megatron_longseq.errors import UserError
from megatron_longseq.launch import RankFailure
from megatron_longseq.verification.session import _capture, _plan, _verdict, verify

# Untied embeddings, biases, LayerNorm and grouped queries: each has gradients of its own kind.
MODEL = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 6 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 96 --seq-length 24 --max-position-embeddings 24 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --qk-layernorm --add-qkv-bias "
    "--tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8"
).split()
SWIGLU = ["--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"]

LAYOUTS = {
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", []),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        SWIGLU,
    ),
    "tp2-dp2-zero1": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1",
        SWIGLU,
    ),
    "tp2-pp2-recompute": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        [],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_layouts_equal_one_process_in_double_precision(layout, megatron_ranks_fp64):
    processes, flags, model = LAYOUTS[layout]
    verdict = verify(
        megatron_ranks_fp64, flags=[*MODEL, *model, *flags.split()], processes=processes
    )
    assert verdict["passed"], verdict
    # Adam divides by a root of small numbers: parameters after steps are a little further apart.
    assert max(verdict[name]["relative"] for name in ("output", "loss", "gradient")) < 1e-12
    assert verdict["compared"]["modules"] >= 4 * 8
    assert verdict["compared"]["parameter pieces"] >= processes * 8


def test_single_precision_and_bf16_pass_with_their_own_tolerances(megatron_ranks):
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    exact = verify(megatron_ranks, flags=flags, processes=2, precision="fp32")
    half = verify(megatron_ranks, flags=flags, processes=2, precision="bf16")
    assert exact["passed"] and half["passed"], (exact, half)
    assert 0 < exact["gradient"]["relative"] < half["gradient"]["relative"]


def forget_to_sum_gradients_of_norms():
    """What a norm does that does not know of sequence parallelism."""
    from megatron_longseq import norms

    build = norms.SequenceParallelNorm.__init__

    def unmarked(self, *args, **kwargs):
        build(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.sequence_parallel = False

    norms.SequenceParallelNorm.__init__ = unmarked


def scale_one_layer():
    """A layer that computes something else under tensor parallelism."""
    from megatron.core.transformer.attention import SelfAttention

    forward = SelfAttention.forward

    def scaled(self, *args, **kwargs):
        output, bias = forward(self, *args, **kwargs)
        return (output * (1 + 1e-6) if self.layer_number == 3 else output), bias

    SelfAttention.forward = scaled


def stop_the_optimizer():
    """An optimizer that forgets one rank's parameters."""
    from torch.optim import AdamW

    step = AdamW.step

    def lazy(self, *args, **kwargs):
        return None if torch.distributed.get_rank() == 1 else step(self, *args, **kwargs)

    AdamW.step = lazy


def count_tensor_parallel_copies_twice():
    """A gradient norm that takes every rank's copy of a replicated parameter for another one."""
    from megatron.core import tensor_parallel

    tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *_args, **_kwargs: True


def build_no_layers():
    """A pattern that is lost on its way to the model, as it is in both runs."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    build = TransformerBlock.__init__

    def empty(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.layers = torch.nn.ModuleList()

    TransformerBlock.__init__ = empty


def sabotaged_capture(sabotage, *args):
    globals()[sabotage]()
    _capture(*args)


def verify_sabotaged(pool, sabotage, flags, folder):
    plan = pool.run(_plan, world_size=1, args=(None, flags, 2, "one-process", "fp64", 2))[0]
    for name, (argv, processes, masked) in plan.items():
        function, args = _capture, (argv, 1, masked, f"{folder}/{name}")
        if name == "candidate":
            function, args = sabotaged_capture, (sabotage, *args)
        pool.run(function, world_size=processes, args=args)
    return pool.run(_verdict, world_size=1, args=(str(folder), "fp64"))[0]


def test_a_gradient_that_is_not_summed_is_found(megatron_ranks_fp64, tmp_path):
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    verdict = verify_sabotaged(
        megatron_ranks_fp64, "forget_to_sum_gradients_of_norms", flags, tmp_path
    )
    assert not verdict["passed"]
    assert verdict["output"]["relative"] < 1e-12 and verdict["first_module"] is None
    assert verdict["gradient"]["relative"] > 1e-3 and "norm" in verdict["gradient"]["where"]


def test_the_first_module_that_differs_is_named(megatron_ranks_fp64, tmp_path):
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    verdict = verify_sabotaged(megatron_ranks_fp64, "scale_one_layer", flags, tmp_path)
    assert not verdict["passed"]
    assert verdict["first_module"] == "decoder.layers.2.self_attention"


def test_parameters_that_are_not_updated_are_found(megatron_ranks_fp64, tmp_path):
    verdict = verify_sabotaged(megatron_ranks_fp64, "stop_the_optimizer", MODEL, tmp_path)
    assert not verdict["passed"]
    assert verdict["gradient"]["relative"] < 1e-12
    assert verdict["parameter"]["relative"] > 1e-4


def test_a_model_without_its_layers_is_no_model_to_compare(megatron_ranks_fp64, tmp_path):
    with pytest.raises(RankFailure, match="the model was built with 0 of 4 layers"):
        verify_sabotaged(megatron_ranks_fp64, "build_no_layers", MODEL, tmp_path)


def test_a_gradient_norm_that_counts_copies_twice_is_found(megatron_ranks_fp64, tmp_path):
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    verdict = verify_sabotaged(
        megatron_ranks_fp64, "count_tensor_parallel_copies_twice", flags, tmp_path
    )
    assert not verdict["passed"]
    assert verdict["loss"]["where"] and verdict["gradient"]["relative"] > 1e-4


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(megatron_ranks_fp64):
    # The bias of the keys' norm moves all scores of a row alike, without rotary positions.
    flags = [*MODEL, "--position-embedding-type", "learned_absolute", "--optimizer", "sgd"]
    verdict = verify(
        megatron_ranks_fp64, flags=[*flags, "--tensor-model-parallel-size", "2"], processes=2
    )
    assert verdict["passed"], verdict


def test_the_logits_are_the_output_in_a_pipeline_too(megatron_ranks_fp64):
    flags = [*MODEL, "--pipeline-model-parallel-size", "2"]
    verdict = verify(megatron_ranks_fp64, flags=flags, processes=2, against="stock", steps=1)
    assert verdict["passed"] and verdict["output"]["where"] == "output_layer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--processes", "0"], "--processes 0: must be at least 1"),
        (["--json", "/nonexistent/verdict.json"], "--json /nonexistent/verdict.json"),
        (["--", "--bogus-flag", "3"], "--bogus-flag: there is no such flag"),
        (["--", *MODEL, "--fp16"], "--fp16"),
        ([], "verify needs --config NAME, or flags after --"),
    ],
)
def test_bad_options_end_with_one_line_and_status_2(arguments, message, capfd):
    assert main(["verify", *arguments]) == 2
    captured = capfd.readouterr()
    assert message in captured.err and "Traceback" not in captured.err + captured.out


def test_dropout_is_refused_because_no_two_layouts_share_it(megatron_ranks_fp64):
    with pytest.raises(UserError, match=r"--hidden-dropout 0\.1"):
        verify(megatron_ranks_fp64, flags=[*MODEL, "--hidden-dropout", "0.1"])


def test_the_command_says_equal_and_writes_json(tmp_path, capsys):
    path = tmp_path / "verdict.json"
    flags = [*MODEL, "--tensor-model-parallel-size", "2"]
    status = main(["verify", "--processes", "2", "--steps", "1", "--json", str(path), "--", *flags])
    assert status == 0
    assert "equal (" in capsys.readouterr().out
    verdict = json.loads(path.read_text())
    assert verdict["passed"] is True and verdict["steps"] == 1
