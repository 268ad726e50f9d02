"""Prints each file of the package with the first sentence of its docstring: `python -m recipes.files [ROOM]`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import harness

PACKAGE = Path(harness.__file__).parent


def first_sentence(file: Path) -> str:
    """The first sentence of a file's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".")


def main() -> None:
    rooms = sys.argv[1:] or ["."]
    for room in rooms:
        for file in sorted((PACKAGE / room).rglob("*.py")):
            print(f"{file.relative_to(PACKAGE)!s:45} {first_sentence(file)}")


if __name__ == "__main__":
    main()
