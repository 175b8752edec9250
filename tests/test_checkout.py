"""``--megatron-path``: what is a checkout, and Megatron from there and nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_longseq.checkout import find_checkout
from megatron_longseq.errors import NodeError, UserError

VERSION = "MAJOR = 0\nMINOR = {}\nPATCH = 1\nPRE_RELEASE = '{}'\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "Megatron-LM"
    (path / "megatron" / "core").mkdir(parents=True)
    (path / "megatron" / "training").mkdir()
    (path / "megatron" / "core" / "package_info.py").write_text(VERSION.format(19, ""))
    (path / "pretrain_gpt.py").write_text("")
    return path


def test_a_checkout_is_known_by_its_files_and_version(folder):
    found = find_checkout(folder)
    assert (found.path, found.version) == (folder, "0.19.1")
    info = folder / "megatron" / "core" / "package_info.py"
    info.write_text(VERSION.format(19, "rc0"))
    assert find_checkout(folder).version == "0.19.1rc0"


@pytest.mark.parametrize("missing", ["pretrain_gpt.py", "megatron/training"])
def test_what_misses_a_part_is_no_checkout(missing, folder):
    path = folder / missing
    path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(NodeError, match=f"--megatron-path .*no Megatron-LM checkout: no {missing}"):
        find_checkout(folder)


@pytest.mark.parametrize("words", ["", "hello", VERSION.format(18, ""), VERSION.format(20, "")])
def test_another_release_is_refused_with_the_branch_that_works(words, folder):
    (folder / "megatron" / "core" / "package_info.py").write_text(words)
    with pytest.raises(
        NodeError, match=r"this release supports 0\.19\.x: check out core_r0\.19\.0"
    ):
        find_checkout(folder)


def test_an_entry_point_with_a_bad_checkout_ends_in_one_line(tmp_path):
    # Before torch is imported, so that a slip of the finger costs no minute on a cluster.
    command = [sys.executable, "-m", "megatron_longseq.pretrain_gpt", "--megatron-path", "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert result.returncode == 2
    assert result.stderr == (
        "error: --megatron-path nowhere: no such folder; name the folder that holds "
        "pretrain_gpt.py and megatron/\n"
    )


def use_another_megatron(folder: str) -> None:
    from megatron_longseq.pretrain_gpt import prepare_process

    prepare_process(["--megatron-path", folder])


def test_a_process_that_has_imported_another_megatron_says_from_where(megatron_ranks, folder):
    with pytest.raises(UserError) as caught:
        megatron_ranks.run(use_another_megatron, world_size=1, args=(str(folder),))
    assert f"--megatron-path {folder}: this process imports Megatron from " in str(caught.value)
    assert f"torchrun .. -m megatron_longseq.pretrain_gpt --megatron-path {folder}" in str(
        caught.value
    )


def test_a_run_file_may_name_a_checkout(megatron_ranks, folder, tmp_path):
    from megatron_longseq.cli.train import resolve

    (tmp_path / "run.yaml").write_text(f"arguments:\n  megatron-path: {folder}\n")
    run = megatron_ranks.run(resolve, world_size=1, args=(str(tmp_path / "run.yaml"), []))[0]
    assert run.argv == ["--megatron-path", str(folder)]


def test_a_script_without_its_functions_is_named(ranks, folder):
    (folder / "pretrain_gpt.py").write_text("def forward_step(): ...\n")
    with pytest.raises(UserError) as caught:
        ranks.run(script_without_functions, world_size=1, args=(str(folder),))
    assert "defines no train_valid_test_datasets_provider" in str(caught.value)


def script_without_functions(folder: str) -> None:
    from megatron_longseq import checkout

    checkout.import_script(checkout.find_checkout(folder))
