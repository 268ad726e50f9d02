"""Imports go one way: the table of ARCHITECTURE.md, and no torch where a quick answer is owed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "harness"

# Which rooms a room may import, besides itself. A file beside the rooms is a room of its own.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "config": set(),
    "decoding": set(),
    "runners": {"decoding"},
    "models": {"config", "runners"},
    "results": {"config"},
    "experiments": {"config", "models", "runners", "decoding", "results"},
    "sweep": {"config", "results", "experiments"},
    "cli": {"config", "models", "runners", "decoding", "results", "experiments", "sweep"},
    "__main__": {"cli"},
}

# They take seconds to import: `--help` and a wrong setting are answered without them.
HEAVY = {"torch", "transformers", "accelerate", "bitsandbytes"}
NEVER_HEAVY = {"__init__", "config", "results"}
HEAVY_IN_FUNCTIONS_ONLY = {"sweep", "cli", "__main__"}


@dataclass(frozen=True)
class Import:
    """`module` in full, and whether importing the file imports it."""

    module: str
    line: int
    at_import: bool


def room_of(file: Path, tree: Path) -> str:
    first = file.relative_to(tree / PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(file: Path, tree: Path) -> list[Import]:
    """Every import statement of the file, relative ones resolved."""
    package = file.relative_to(tree).parent.parts

    def modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = package[: len(package) - node.level + 1] if node.level else ()
        # `from harness import models` imports a room: the name belongs to the path.
        yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from (Import(module, child.lineno, at_import) for module in modules(child))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, at_import=False)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(ast.Module(child.body, []), at_import=False)
                yield from walk(ast.Module(child.orelse, []), at_import)
            else:
                yield from walk(child, at_import)

    return list(walk(ast.parse(file.read_text(encoding="utf-8")), at_import=True))


def violations(room: str, tree: Path) -> list[str]:
    """What the files of a room import that they may not, one line each."""
    found = []
    for file in sorted((tree / PACKAGE).rglob("*.py")):
        if room_of(file, tree) != room:
            continue
        for statement in imports(file, tree):
            first, _, rest = statement.module.partition(".")
            other = rest.partition(".")[0]
            # What is not in the table is a name in harness/__init__.py, `__version__` for one.
            ours = first == PACKAGE and other in MAY_IMPORT and other != room
            heavy = first in HEAVY and (
                room in NEVER_HEAVY or (room in HEAVY_IN_FUNCTIONS_ONLY and statement.at_import)
            )
            if heavy or (ours and other not in MAY_IMPORT[room]):
                found.append(f"{file.relative_to(tree)}:{statement.line}: {room} imports {statement.module}")
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_the_table_allows(room: str) -> None:
    assert violations(room, ROOT) == []


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(file, ROOT) for file in (ROOT / PACKAGE).rglob("*.py")}
    assert rooms == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        pytest.param("decoding/loops.py", "from harness.models.load import load", id="absolute"),
        pytest.param("decoding/loops.py", "import harness.models.load as load", id="as"),
        pytest.param("decoding/loops.py", "from harness import models", id="room by name"),
        pytest.param("runners/eager.py", "from ..models import load", id="relative"),
        pytest.param("runners/deep/eager.py", "from ...models import load", id="relative, deeper"),
        pytest.param("runners/eager.py", "from .. import models", id="relative, room by name"),
        pytest.param("models/load.py", "def f():\n    from harness.experiments import latency", id="in a function"),
        pytest.param("results/rows.py", "if TYPE_CHECKING:\n    from harness.models import load", id="for types"),
        pytest.param("experiments/latency.py", "import harness.cli", id="cli"),
        pytest.param("results/rows.py", "def f():\n    import torch", id="torch in results"),
        pytest.param("config/settings.py", "from transformers import AutoConfig", id="transformers in config"),
        pytest.param("cli.py", "try:\n    import torch.cuda\nexcept ImportError:\n    pass", id="torch in cli"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, source: str) -> None:
    planted = tmp_path / PACKAGE / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source, encoding="utf-8")
    assert len(violations(room_of(planted, tmp_path), tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        pytest.param("decoding/loops.py", "import torch\nfrom harness.decoding import warp", id="own"),
        pytest.param("decoding/loops.py", "from . import verify", id="own, relative"),
        pytest.param("results/rows.py", "from harness import __version__", id="version"),
        pytest.param("runners/eager.py", "from ..decoding.protocols import Runner", id="allowed room"),
        pytest.param("cli.py", "def main():\n    import torch\n    from harness.experiments import latency", id="lazy"),
        pytest.param("cli.py", "if TYPE_CHECKING:\n    import torch", id="for types"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    planted = tmp_path / PACKAGE / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source, encoding="utf-8")
    assert violations(room_of(planted, tmp_path), tmp_path) == []


def test_quick_modules_import_nothing_heavy_by_any_way() -> None:
    """The statements of a file do not show what the modules behind them import."""
    quick = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / PACKAGE).rglob("*.py"))
        if room_of(file, ROOT) in NEVER_HEAVY | {"sweep", "cli"}
    ]
    script = f"""
import importlib, sys
for module in {quick}:
    importlib.import_module(module)
    heavy = {HEAVY} & set(sys.modules)
    assert not heavy, f"{{module}} imports {{heavy}}"
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
