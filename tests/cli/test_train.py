"""``longseq train``: a run from a file, and the exact line that it stands for."""

import shlex
import sys

import pytest

from megatron_longseq.cli import main

RUN = """
processes: 2
arguments:
  num-layers: 2
  hidden-size: 32
  num-attention-heads: 2
  seq-length: 32
  max-position-embeddings: 32
  micro-batch-size: 1
  global-batch-size: 2
  train-iters: 2
  lr: 0.001
  mock-data: true
  tokenizer-type: NullTokenizer
  vocab-size: 257
  tensor-model-parallel-size: 2
  eval-iters: 0
  log-interval: 1
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(RUN)
    return str(path)


def test_a_run_file_trains_and_shows_rank_0(run_file, capfd):
    assert main(["train", "--config", run_file, "--", "--train-iters", "3"]) == 0
    output = capfd.readouterr().out
    assert "iteration        3/       3" in output
    assert "tensor parallel 2: [0 1]" in output


def test_print_command_prints_the_line_that_torchrun_takes(run_file, capsys):
    assert main(["train", "--config", run_file, "--print-command", "--", "--seed", "5"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("-m", 3) + 1] == "megatron_longseq.pretrain_gpt"
    assert "--mock-data" in words and words[-2:] == ["--seed", "5"]


def test_a_bad_flag_ends_with_one_line_and_status_2(run_file, capfd):
    status = main(["train", "--config", run_file, "--", "--tensor-model-parallel-size", "3"])
    captured = capfd.readouterr()
    assert status == 2
    assert captured.err.count("--tensor-model-parallel-size 3") == 1
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err + captured.out


def test_too_few_processes_are_named(run_file, capfd):
    assert main(["train", "--config", run_file, "--processes", "1"]) == 2
    assert "needs 2 processes" in capfd.readouterr().err
