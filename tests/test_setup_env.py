"""The set-up: which Python it takes, when it installs, and what it says when it cannot.

Each test runs ``scripts/setup_env.sh`` in a small project of its own, on a PATH that holds the
tools the script calls and no Python but the test's fakes. A fake is a script that runs the
set-up's own questions under another version number, and that records what else it was asked to do
instead of doing it, so nothing is downloaded.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]

# Every command the set-up may call, beside Python and uv. `df` and `uname` are fakes.
TOOLS = ["awk", "bash", "cat", "chmod", "cut", "dirname", "env", "flock", "grep", "head", "make"]
TOOLS += ["mkdir", "mv", "paste", "rm", "sed", "sha256sum", "shasum", "sleep", "sort", "tail", "tr"]

# Answers the set-up's questions as the version it plays, and records every other command.
FAKE_PYTHON = """\
#!/bin/sh
home='{home}'
case "$*" in
    *'import torch'*) exit 0 ;;
    '-E -c '*) exec '{interpreter}' -S -c "{disguise}" "$0" "$3" ;;
esac
echo "$*" >>"$home/calls"
case "$*" in
    '-m venv --clear '*)
        mkdir -p "$4/bin"
        cat "$0" >"$4/bin/python"
        chmod +x "$4/bin/python" ;;
    '-m pip install '*)
        if [ -e "$home/pip-is-slow" ]; then sleep 0.5; fi
        if [ -e "$home/pip-fails" ]; then echo 'ERROR: the index does not answer'; exit 1; fi ;;
    '-m pytest'*) exit "$PYTEST_EXIT_CODE" ;;
esac
"""

DISGUISE = """\
import sys
sys.version_info = {version}
sys.implementation.name = '{implementation}'
sys.executable = sys.argv[1]
if not {ensurepip}:
    sys.modules['ensurepip'] = None
exec(sys.argv[2], {{}})
"""


@dataclass
class Outcome:
    """What one run of the set-up did."""

    code: int
    out: str
    err: str
    seconds: float


class Project:
    """A copy of the set-up in an empty project, with a PATH and a home folder of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "project"
        self.path = [home / "bin", home / "more", home / "tools"]
        for folder in (self.root / "scripts", self.root / ".ci", *self.path):
            folder.mkdir(parents=True)
        for name in ("scripts/setup_env.sh", ".ci/run", "Makefile", "setup.py", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.root / name)
        for name in TOOLS:
            if found := shutil.which(name):
                (home / "tools" / name).symlink_to(found)
        self.command("tools/uname", "echo Linux")
        self.free_disk(gib=100)

    def command(self, name: str, body: str) -> Path:
        """Writes a shell command below the home folder, e.g. ``bin/uv``."""
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        return file

    def free_disk(self, gib: int) -> None:
        """Makes ``df`` report this much free space, in its two lines of POSIX format."""
        row = f"/dev/disk 999999999 0 {gib * 1024 * 1024} 1% /"
        self.command("tools/df", f"echo header; echo '{row}'")

    def broken_shim(self, name: str) -> Path:
        """A command as pyenv leaves it for a version that is not the selected one."""
        return self.command(
            name, f'echo "pyenv: {Path(name).name}: command not found" >&2; exit 127'
        )

    def python(
        self,
        name: str,
        version: str,
        implementation: str = "cpython",
        level: str = "final",
        ensurepip: bool = True,
    ) -> Path:
        """A Python that says it is ``version``; ``name`` is its place below the home folder."""
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        numbers = tuple(int(number) for number in version.split("."))
        disguise = DISGUISE.format(
            version=(*numbers, level, 0), implementation=implementation, ensurepip=ensurepip
        )
        file.write_text(
            FAKE_PYTHON.format(home=self.home, interpreter=sys.executable, disguise=disguise)
        )
        file.chmod(0o755)
        return file

    def run(self, *command: str, **variables: str) -> Outcome:
        environment = {
            "PATH": os.pathsep.join(str(folder) for folder in self.path),
            "HOME": str(self.home),
            **variables,
        }
        start = time.monotonic()
        done = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=30
        )
        return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - start)

    def set_up(self, *options: str, **variables: str) -> Outcome:
        return self.run("bash", str(self.root / "scripts/setup_env.sh"), *options, **variables)

    def find_python(self, **variables: str) -> Path:
        found = self.set_up("--find-python", **variables)
        assert found.code == 0, found.err
        return Path(found.out.strip())

    def installs(self) -> list[str]:
        """The arguments of every ``pip install`` so far."""
        calls = self.home / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line for line in lines if line.startswith("-m pip install")]

    @property
    def stamp(self) -> Path:
        return self.root / ".venv/setup.stamp"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


# --- Which Python it takes ------------------------------------------------------------------------


def test_shim_that_only_prints_an_error_is_passed_over_for_one_that_runs(project: Project) -> None:
    project.broken_shim("bin/python3.12")
    good = project.python("more/python3.12", "3.12.1")
    assert project.find_python() == good


def test_python_3_12_of_pyenv_is_preferred_to_a_newer_one_on_path(project: Project) -> None:
    project.python("bin/python3.13", "3.13.0")
    tested = project.python(".pyenv/versions/3.12.4/bin/python3", "3.12.4")
    assert project.find_python() == tested


def test_without_3_12_the_lowest_newer_python_is_taken(project: Project) -> None:
    project.python("bin/python3.14", "3.14.0")
    lowest = project.python("bin/python3.13", "3.13.5")
    assert project.find_python() == lowest


def test_pyenv_offers_its_newest_patch_release_by_number_and_not_by_letter(
    project: Project,
) -> None:
    # By letter the order is 3.12.1, 3.12.11, 3.12.9: the newest is neither first nor last.
    for older in ("3.12.1", "3.12.9"):
        project.python(f".pyenv/versions/{older}/bin/python3", older)
    newest = project.python(".pyenv/versions/3.12.11/bin/python3", "3.12.11")
    assert project.find_python() == newest


def test_versions_below_the_root_that_pyenv_names_are_found(project: Project) -> None:
    project.command("bin/pyenv", f"echo '{project.home}/elsewhere'")
    there = project.python("elsewhere/versions/3.12.1/bin/python3", "3.12.1")
    assert project.find_python() == there


def test_among_equals_path_comes_before_pyenv_and_pyenv_before_uv(project: Project) -> None:
    of_uv = project.python("managed/python3.12", "3.12.7")
    project.command("bin/uv", f"echo '{of_uv}'")
    assert project.find_python() == of_uv
    of_pyenv = project.python(".pyenv/versions/3.12.7/bin/python3", "3.12.7")
    assert project.find_python() == of_pyenv
    on_path = project.python("bin/python3", "3.12.1")
    assert project.find_python() == on_path


def test_variable_python_decides_even_against_a_better_one(project: Project) -> None:
    project.python("bin/python3.12", "3.12.1")
    named = project.python("elsewhere/python", "3.13.0")
    assert project.find_python(PYTHON=str(named)) == named


def test_variable_python_that_is_too_old_is_an_error_that_names_it(project: Project) -> None:
    project.python("bin/python3.12", "3.12.1")
    old = project.python("elsewhere/python", "3.11.7")
    found = project.set_up("--find-python", PYTHON=str(old))
    assert found.code == 1
    assert f"PYTHON={old}" in found.err
    assert "Python 3.11.7, older than 3.12" in found.err


def test_variable_python_that_does_not_exist_is_an_error_that_names_it(project: Project) -> None:
    project.python("bin/python3.12", "3.12.1")
    found = project.set_up("--find-python", PYTHON="python9")
    assert found.code == 1
    assert "PYTHON=python9" in found.err
    assert "not found" in found.err


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"version": "3.11.7"}, "Python 3.11.7, older than 3.12"),
        ({"version": "3.12.1", "implementation": "pypy"}, "pypy"),
        ({"version": "3.15.0", "level": "alpha"}, "pre-release"),
        ({"version": "3.12.3", "ensurepip": False}, "apt install python3.12-venv"),
    ],
)
def test_python_that_will_not_do_is_passed_over_with_its_reason(
    project: Project, traits: dict, reason: str
) -> None:
    unfit = project.python("bin/python3.12", **traits)
    assert f"{unfit}: " in (err := project.set_up("--find-python").err)
    assert reason in err
    good = project.python("more/python3.13", "3.13.0")
    assert project.find_python() == good


def test_without_any_python_one_message_says_what_was_found_and_what_to_install(
    project: Project,
) -> None:
    shim = project.broken_shim("bin/python3.12")
    old = project.python(".pyenv/versions/3.8.18/bin/python3", "3.8.18")
    outcome = project.set_up()
    assert outcome.code == 1
    assert outcome.err.count("setup: ") == 1
    expected = f"{shim}: does not run (exit code 127): pyenv: python3.12: command not found"
    assert expected in outcome.err
    assert f"{old}: Python 3.8.18, older than 3.12" in outcome.err
    assert "uv: not on PATH" in outcome.err
    for remedy in ("apt install", "uv python install 3.12", "pyenv install 3.12", "PYTHON=/path"):
        assert remedy in outcome.err
    assert not (project.root / ".venv").exists()


# --- When it installs -----------------------------------------------------------------------------


@pytest.fixture
def ready(project: Project) -> Project:
    """A project whose .venv is made; the record of calls starts afterwards."""
    project.python("bin/python3.12", "3.12.1")
    outcome = project.set_up()
    assert outcome.code == 0, outcome.err
    (project.home / "calls").unlink()
    return project


def test_fresh_machine_gets_the_package_and_its_dev_tools_in_the_tested_versions(
    project: Project,
) -> None:
    project.python("bin/python3.12", "3.12.1")
    outcome = project.set_up()
    assert outcome.code == 0, outcome.err
    assert outcome.err.splitlines()[-1] == "setup: .venv is ready (Python 3.12.1; extras dev)"
    last = project.installs()[-1]
    assert last.endswith("-c constraints.txt -e .[dev]")
    assert project.stamp.exists()


def test_second_run_is_ready_within_two_seconds_and_calls_no_pip(ready: Project) -> None:
    (ready.home / "pip-fails").touch()
    outcome = ready.set_up()
    assert outcome.code == 0, outcome.err
    assert outcome.seconds < 2
    assert not (ready.home / "calls").exists()


def test_second_run_needs_no_python_outside_of_venv(ready: Project) -> None:
    (ready.home / "bin/python3.12").unlink()
    assert ready.set_up().code == 0


def test_quiet_says_nothing_when_there_is_nothing_to_do(ready: Project) -> None:
    outcome = ready.set_up("--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


@pytest.mark.parametrize("file", ["setup.py", "constraints.txt"])
def test_change_of_the_requirements_installs_again(ready: Project, file: str) -> None:
    with (ready.root / file).open("a") as requirements:
        requirements.write("# changed\n")
    assert ready.set_up().code == 0
    assert ready.installs()
    calls = len(ready.installs())
    assert ready.set_up().code == 0
    assert len(ready.installs()) == calls


def test_other_python_behind_venv_installs_again(ready: Project) -> None:
    ready.python("project/.venv/bin/python", "3.12.2")
    assert ready.set_up().code == 0
    assert ready.installs()


def test_venv_whose_python_does_not_run_is_made_anew(ready: Project) -> None:
    ready.broken_shim("project/.venv/bin/python")
    outcome = ready.set_up()
    assert outcome.code == 0
    assert "its Python does not run" in outcome.err
    assert "-m venv" in (ready.home / "calls").read_text()


def test_venv_copied_to_another_folder_is_made_anew(ready: Project) -> None:
    original = ready.root
    ready.root = ready.home / "copy"
    shutil.copytree(original, ready.root)
    outcome = ready.set_up()
    assert outcome.code == 0
    assert f"it was made in {original}" in outcome.err


def test_variable_python_of_another_version_makes_venv_anew(ready: Project) -> None:
    other = ready.python("elsewhere/python", "3.13.0")
    outcome = ready.set_up(PYTHON=str(other))
    assert outcome.code == 0
    assert "(Python 3.13.0; extras dev)" in outcome.err


def test_venv_made_by_hand_is_kept_and_completed(project: Project) -> None:
    project.python("project/.venv/bin/python", "3.12.1")
    assert project.set_up().code == 0
    assert project.installs()
    assert "-m venv" not in (project.home / "calls").read_text()


def test_failed_install_shows_why_leaves_no_stamp_and_is_repaired_by_the_next_run(
    ready: Project,
) -> None:
    (ready.root / "constraints.txt").write_text("# changed\n")
    (ready.home / "pip-fails").touch()
    outcome = ready.set_up()
    assert outcome.code == 1
    assert "ERROR: the index does not answer" in outcome.err
    assert not ready.stamp.exists()
    (ready.home / "pip-fails").unlink()
    assert ready.set_up().code == 0
    assert ready.stamp.exists()


def test_package_that_a_killed_install_left_half_done_is_installed_again(ready: Project) -> None:
    packages = ready.root / ".venv/lib/python3.12/site-packages"
    half, whole = packages / "half-1.0.dist-info", packages / "whole-1.0.dist-info"
    for folder in (half, whole):
        folder.mkdir(parents=True)
        (folder / "METADATA").touch()
    (whole / "INSTALLER").touch()
    ready.stamp.unlink()
    assert ready.set_up().code == 0
    assert whole.exists()
    assert not half.exists()


def test_runs_at_the_same_time_install_once(project: Project) -> None:
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed")
    project.python("bin/python3.12", "3.12.1")
    (project.home / "pip-is-slow").touch()
    script = "bash scripts/setup_env.sh & first=$!; bash scripts/setup_env.sh && wait $first"
    outcome = project.run("bash", "-c", script)
    assert outcome.code == 0, outcome.err
    assert "another set-up is at work" in outcome.err
    assert len([line for line in project.installs() if "-e" in line.split()]) == 1


def test_extras_that_need_torch_to_build_are_installed_after_it(ready: Project) -> None:
    assert ready.set_up("--extras", "dev,bench").code == 0
    assert [line.split()[-1] for line in ready.installs()[-2:]] == [".[dev]", ".[bench,dev]"]


def test_extras_once_installed_are_kept_by_a_run_that_asks_for_fewer(ready: Project) -> None:
    assert ready.set_up("--extras", "dev,docs").code == 0
    calls = len(ready.installs())
    assert ready.set_up().code == 0
    assert len(ready.installs()) == calls


def test_unknown_extra_is_refused_with_the_names_there_are(project: Project) -> None:
    outcome = project.set_up("--extras", "dev,benchmarks")
    assert outcome.code == 1
    assert "no extra 'benchmarks'; it has gpu bench dev docs" in outcome.err


def test_small_disk_is_said_before_anything_is_downloaded(project: Project) -> None:
    project.python("bin/python3.12", "3.12.1")
    project.free_disk(gib=2)
    outcome = project.set_up()
    assert outcome.code == 1
    assert "2048 MiB free" in outcome.err
    assert not project.installs()
    assert project.set_up(LONGSEQ_SKIP_DISK_CHECK="1").code == 0


# --- The commands of the README -------------------------------------------------------------------


@pytest.fixture
def with_make(ready: Project) -> Project:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return ready


def test_make_test_passes_its_arguments_to_pytest(with_make: Project) -> None:
    outcome = with_make.run("make", "test", "ARGS=tests/a -x", PYTEST_EXIT_CODE="0")
    assert outcome.code == 0, outcome.err
    assert (with_make.home / "calls").read_text() == ("-m pytest -n 2 --dist loadfile tests/a -x\n")


@pytest.mark.parametrize("pytest_code", ["0", "1", "5"])
def test_continuous_integration_fails_exactly_when_pytest_does(
    with_make: Project, pytest_code: str
) -> None:
    outcome = with_make.run("bash", ".ci/run", CI="true", PYTEST_EXIT_CODE=pytest_code)
    assert (outcome.code == 0) == (pytest_code == "0")
    assert pytest_code == "0" or f"Error {pytest_code}" in outcome.err


def test_make_without_a_target_lists_every_target_that_a_user_calls(with_make: Project) -> None:
    outcome = with_make.run("make")
    targets = set(re.findall(r"^\.PHONY: (\S+)$", (REPOSITORY / "Makefile").read_text(), re.M))
    assert {f"make {target}" for target in targets - {"ready"}} == {
        " ".join(line.split()[:2]) for line in outcome.out.splitlines()
    }


# --- The versions ---------------------------------------------------------------------------------


def requirements_of_setup_py() -> dict[str, list[str]]:
    """The lists of setup.py by extra; the key "" is what always gets installed."""
    assigned = {
        node.targets[0].id: node.value
        for node in ast.parse((REPOSITORY / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    runtime, extras = (ast.literal_eval(assigned[name]) for name in ("RUNTIME", "EXTRAS"))
    return {"": runtime, **extras}


def test_constraints_pin_all_that_setup_py_asks_for_to_versions_it_allows() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    assert len(pinned) == len([line for line in lines if "==" in line]), "a package pinned twice"
    for extra, requirements in requirements_of_setup_py().items():
        for requirement in map(Requirement, requirements):
            version = pinned.get(canonicalize_name(requirement.name))
            if extra == "gpu" and version is None:
                continue  # its build follows the machine's CUDA
            assert version is not None, f"{requirement.name} has no line in constraints.txt"
            assert version in requirement.specifier, f"{requirement} forbids {version}"


def test_setup_py_takes_the_pythons_that_the_set_up_looks_for() -> None:
    assert 'python_requires=">=3.12"' in (REPOSITORY / "setup.py").read_text()
    assert "release < (3, 12)" in (REPOSITORY / "scripts/setup_env.sh").read_text()


def test_set_up_script_explains_itself(project: Project) -> None:
    outcome = project.set_up("--help")
    assert outcome.code == 0
    expected = textwrap.dedent("""\
          scripts/setup_env.sh [--extras NAME[,NAME...]] [--quiet]
          scripts/setup_env.sh --find-python
    """)
    assert textwrap.indent(expected, "  ") in outcome.out
    assert "PYTHON " in outcome.out
