"""What a user can lose or break: a clear error, once, non-zero everywhere, and nothing lost."""

import os
import shutil
import subprocess

import pytest
from training_runs import MODEL, RUN, losses, train

from megatron_longseq.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(megatron_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    train(megatron_ranks, folder / "run", f"--save {folder / 'c'} --save-interval 1", steps=1)
    return folder / "c"


def refusal(pool, folder, flags, **options):
    with pytest.raises(UserError) as caught:
        train(pool, folder, flags, **options)
    message = str(caught.value)
    assert "Traceback" not in message
    return message


def test_a_checkpoint_of_another_model_is_refused_by_name(megatron_ranks, tmp_path, checkpoint):
    message = refusal(
        megatron_ranks, tmp_path, f"--load {checkpoint} --hidden-size 32 --num-query-groups 2"
    )
    assert "--hidden-size 64" in message and "this run has 32" in message


def test_a_vocabulary_padded_otherwise_says_how_to_pad(megatron_ranks, tmp_path, checkpoint):
    message = refusal(
        megatron_ranks, tmp_path, f"--load {checkpoint} --make-vocab-size-divisible-by 128"
    )
    assert "--padded-vocab-size 320" in message
    assert "--make-vocab-size-divisible-by 128" in message


def test_loading_from_where_nothing_is_does_not_start_from_random(megatron_ranks, tmp_path):
    message = refusal(megatron_ranks, tmp_path, f"--load {tmp_path / 'empty'}")
    assert "--load" in message and "there is no checkpoint" in message


def test_the_usual_way_to_resume_starts_where_nothing_is_yet(megatron_ranks, tmp_path):
    flags = f"--load {tmp_path / 'c'} --save {tmp_path / 'c'} --save-interval 1"
    assert len(train(megatron_ranks, tmp_path / "a", flags, steps=1)) == 1


def test_a_damaged_checkpoint_is_refused(megatron_ranks, tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path / "c")
    part = tmp_path / "c" / "iter_0000001" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:100])
    assert "damaged" in refusal(megatron_ranks, tmp_path, f"--load {tmp_path / 'c'}")
    shutil.rmtree(part.parent)
    assert "iter_0000001" in refusal(megatron_ranks, tmp_path, f"--load {tmp_path / 'c'}")


def test_a_schedule_of_another_length_says_which_flag_decides(megatron_ranks, tmp_path, checkpoint):
    message = refusal(megatron_ranks, tmp_path, f"--load {checkpoint}", steps=3)
    assert "--train-iters 1" in message and "this run has 3" in message
    flags = f"--load {checkpoint} --override-opt-param-scheduler"
    assert len(train(megatron_ranks, tmp_path / "a", flags, steps=3)) == 2


def test_a_save_folder_that_cannot_be_written_is_refused(megatron_ranks, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(
        megatron_ranks, tmp_path, f"--save {tmp_path / 'file' / 'c'} --save-interval 1"
    )
    assert "--save" in message and "not a folder that can be written" in message


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "another tokenizer"])
def test_a_broken_corpus_is_refused_by_name(damage, megatron_ranks, tmp_path, corpus):
    prefix = tmp_path / "broken"
    for ending in (".bin", ".idx", ".json"):
        shutil.copy(f"{corpus}{ending}", f"{prefix}{ending}")
    binary = tmp_path / "broken.bin"
    flags, expected = "", "--data-path"
    if damage == "missing":
        binary.unlink()
    elif damage == "truncated":
        binary.write_bytes(binary.read_bytes()[:1000])
        expected = "1,000"
    elif damage == "empty":
        binary.write_bytes(b"")
    else:
        flags, expected = "--vocab-size 300", "vocabulary of 257"
    message = refusal(megatron_ranks, tmp_path, flags, data=prefix)
    assert str(prefix) in message and expected in message


def test_a_full_disk_names_the_folder_and_keeps_the_earlier_checkpoint(megatron_ranks, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        save = f"--save {disk / 'c'} --save-interval 1"
        message = refusal(megatron_ranks, tmp_path / "a", save, processes=2, steps=5)
        assert "could not be written" in message and "bytes are free" in message
        assert f"{disk / 'c'}" in message and "the checkpoint of step 1 is whole" in message
        done = (disk / "c" / "latest_checkpointed_iteration.txt").read_text()
        for rest in (disk / "c").glob(f"iter_{int(done) + 1:07d}"):
            shutil.rmtree(rest)  # make room
        resumed = train(megatron_ranks, tmp_path / "b", f"--load {disk / 'c'}", steps=5)
        assert len(losses(resumed)) == 5 - int(done)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def torchrun(flags, processes, timeout=120):
    import sys

    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--master-addr", "127.0.0.1", "--master-port", "0", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "127.0.0.1:0", "-m", "megatron_longseq.pretrain_gpt"),
        *MODEL,
        *RUN,
        *flags,
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


def test_torchrun_trains_with_the_same_entry_point():
    flags = "--mock-data --train-iters 2 --tensor-model-parallel-size 2 --sequence-parallel"
    result = torchrun(flags.split(), 2)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "tensor parallel 2: [0 1]" in result.stdout
    assert "iteration        2/       2" in result.stdout


def test_under_torchrun_a_bad_flag_is_said_once_and_every_rank_fails():
    flags = "--mock-data --train-iters 2 --tensor-model-parallel-size 3"
    result = torchrun(flags.split(), 2)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert output.count("error: --tensor-model-parallel-size 3") == 1
    # torchrun adds its own report of failed ranks; the ranks themselves print no stack.
    assert "megatron_longseq/pretrain_gpt.py" not in output
