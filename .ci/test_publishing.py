"""How the package gets to others: the wheel, the step for workflows, the workflow that publishes, and the image."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet

import harness

ROOT = Path(__file__).parents[1]


def step(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return found


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


def test_the_pinned_versions_run_on_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2, on which a package that needs 3.11.5 cannot be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].partition(",")[0].removeprefix(">=")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [pin.partition("==")[0] for pin in pins if not pin.startswith("#")]
    needed = {name: metadata(name).get_all("Requires-Python", []) for name in names}
    assert {name for name in names if oldest not in SpecifierSet(",".join(needed[name]))} == set()


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
