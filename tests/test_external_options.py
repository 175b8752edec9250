"""Options from $LONGSEQ_CONFIG, for a layer spec that is called with Megatron's own config."""

import pytest

from megatron_longseq.errors import UserError


def plain_config(**fields):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            **fields,
        }
    )


def options_from(text: str | None, folder: str, fields: dict) -> dict:
    """What a plain config has after it was completed from a file with this text."""
    import os
    from pathlib import Path

    from megatron_longseq.config import options
    from megatron_longseq.external_options import VARIABLE, options_for

    os.environ.pop(VARIABLE, None)
    if text is not None:
        path = Path(folder) / "options.yaml"
        path.write_text(text)
        os.environ[VARIABLE] = str(path)
    config = plain_config(**fields)
    assert options_for(config) is config
    return {field.name: getattr(config, field.name) for field in options()}


@pytest.fixture
def read(megatron_ranks, tmp_path):
    def run(text, **fields):
        arguments = (text, str(tmp_path), fields)
        return megatron_ranks.run(options_from, world_size=1, args=arguments)[0]

    return run


def test_what_the_file_leaves_out_has_its_default(read):
    for text in ("", "{}", "# nothing yet\n"):
        found = read(text)
        assert found["longseq_context_parallel"] == "megatron"
        assert found["longseq_comm_timeout_seconds"] == 1800.0


def test_keys_are_the_flags_without_dashes(read):
    text = "longseq-context-parallel: 2d\nlongseq_comm_timeout_seconds: 60\n"
    found = read(text, context_parallel_size=2, hierarchical_context_parallel_sizes=[2, 1])
    assert found["longseq_context_parallel"] == "2d"
    assert found["longseq_comm_timeout_seconds"] == 60.0
    assert found["longseq_head_parallel_size"] == 2, "read off the groups that the trainer makes"


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (None, {}, ["LONGSEQ_CONFIG", "plain TransformerConfig", "-m megatron_longseq"]),
        ("longseq-context-paralel: 2d", {}, ["no such flag", "--longseq-context-parallel"]),
        ("num-layers: 4", {}, ["--num-layers: there is no such flag"]),
        ("longseq-context-parallel: 3d", {}, ["--longseq-context-parallel", "'3d'", "'2d'"]),
        ("longseq-comm-timeout-seconds: soon", {}, ["--longseq-comm-timeout-seconds", "soon"]),
        ("longseq-comm-timeout-seconds: -1", {}, ["--longseq-comm-timeout-seconds -1"]),
        ("longseq-device: cpu", {}, ["longseq-device has no effect", "megatron_longseq.hook"]),
        ("longseq_measure: steps", {}, ["longseq_measure has no effect"]),
        ("- longseq-context-parallel", {}, ["must be a mapping"]),
        ("a: [", {}, ["not YAML"]),
        (
            "longseq-context-parallel: 2d",
            {"context_parallel_size": 2},
            ["--hierarchical-context-parallel-sizes none", "1 2"],
        ),
        (
            "longseq-context-parallel: 2d\nlongseq-head-parallel-size: 2",
            {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [4, 1]},
            ["--hierarchical-context-parallel-sizes 4 1", "2 2"],
        ),
        (
            "longseq-context-parallel: 2d",
            {"attention_dropout": 0.1},
            ["--attention-dropout 0.1"],
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(text, fields, expected, read):
    with pytest.raises(UserError) as caught:
        read(text, **fields)
    for part in expected:
        assert part in str(caught.value)


def a_missing_file():
    import os

    from megatron_longseq.external_options import VARIABLE, options_for

    os.environ[VARIABLE] = "/nowhere/options.yaml"
    options_for(plain_config())


def test_a_missing_file_is_named(megatron_ranks):
    with pytest.raises(UserError, match=r"LONGSEQ_CONFIG=/nowhere/options\.yaml: cannot be read"):
        megatron_ranks.run(a_missing_file, world_size=1)


def hooks_of_several_chunks(folder: str) -> list[str]:
    import os
    from pathlib import Path

    from megatron.training.models.gpt import GPTModelConfig

    from megatron_longseq.config import LongSeqTransformerConfig
    from megatron_longseq.external_options import VARIABLE, prepare_model_config

    path = Path(folder) / "options.yaml"
    path.write_text("")
    os.environ[VARIABLE] = str(path)
    model = GPTModelConfig(transformer=plain_config(), vocab_size=8)
    for _chunk in range(3):
        assert prepare_model_config(model) is model.transformer
    ours = LongSeqTransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    own = GPTModelConfig(transformer=ours, vocab_size=8)
    assert prepare_model_config(own) is ours and not own.pre_wrap_hooks
    return [type(hook).__name__ for hook in model.pre_wrap_hooks]


def test_model_hooks_are_added_once_for_all_virtual_chunks(megatron_ranks, tmp_path):
    found = megatron_ranks.run(hooks_of_several_chunks, world_size=1, args=(str(tmp_path),))
    assert found[0] == ["StartupLines"]


def multi_token_prediction(folder: str) -> None:
    import os
    from pathlib import Path

    from megatron.training.models.gpt import GPTModelConfig

    from megatron_longseq.external_options import VARIABLE, prepare_model_config

    path = Path(folder) / "options.yaml"
    path.write_text("longseq-context-parallel: 2d")
    os.environ[VARIABLE] = str(path)
    prepare_model_config(GPTModelConfig(transformer=plain_config(mtp_num_layers=1), vocab_size=8))


def test_layers_that_a_spec_does_not_reach_are_refused(megatron_ranks, tmp_path):
    with pytest.raises(UserError, match="--mtp-num-layers 1"):
        megatron_ranks.run(multi_token_prediction, world_size=1, args=(str(tmp_path),))
