"""The table of imports in ARCHITECTURE.md: who may import whom, no circles among files, and no torch where a quick
answer is due."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "harness"

# Rooms that a room may import, apart from itself. A file next to the rooms is a room too.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"config", "cli"},
    "config": set(),
    "decoding": set(),
    "runners": {"config", "decoding"},
    "models": {"config"},
    "drafting": {"config", "decoding", "runners", "models"},
    "results": {"config"},
    "engines": {"config", "models", "runners", "drafting", "decoding", "results"},
    "prompts": {"config", "models"},
    "tables": {"config", "results"},
    "menu": {"config", "drafting", "engines", "results", "tables"},
    "measuring": {
        "config",
        "drafting",
        "engines",
        "models",
        "prompts",
        "results",
        "tables",
    },
    "commands": {
        "config",
        "decoding",
        "drafting",
        "engines",
        "measuring",
        "menu",
        "models",
        "prompts",
        "results",
        "tables",
    },
    "cli": {
        "commands",
        "config",
        "drafting",
        "engines",
        "measuring",
        "menu",
        "results",
        "tables",
    },
    "__main__": {"cli"},
}
# They take seconds to import: `--help` and a wrong setting are answered without them.
HEAVY = {"torch", "transformers", "accelerate", "bitsandbytes"}
NEVER_HEAVY = {"__init__", "config", "results", "tables"}
HEAVY_IN_FUNCTIONS_ONLY = {"menu", "cli", "__main__"}
# Folders and files that a name, a setting, `report` and `regress` need, in rooms that else have torch.
QUICK = (
    "drafting/methods/",
    "drafting/method.py",
    "drafting/registry.py",
    "engines/records/",
    "engines/record.py",
    "engines/registry.py",
    "measuring/measurement.py",
    "measuring/named_files.py",
    "models/places.py",
    "commands/report/",
    "commands/regress/",
    "commands/latency/ranking/",
    "commands/latency/tables/",
    "/record.py",
    "/rows.py",
    "/tables.py",
    # A run that asks servers.
    "engines/server/",
    "commands/run.py",
    "commands/latency/measure.py",
    "commands/map/measure.py",
    "commands/recovery/measure.py",
    "commands/eval/measure.py",
)
# The base installation lacks these, too.
ABSENT = HEAVY | {"safetensors", "tokenizers", "huggingface_hub"}


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
        yield from (
            ".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names
        )

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
    """Forbidden imports of the files of a room, one line each."""
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
                found.append(
                    f"{file.relative_to(tree)}:{statement.line}: {room} imports {statement.module}"
                )
    return found


def circle(tree: Path) -> list[str]:
    """Files that import each other in a circle, also in functions or for types alone; [] if there are none."""
    files = {
        ".".join(file.relative_to(tree).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted((tree / PACKAGE).rglob("*.py"))
    }

    def imported(file: Path) -> Iterator[str]:
        for statement in imports(file, tree):
            # A name in a module, or a module in a package.
            owner = statement.module.rpartition(".")[0]
            yield from [name for name in (statement.module, owner) if name in files][:1]

    graph = {name: set(imported(file)) - {name} for name, file in files.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_the_table_allows(room: str) -> None:
    assert violations(room, ROOT) == []


def test_no_files_import_each_other() -> None:
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param(
            {"a.py": "from harness.b import f", "b.py": "from harness.a import g"}, id="two"
        ),
        pytest.param(
            {
                "room/a.py": "from harness.room import b",
                "room/b.py": "def f():\n    from .c import g",
                "room/c.py": "if TYPE_CHECKING:\n    from harness.room.a import A",
                "room/d.py": "from harness.room import a, b, c",
            },
            id="three, in a function and for types",
        ),
        pytest.param(
            {"__init__.py": "from harness.a import f", "a.py": "from harness import version"},
            id="package",
        ),
    ],
)
def test_planted_circle_is_found(tmp_path: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        file = tmp_path / PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
        if len(sources) > 1 and file.name != "__init__.py":
            (file.parent / "__init__.py").touch()
    found = circle(tmp_path)
    assert found
    assert "harness.room.d" not in found


def test_imports_without_a_circle_are_not_reported(tmp_path: Path) -> None:
    package = tmp_path / PACKAGE
    package.mkdir()
    for name, source in {
        "a": "from harness import b, c",
        "b": "from harness.c import f",
        "c": "import torch",
    }.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    assert circle(tmp_path) == []


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(file, ROOT) for file in (ROOT / PACKAGE).rglob("*.py")}
    assert rooms == set(MAY_IMPORT)


FORBIDDEN = [
    pytest.param("decoding/loops.py", "from harness.models.load import load", id="absolute"),
    pytest.param("decoding/loops.py", "import harness.models.load as load", id="as"),
    pytest.param("decoding/loops.py", "from harness import models", id="room by name"),
    pytest.param("runners/eager.py", "from ..models import load", id="relative"),
    pytest.param("runners/deep/eager.py", "from ...models import load", id="relative, deeper"),
    pytest.param("runners/eager.py", "from .. import models", id="relative, room by name"),
    pytest.param(
        "models/load.py",
        "def f():\n    from harness.commands import latency",
        id="in a function",
    ),
    pytest.param(
        "results/rows.py", "if TYPE_CHECKING:\n    from harness.models import load", id="for types"
    ),
    pytest.param("measuring/session.py", "import harness.cli", id="cli"),
    pytest.param("results/rows.py", "def f():\n    import torch", id="torch in results"),
    pytest.param("tables/table.py", "def f():\n    import torch", id="torch in tables"),
    pytest.param("results/rows.py", "from harness.tables import table", id="tables in results"),
    pytest.param(
        "commands/latency/measure.py", "from harness.runners.eager import EagerRunner", id="runner"
    ),
    pytest.param(
        "config/settings.py", "from transformers import AutoConfig", id="transformers in config"
    ),
    pytest.param(
        "cli/main.py",
        "try:\n    import torch.cuda\nexcept ImportError:\n    pass",
        id="torch in cli",
    ),
]
ALLOWED = [
    pytest.param("decoding/loops.py", "import torch\nfrom harness.decoding import warp", id="own"),
    pytest.param("decoding/loops.py", "from . import verify", id="own, relative"),
    pytest.param("results/rows.py", "from harness import __version__", id="version"),
    pytest.param("runners/eager.py", "from ..decoding.protocols import Runner", id="allowed room"),
    pytest.param(
        "cli/main.py",
        "def main():\n    import torch\n    from harness.cli import jobs",
        id="lazy",
    ),
    pytest.param("cli/main.py", "if TYPE_CHECKING:\n    import torch", id="for types"),
]


@pytest.mark.parametrize(("file", "source"), FORBIDDEN + ALLOWED)
def test_violations_alone_are_found(tmp_path: Path, file: str, source: str) -> None:
    planted = tmp_path / PACKAGE / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source, encoding="utf-8")
    forbidden = any(param.values == (file, source) for param in FORBIDDEN)
    assert len(violations(room_of(planted, tmp_path), tmp_path)) == forbidden


def test_quick_modules_import_nothing_heavy_by_any_way() -> None:
    """The statements of a file do not show what the modules behind them import."""
    quick = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / PACKAGE).rglob("*.py"))
        if room_of(file, ROOT) in NEVER_HEAVY | HEAVY_IN_FUNCTIONS_ONLY - {"__main__"}
        or any(part in str(file.relative_to(ROOT / PACKAGE)) for part in QUICK)
    ]
    script = f"""
import importlib, sys
for module in {quick}:
    importlib.import_module(module)
    heavy = {ABSENT | {"scipy.stats"}} & set(sys.modules)
    assert not heavy, f"{{module}} imports {{heavy}}"
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_importing_harness_imports_nothing_heavy() -> None:
    script = f"import sys, harness; print({HEAVY | {'hydra', 'omegaconf', 'pandas', 'numpy'}} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "set()\n"


def test_help_waits_for_no_statistics() -> None:
    script = f"""
import sys
from harness.cli.main import main
sys.argv = ["harness", "latency", "--help"]
try:
    main()
finally:
    print({HEAVY | {"scipy"}} & set(sys.modules))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.endswith("set()\n")


def test_no_test_module_is_imported() -> None:
    """Helpers are in tests/support/, so that a test can change without a look at the others."""
    statement = re.compile(r"^\s*(?:from|import) (?:\w+\.)*test_\w+", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("*.py"))
    importing = [file.name for file in files if statement.search(file.read_text(encoding="utf-8"))]
    assert importing == []


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """Of two, pytest would run only one when it collects both rooms."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
