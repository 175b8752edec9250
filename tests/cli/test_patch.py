"""``longseq patch``: in, out, twice; and every file it must leave alone."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from megatron_longseq import compat
from megatron_longseq.cli import main
from megatron_longseq.hook import LINES

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "core_v0.19" / "pretrain_gpt.patch"
ANCHOR = 'if __name__ == "__main__":'
VERSION = 'MAJOR = 0\nMINOR = {}\nPATCH = 1\nPRE_RELEASE = ""\n'


@pytest.fixture
def checkout(tmp_path) -> Path:
    """What makes a folder a checkout, with the end of a script that the patch file fits."""
    folder = tmp_path / "Megatron-LM"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "training").mkdir()
    (folder / "megatron" / "core" / "package_info.py").write_text(VERSION.format(19))
    body = [line[1:] for line in PATCH.read_text().splitlines()[4:] if not line.startswith("+")]
    (folder / "pretrain_gpt.py").write_text("\n".join(["import time", "", *body]) + "\n")
    return folder


def longseq(checkout: Path, *words: str) -> int:
    return main(["patch", "--megatron-path", str(checkout), *words])


def edited(checkout: Path, action: str) -> int:
    """The script of these tests is none of the releases' own."""
    return longseq(checkout, "--edited", action)


def test_in_and_out_again_leaves_every_byte_and_the_mode_as_they_were(checkout, capsys):
    script = checkout / "pretrain_gpt.py"
    script.chmod(0o750)
    before = script.read_bytes()
    assert edited(checkout, "check") == 1
    assert edited(checkout, "apply") == 0
    text = script.read_text()
    assert text.count("\n".join([*LINES, ANCHOR])) == 1
    assert edited(checkout, "check") == 0
    after = script.read_bytes()
    assert edited(checkout, "apply") == 0
    assert script.read_bytes() == after
    assert ": applied, nothing to do" in capsys.readouterr().out
    for _ in range(2):
        assert edited(checkout, "revert") == 0
        assert script.read_bytes() == before
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert len(list(checkout.iterdir())) == 2, "nothing of the writing may stay behind"


def test_what_a_team_wrote_elsewhere_in_the_file_stays(checkout):
    script = checkout / "pretrain_gpt.py"
    assert edited(checkout, "apply") == 0
    script.write_text("# ours\n" + script.read_text() + "# the end\n")
    assert edited(checkout, "revert") == 0
    assert script.read_text().startswith("# ours\nimport time")
    assert script.read_text().endswith("# the end\n")


def test_a_file_with_the_line_endings_of_windows_keeps_them(checkout):
    script = checkout / "pretrain_gpt.py"
    before = script.read_bytes().replace(b"\n", b"\r\n")
    script.write_bytes(before)
    assert edited(checkout, "apply") == 0
    assert b"\n" not in script.read_bytes().replace(b"\r\n", b"")
    assert edited(checkout, "revert") == 0
    assert script.read_bytes() == before


def test_a_link_stays_a_link(checkout, tmp_path):
    script = checkout / "pretrain_gpt.py"
    script.rename(tmp_path / "elsewhere.py")
    script.symlink_to(tmp_path / "elsewhere.py")
    assert edited(checkout, "apply") == 0
    assert script.is_symlink() and LINES[1] in (tmp_path / "elsewhere.py").read_text()


def refusal(capsys, checkout: Path, *words: str) -> str:
    script = checkout / "pretrain_gpt.py"
    before = script.read_bytes() if script.exists() else None
    assert longseq(checkout, *words) == 2
    assert (script.read_bytes() if script.exists() else None) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
def test_an_edited_file_is_left_alone_unless_accepted(action, checkout, capsys):
    message = refusal(capsys, checkout, action)
    assert "was edited" in message and "--edited" in message and "line 6" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace(ANCHOR, "main()"), "no lines if __name__"),
        (lambda text: text + ANCHOR + "\n    pass\n", "2 lines if __name__"),
        (lambda text: LINES[0] + "\n" + text, "used otherwise than by this patch, in line 1"),
        (
            lambda text: text.replace(ANCHOR, "\n".join([*LINES, "", ANCHOR])),
            "used otherwise than by this patch",
        ),
        (
            lambda text: text.replace(ANCHOR, "\n".join([*LINES, *LINES, ANCHOR])),
            "used otherwise than by this patch",
        ),
    ],
)
@pytest.mark.parametrize("action", ["check", "apply", "revert"])
def test_a_file_where_the_place_is_not_clear_is_left_alone(
    action, change, expected, checkout, capsys
):
    script = checkout / "pretrain_gpt.py"
    script.write_text(change(script.read_text()))
    assert expected in refusal(capsys, checkout, "--edited", action)


def test_what_is_no_checkout_of_this_release_is_refused(checkout, capsys, tmp_path):
    info = checkout / "megatron" / "core" / "package_info.py"
    for minor in (18, 20):
        info.write_text(VERSION.format(minor))
        message = refusal(capsys, checkout, "apply")
        assert f"Megatron-LM 0.{minor}.1; this release supports 0.19.x" in message
    info.unlink()
    assert "no Megatron-LM checkout: no megatron/core" in refusal(capsys, checkout, "apply")
    assert "no such folder" in refusal(capsys, tmp_path / "nowhere", "apply")


def test_a_folder_that_cannot_be_written_says_so(checkout, capsys):
    if os.geteuid() == 0:
        pytest.skip("root writes anywhere")
    checkout.chmod(0o500)
    try:
        assert "cannot be written" in refusal(capsys, checkout, "--edited", "apply")
    finally:
        checkout.chmod(0o700)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_patch_file_and_the_command_do_the_same(checkout):
    script = checkout / "pretrain_gpt.py"
    before = script.read_text()
    git = ["git", "apply", "--unsafe-paths", f"--directory={checkout}", str(PATCH)]
    subprocess.run(git, cwd="/", check=True)
    by_git = script.read_text()
    script.write_text(before)
    assert edited(checkout, "apply") == 0
    assert script.read_text() == by_git


def test_what_was_tested_is_what_the_command_accepts():
    tested = json.loads((ROOT / "patches" / "tested.json").read_text())["releases"]
    assert {release["pretrain_gpt_sha256"] for release in tested} == set(compat.SCRIPT_SHA256)
    for release in tested:
        assert compat.is_supported(release["version"])
        assert (ROOT / "patches" / release["patch"]).is_file()


@pytest.mark.skipif(
    not os.environ.get("MEGATRON_LM_PATH"),
    reason="not run: MEGATRON_LM_PATH names no Megatron-LM checkout",
)
def test_a_released_script_is_patched_without_further_words(tmp_path):
    source = Path(os.environ["MEGATRON_LM_PATH"])
    checkout = tmp_path / "Megatron-LM"
    checkout.mkdir()
    shutil.copy(source / "pretrain_gpt.py", checkout)
    (checkout / "megatron").symlink_to(source / "megatron")
    script = checkout / "pretrain_gpt.py"
    assert hashlib.sha256(script.read_bytes()).hexdigest() in compat.SCRIPT_SHA256
    assert [longseq(checkout, action) for action in ("check", "apply", "apply", "check")] == [
        *(1, 0, 0, 0)
    ]
    git = ["git", "apply", "--check", "--reverse", "--unsafe-paths", f"--directory={checkout}"]
    subprocess.run([*git, str(PATCH)], cwd="/", check=True)
    assert [longseq(checkout, action) for action in ("revert", "revert", "check")] == [0, 0, 1]
