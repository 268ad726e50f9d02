"""What `CONTRIBUTING.md` names is there, and no docstring only points to another place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:conf|harness|tests|recipes|benchmarks)/[\w./]*)`", TEXT)))
CLASSES = re.findall(r"`(\w+)`\s\(`(harness/[\w/]+\.py)`\)", TEXT)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "file"), CLASSES)
def test_a_class_is_in_its_file(name: str, file: str) -> None:
    assert re.search(rf"^class {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_they_are_found() -> None:
    assert len(PATHS) > 20
    assert len(CLASSES) >= 6


PACKAGE = Path(harness.__file__).parent
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def pointers(source: str) -> list[str]:
    """The names of classes and functions whose docstrings begin by pointing to another place."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [node.name for node in nodes if (ast.get_docstring(node) or "").startswith("See `")]


def test_no_docstring_only_points_elsewhere() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        if names := pointers(file.read_text(encoding="utf-8")):
            found[str(file)] = names
    assert found == {}, "leave these docstrings out, or say what is particular here"
