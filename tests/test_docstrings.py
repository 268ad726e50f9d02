"""No docstring only points to another place: a method that overrides another needs none."""

from __future__ import annotations

import ast
from pathlib import Path

import harness

PACKAGE = Path(harness.__file__).parent
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
EXAMPLE = '''
class Upper:
    def pointer(self):
        """See `Lower.pointer`."""

    def longer_pointer(self):
        """See `Lower`: the largest one."""

    def sentence(self):
        """The largest one; see `Lower`."""

    def nothing(self):
        return 1
'''


def pointers(source: str) -> list[str]:
    """The names of classes and functions whose docstrings begin by pointing to another place."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [node.name for node in nodes if (ast.get_docstring(node) or "").startswith("See `")]


def test_pointers_are_found() -> None:
    assert pointers(EXAMPLE) == ["pointer", "longer_pointer"]


def test_no_docstring_only_points_elsewhere() -> None:
    files = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    assert {str(file): found for file, text in files.items() if (found := pointers(text))} == {}
