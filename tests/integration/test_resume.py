"""A run that stops and resumes continues exactly as if it had never stopped."""

import pytest
from training_runs import log, losses, train

ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, ""),
        (1, "--use-distributed-optimizer"),
        (2, ZERO1),
        (2, f"{ZERO1} --bf16"),
        (
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
            "--hidden-dropout 0.1 --attention-dropout 0.1",
        ),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    processes, flags, megatron_ranks, tmp_path, corpus
):
    def run(name, steps, more=""):
        return losses(
            train(
                megatron_ranks,
                tmp_path / name,
                f"{flags} {more}",
                processes=processes,
                steps=steps,
                data=corpus,
            )
        )

    save = f"--save {tmp_path / 'checkpoint'} --save-interval 2 --exit-interval 2"
    whole = run("whole", 6)
    first = run("first", 6, save)
    assert len(first) == 2
    # A step count shared by all parameters shows from the second step after the resume on.
    rest = run("rest", 6, f"--load {tmp_path / 'checkpoint'}")
    assert first + rest == whole


def test_a_checkpoint_resumes_in_another_layout_with_its_optimizer_state(
    megatron_ranks, tmp_path, corpus
):
    checkpoint = tmp_path / "checkpoint"
    whole = losses(train(megatron_ranks, tmp_path / "whole", steps=6, data=corpus))
    train(
        megatron_ranks,
        tmp_path / "dp",
        f"{ZERO1} --save {checkpoint} --save-interval 3 --exit-interval 3",
        processes=2,
        steps=6,
        data=corpus,
    )
    # Other numbers of ranks draw other random numbers, which nothing here uses.
    load = f"--load {checkpoint} --no-load-rng"
    for name, processes, flags in (
        ("tp2", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("pp2", 2, "--pipeline-model-parallel-size 2"),
        ("tp2-dp2", 4, "--tensor-model-parallel-size 2"),
    ):
        flags = f"--use-distributed-optimizer {flags} {load}"
        resumed = train(
            megatron_ranks, tmp_path / name, flags, processes=processes, steps=6, data=corpus
        )
        assert losses(resumed) == pytest.approx(whole[3:], rel=1e-6), name
        assert "dist_ckpt_optim_fully_reshardable=True" in log(tmp_path / name)


def schedule_of_a_run_that_named_no_decay() -> str:
    """What Megatron saves of it, checked against the same run started again, and a longer one."""
    from types import SimpleNamespace

    from megatron_longseq.checkpoint import SCHEDULING, check_schedule
    from megatron_longseq.errors import UserError

    fresh = dict.fromkeys([*SCHEDULING, "finetune", "no_load_optim"]) | {"train_iters": 40}
    fresh |= {"override_opt_param_scheduler": None, "use_checkpoint_opt_param_scheduler": None}
    saved = SimpleNamespace(**fresh | {"lr_decay_iters": 40})
    check_schedule("runs", saved, SimpleNamespace(**fresh))
    try:
        check_schedule("runs", saved, SimpleNamespace(**fresh | {"lr_decay_iters": 80}))
    except UserError as error:
        return str(error)
    return "accepted"


def test_a_decay_that_megatron_filled_in_is_the_same_schedule(megatron_ranks):
    message = megatron_ranks.run(schedule_of_a_run_that_named_no_decay, world_size=1)[0]
    assert "--lr-decay-iters 40, this run has 80" in message
