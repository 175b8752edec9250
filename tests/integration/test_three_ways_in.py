"""Stock, patched, hooked, wrapped and ``--spec``: the same run, step for step.

Each runs twice: on a tiny script beside the installed wheel, and on the Megatron-LM checkout that
the environment variable ``MEGATRON_LM_PATH`` names. Without it the latter are skipped.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from script_runs import (
    CHECKOUT_VARIABLE,
    PRELOAD,
    make_checkout,
    steps_of_entry_point,
    steps_of_script,
)
from training_runs import MODEL, RUN

from megatron_longseq.cli import main
from megatron_longseq.hook import LINES
from megatron_longseq.launch import RankFailure, RankPool
from megatron_longseq.measurement.step_records import merge_steps, read_steps

ANCHOR = 'if __name__ == "__main__":'
SPEC = "--spec megatron_longseq.layer_specs longseq_layer_spec"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
NOT_NAMED = (
    "not run: MEGATRON_LM_PATH names no Megatron-LM checkout (git clone --branch core_r0.19.0)"
)
WAYS = ("patched", "hooked", "wrapped", "spec")


@pytest.fixture(scope="module", params=["tiny script", "Megatron-LM"])
def checkout(request, tmp_path_factory) -> Path:
    source = None
    if request.param == "Megatron-LM":
        if not os.environ.get("MEGATRON_LM_PATH"):
            pytest.skip(NOT_NAMED)
        source = Path(os.environ["MEGATRON_LM_PATH"])
    return make_checkout(tmp_path_factory.mktemp("checkout") / "Megatron-LM", source)


def is_real(checkout: Path) -> bool:
    """Megatron-LM itself, not the tiny script beside the wheel."""
    return (checkout / "gpt_builders.py").exists()


def layouts(checkout: Path) -> list[tuple[int, str]]:
    """Processes and flags; one layout says enough about the tiny script."""
    return [(1, ""), (2, TP2)] if is_real(checkout) else [(1, "")]


@pytest.fixture(scope="module")
def pool(checkout):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(CHECKOUT_VARIABLE, str(checkout))
        with RankPool(preload=PRELOAD) as pool:
            pool.start()
            yield pool


@pytest.fixture(scope="module")
def stock(pool, checkout, tmp_path_factory):
    """The steps of the unchanged script, by layout."""
    logs = tmp_path_factory.mktemp("stock")
    runs = {
        flags: steps_of_script(
            pool, checkout / "pretrain_gpt.py", logs / str(processes), flags, processes=processes
        )
        for processes, flags in layouts(checkout)
    }
    for steps in runs.values():
        assert len(steps) == 5
        assert float(steps[-1][0]) < float(steps[0][0]), "it must learn, or equality says nothing"
    return runs


def patched(checkout: Path, folder: Path) -> Path:
    """The script with the shipped patch."""
    copy = make_checkout_view(checkout, folder)
    edited = [] if is_real(checkout) else ["--edited"]
    assert main(["patch", "--megatron-path", str(copy), *edited, "apply"]) == 0
    return copy / "pretrain_gpt.py"


def hooked(checkout: Path, folder: Path) -> Path:
    """A team's own script: the two lines, below an argument provider of its own."""
    copy = make_checkout_view(checkout, folder)
    script = copy / "pretrain_team.py"
    text = (copy / "pretrain_gpt.py").read_text()
    own = (
        "def add_own(parser):\n    parser.add_argument('--own-flag', type=int)\n    return parser\n"
    )
    text = text.replace(ANCHOR, "\n".join([own, *LINES, ANCHOR]))
    script.write_text(re.sub(r"extra_args_provider=.+,\n", "extra_args_provider=add_own,\n", text))
    return script


def make_checkout_view(checkout: Path, folder: Path) -> Path:
    """Its scripts copied, its Megatron linked: what may be changed, and what need not be."""
    folder.mkdir()
    for script in checkout.glob("*.py"):
        (folder / script.name).write_bytes(script.read_bytes())
    (folder / "megatron").symlink_to(checkout / "megatron")
    return folder


def steps_of(way: str, pool, checkout, folder: Path, flags: str, *, options="", processes=1):
    """Runs one way with the same flags; ``options`` are ours, as a line of YAML."""
    ours = "".join(f" --{key} {value}" for key, value in _pairs(options))
    logs, script = folder / "logs", checkout / "pretrain_gpt.py"
    if way == "wrapped":
        return steps_of_entry_point(pool, checkout, logs, flags + ours, processes=processes)
    if way == "spec":
        file = folder / "options.yaml"
        file.write_text("".join(f"{key}: {value}\n" for key, value in _pairs(options)))
        return steps_of_script(
            pool,
            script,
            logs,
            f"{flags} {SPEC}",
            processes=processes,
            environment={"LONGSEQ_CONFIG": str(file)},
        )
    if way == "hooked":
        script, ours = hooked(checkout, folder / "copy"), f"{ours} --own-flag 3"
    else:
        script = patched(checkout, folder / "copy")
    return steps_of_script(pool, script, logs, flags + ours, processes=processes)


def _pairs(options: str) -> list[list[str]]:
    return [pair.split("=") for pair in options.split()]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_exactly_as_the_stock_script(way, stock, pool, checkout, tmp_path):
    for processes, flags in layouts(checkout):
        folder = tmp_path / str(processes)
        folder.mkdir()
        found = steps_of(way, pool, checkout, folder, flags, processes=processes)
        assert found == stock[flags]


@pytest.mark.parametrize("way", WAYS)
def test_our_flags_take_effect_on_every_way(way, stock, pool, checkout, tmp_path):
    if way in ("patched", "wrapped") and not is_real(checkout):
        pytest.skip("tested on Megatron-LM; on the tiny script hooked and --spec say it")
    flags = CP2 + (" --hierarchical-context-parallel-sizes 2 1" if way == "spec" else "")
    options = "longseq-context-parallel=2d longseq-head-parallel-size=2"
    found = steps_of(way, pool, checkout, tmp_path, flags, options=options, processes=2)
    assert losses(found) == pytest.approx(losses(stock[""]), rel=1e-6)
    text = (tmp_path / "logs" / "rank0.log").read_text()
    assert text.count("2D attention, 2 head-parallel x 1 ring") == 1
    assert "2D attention" not in (tmp_path / "logs" / "rank1.log").read_text()


@pytest.mark.parametrize("way", ["hooked", "spec"])
def test_metp_takes_effect_in_a_script_that_is_not_ours(way, stock, pool, checkout, tmp_path):
    if is_real(checkout):
        pytest.skip("tested on the tiny script, whose loss is another")
    flags, options = f"{TP2} --sequence-parallel", "longseq-tensor-parallel=metp"
    found = steps_of(way, pool, checkout, tmp_path, flags, options=options, processes=2)
    assert losses(found) == pytest.approx(losses(stock[""]), rel=1e-6)
    text = (tmp_path / "logs" / "rank0.log").read_text()
    assert text.count("METP attention, 2 steps of 2 heads") == 1
    assert "METP MLP, 2 weight shards" in text


def losses(steps: list[tuple[str, ...]]) -> list[float]:
    return [float(step[0]) for step in steps]


def test_wrapped_steps_are_recorded_with_the_scripts_own_loss(stock, pool, checkout, tmp_path):
    flags = f"--longseq-measure {tmp_path / 'steps'}"
    steps_of_entry_point(pool, checkout, tmp_path / "logs", flags)
    recorded = [step["loss"] for step in merge_steps(read_steps(tmp_path / "steps"))]
    printed = losses(stock[""])
    # Megatron prints as the second loss the mean of the first two.
    printed[1] = 2 * printed[1] - printed[0]
    assert recorded == pytest.approx(printed, rel=1e-6)


def refusal(run) -> str:
    """The one line a user reads; the script printed it and left with status 2."""
    with pytest.raises(RankFailure) as caught:
        run()
    message = str(caught.value)
    assert "SystemExit: exit status 2" in message
    return message.split("error: ", 1)[1]


def test_what_a_hooked_script_cannot_do_is_refused_by_name(pool, checkout, tmp_path):
    if is_real(checkout):
        pytest.skip("needs no checkout: tested on the tiny script")
    script = patched(checkout, tmp_path / "copy")
    for flags, expected in (
        ("--longseq-nonsense", "--longseq-nonsense: there is no such flag"),
        (f"--megatron-path {checkout}", "--megatron-path: this script runs on the Megatron beside"),
        ("--longseq-measure steps", "--longseq-measure steps: the steps of this script"),
        ("--load nowhere", "--load nowhere: there is no checkpoint"),
    ):
        logs = tmp_path / expected[:20]
        message = refusal(lambda f=flags, to=logs: steps_of_script(pool, script, to, f))
        assert message.startswith(expected)


def test_a_script_without_megatrons_names_is_refused(pool, checkout, tmp_path):
    if is_real(checkout):
        pytest.skip("needs no checkout: tested on the tiny script")
    script = hooked(checkout, tmp_path / "copy")
    script.write_text(script.read_text().replace("gpt_config_from_args", "gpt_config_of"))
    script.write_text(
        script.read_text().replace(
            "import gpt_config_of", "import hybrid_config_from_args as gpt_config_of"
        )
    )
    message = refusal(lambda: steps_of_script(pool, script, tmp_path / "logs"))
    assert message.startswith(f"{script}: gpt_config_from_args must be defined above")
    assert "Megatron-LM 0.19.x" in message and "--megatron-path" in message


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment,
    )


def test_torchrun_starts_a_hooked_script_on_a_cpu(checkout, tmp_path):
    script = hooked(checkout, tmp_path / "copy")
    flags = "--mock-data --train-iters 2"
    command = "-m torch.distributed.run --standalone --nproc-per-node 1 -m megatron_longseq.hook"
    result = launch([*command.split(), str(script), *MODEL, *RUN, *flags.split()])
    assert result.returncode == 0, result.stderr[-2000:]
    assert "norm SequenceParallelNorm" in result.stdout + result.stderr
    assert "iteration        2/       2" in result.stdout


def test_a_hooked_script_started_bare_on_a_cpu_says_how_to_start_it(checkout, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the script would run")
    script = hooked(checkout, tmp_path / "copy")
    result = launch([str(script), *MODEL, *RUN])
    assert result.returncode == 2
    assert f"-m megatron_longseq.hook {script}" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_hook_does_nothing_in_a_script_that_is_imported():
    from megatron_longseq.hook import install

    names = {"__name__": "pretrain_gpt"}
    install(names)
    assert names == {"__name__": "pretrain_gpt"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the first argument must be a script"),
        (["nowhere.py"], "nowhere.py: no such script"),
    ],
)
def test_the_runner_says_what_is_wrong_with_its_script(words, expected, capsys):
    from megatron_longseq import hook

    with pytest.raises(SystemExit) as caught:
        hook.main(words)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err
