"""How the package gets to others: the wheel, the step for workflows, the workflow that publishes, and the image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import harness

ROOT = Path(__file__).parents[1]

# Stands for the interpreter that makes an environment, and for both programs in it.
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "pip $*" >>"$CALLS"\\n' >"$3/bin/python"
cat >"$3/bin/harness" <<'END'
#!/bin/sh
printf 'harness%s\\n' "$(printf ' <%s>' "$@")" >>"$CALLS"
test -z "$GH_TOKEN" || echo 'the token leaked' >>"$CALLS"
case $1 in
    regress) echo 'a table'; exit "$REGRESS" ;;
    report) echo '| a row |' ;;
    *) exit "$MEASURED" ;;
esac
END
chmod +x "$3"/bin/*
"""
GH = """#!/bin/sh
echo "gh $* $GH_TOKEN" >>"$CALLS"
"""


def step(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return found


def act(directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The action's step with stand-ins for its programs."""
    tools = directory / "tools"
    tools.mkdir()
    for name, text in {"python3": PYTHON, "gh": GH}.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    inputs = {
        name: entry.get("default", "") for name, entry in step("action.yml")["inputs"].items()
    }
    environment = {name.upper(): value for name, value in inputs.items()} | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(directory / "calls"),
        "GH_TOKEN": "secret",
        "GITHUB_OUTPUT": str(directory / "output"),
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_STEP_SUMMARY": str(directory / "summary.md"),
        "PULL_REQUEST": "7",
        "RUNNER_TEMP": str(directory),
        "BEFORE": "url=http://a -- serve 'two words'",
        "AFTER": "url=http://b",
        "MEASURED": "0",
        "REGRESS": "0",
    }
    script = ROOT / "scripts" / "action.sh"
    return subprocess.run(
        [script], env=environment | variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("compared", "fail", "code", "answer"),
    [
        ("0", "true", 0, "no loss beyond 0.02"),
        ("1", "true", 1, "a loss beyond 0.02"),
        ("1", "false", 0, "a loss beyond 0.02"),
        ("3", "true", 0, "cannot tell"),
        ("2", "true", 2, "cannot be compared"),
    ],
)
def test_the_action_measures_twice_compares_and_reports(
    tmp_path: Path, compared: str, fail: str, code: int, answer: str
) -> None:
    # 3: a run that measured, and cannot tell whether speculation pays.
    done = act(tmp_path, REGRESS=compared, FAIL=fail, MEASURED="3")
    assert done.returncode == code, done.stderr
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    (directory,) = tmp_path.glob("harness.*")
    assert calls[0].endswith(str(ROOT))
    own = f"<hydra.run.dir={directory}/before> <results.file={directory}/before.csv>"
    assert calls[1] == f"harness <latency> {own} <url=http://a> <--> <serve> <two words>"
    assert calls[2].endswith("<url=http://b>")
    assert calls[3].startswith("harness <regress>")
    assert calls[4] == f"harness <report> <{directory}/after> <format=row>"
    assert calls[5].startswith("gh pr comment 7 --repo owner/name")
    assert calls[5].endswith(" secret")
    assert len(calls) == 6
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert answer in summary.splitlines()[0]
    assert "| a row |" in summary
    assert "a table" in summary
    outputs = (tmp_path / "output").read_text(encoding="utf-8").splitlines()
    assert outputs == [f"directory={directory}", f"exit-code={compared}"]


def test_a_run_that_fails_ends_the_action(tmp_path: Path) -> None:
    done = act(tmp_path, MEASURED="1")
    assert done.returncode == 1
    assert len((tmp_path / "calls").read_text(encoding="utf-8").splitlines()) == 2


def test_without_a_pull_request_there_is_no_comment(tmp_path: Path) -> None:
    assert act(tmp_path, PULL_REQUEST="").returncode == 0
    assert "gh" not in (tmp_path / "calls").read_text(encoding="utf-8")


def test_the_action_sets_every_variable_of_its_script() -> None:
    action = step("action.yml")
    (measuring,) = action["runs"]["steps"]
    script = (ROOT / "scripts" / "action.sh").read_text(encoding="utf-8")
    read = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", script))
    runners_own = {"RUNNER_TEMP", "BASH_SOURCE"}
    missing = read - set(measuring["env"]) - runners_own
    assert {name for name in missing if not name.startswith("GITHUB_")} == set()
    named = set(re.findall(r"inputs\.([a-z]+)", str(measuring["env"])))
    assert named == set(action["inputs"])


def test_a_tag_is_published_as_the_version_that_the_package_has() -> None:
    workflow = step(".github/workflows/publish.yml")
    checking = next(each for each in workflow["jobs"]["build"]["steps"] if "name" in each)
    version = checking["run"].splitlines()[0]
    shown = subprocess.run(
        ["bash", "-c", f'{version}; echo "$version"'],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.strip() == harness.__version__
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_the_image_is_built_from_files_that_are_here() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{name}" for name in copied} == {line for line in allowed if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


def test_the_citation_names_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {harness.__version__}\n" in citation


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(tmp_path: Path) -> None:
    """That it runs outside the tree is what `tests/support/base_install.py` checks."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")

    def files(directory: str) -> set[str]:
        found = (
            file
            for file in (ROOT / directory).rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        )
        return {file.relative_to(ROOT).as_posix() for file in found}

    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == files("harness") | {f"harness/{name}" for name in files("conf")}
