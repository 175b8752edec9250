"""The demo, on a model of seconds: a table, a picture, numbers, and a verdict."""

import json

import pytest

from megatron_longseq.cli import main
from megatron_longseq.compare.rows import read_rows
from megatron_longseq.errors import UserError

RUN = """
arguments:
  num-layers: 2
  hidden-size: 32
  num-attention-heads: 2
  seq-length: 64
  max-position-embeddings: 64
  micro-batch-size: 1
  global-batch-size: 2
  train-iters: 4
  lr: 0.01
  lr-decay-style: constant
  split: "99,1,0"
  tokenizer-type: NullTokenizer
  vocab-size: 257
  make-vocab-size-divisible-by: 80
  eval-iters: 0
"""
ROWS = """
rows:
  - {label: one process, processes: 1, arguments: {}}
  - {label: TP 2, processes: 2, arguments: {tensor-model-parallel-size: 2}}
"""
LINEAR = """
models:
  linear: {longseq-linear-attention: gdn, position-embedding-type: none}
rows:
  - {label: one process, processes: 1, arguments: {}}
  - {label: linear, model: linear, processes: 1, arguments: {}}
  - {label: linear 2, model: linear, processes: 2, arguments: {context-parallel-size: 2}}
"""
OTHER_LEARNING_RATE = ROWS.replace("tensor-model-parallel-size: 2", "lr: 0.02")


def demo(folder, rows):
    (folder / "run.yaml").write_text(RUN)
    (folder / "rows.yaml").write_text(rows)
    names = {"--config": "run.yaml", "--rows": "rows.yaml", "--output": "out"}
    return main(["demo", *(w for f, n in names.items() for w in (f, str(folder / n)))])


def test_the_demo_shows_equal_losses_speed_memory_and_traffic(tmp_path, capsys):
    assert demo(tmp_path, ROWS) == 0
    output = capsys.readouterr().out
    assert "Loss per step" in output and "TP 2" in output and "tensor: " in output
    one, two = json.loads((tmp_path / "out" / "demo.json").read_text())["rows"]
    assert len(one["losses"]) == 4 and one["losses"][-1] < one["losses"][0]
    assert max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True)) < 1e-5
    assert one["bytes_sent"] == {}
    # Two layers, two all-reduces of [64, 1, 32] floats each way; a ring of two sends each once.
    # Then the embedding's output, the logits' gradient, and the loss's [1, 64] sums.
    sent = two["bytes_sent"]["TENSOR_MODEL_PARALLEL_GROUP"]
    per_micro_batch = (2 * 2 * 2 + 2) * 64 * 32 * 4 + 3 * 64 * 4
    tokens = 4 * 64 * 8 + 64 * 4  # broadcast of tokens, labels, positions (int64), loss mask
    assert 2 * per_micro_batch <= sent <= 2 * (per_micro_batch + tokens) + 4096
    assert one["peak_bytes"] > two["peak_bytes"] > 100_000
    assert one["tokens_per_second"] > 0
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_when_a_layout_trains_to_another_loss(tmp_path, capsys):
    assert demo(tmp_path, OTHER_LEARNING_RATE) == 1
    assert "WRONG: other losses than the model's first row: TP 2" in capsys.readouterr().out


def test_a_model_of_other_layers_is_compared_with_itself(tmp_path, capsys):
    assert demo(tmp_path, LINEAR) == 0
    assert "Loss per step, linear" in capsys.readouterr().out
    plain, linear, split = json.loads((tmp_path / "out" / "demo.json").read_text())["rows"]
    assert linear["losses"] == pytest.approx(split["losses"], abs=1e-5)
    assert abs(linear["losses"][-1] - plain["losses"][-1]) > 1e-3
    (tmp_path / "rows.yaml").write_text(LINEAR.replace("model: linear", "model: other"))
    with pytest.raises(UserError, match="there is no model 'other'; there are: linear"):
        read_rows(tmp_path / "rows.yaml")
