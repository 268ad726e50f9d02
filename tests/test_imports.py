"""The table of imports in ARCHITECTURE.md: who may import whom, no circles, and no torch where an answer is quick."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engines.door import local

ROOT = Path(__file__).parents[1]
PACKAGE = "harness"


def _table() -> dict[str, set[str]]:
    """Rooms that a room may import, apart from itself, by the table of ARCHITECTURE.md. A file next to the rooms is a
    room too, and so is each folder of `local`, the wing with the models.
    """
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| room | may import |")
    allowed: dict[str, set[str]] = {}
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        _, rooms, others, _ = line.split("|")
        for room in re.findall("`(.+?)`", rooms):
            allowed[room] = set(re.findall("`(.+?)`", others))
    return allowed


MAY_IMPORT = _table()
# Rooms that name types of the wing with the models. What they call there is imported by name (`engines.door.local`).
NAME_TYPES = {"engines", "measuring", "commands"}
# Only that wing imports these, in functions and for types too.
HEAVY = {"torch", "transformers", "accelerate", "bitsandbytes", "safetensors"}
# The base installation lacks these, too.
ABSENT = HEAVY | {"tokenizers", "huggingface_hub"}


@dataclass(frozen=True)
class Import:
    """`module` in full, whether importing the file imports it, and whether it is for types alone."""

    module: str
    line: int
    at_import: bool
    for_types: bool = False


def room_of(file: Path, tree: Path) -> str:
    """The name of a file's room: `results`, `local.drafting`."""
    parts = file.relative_to(tree / PACKAGE).parts
    if parts[0] == "local" and parts[1] != "__init__.py":
        return f"local.{parts[1].removesuffix('.py')}"
    return parts[0].removesuffix(".py")


def room_named(module: str) -> str | None:
    """The room of a module of ours; None for what is not ours, or a name in harness/__init__.py."""
    first, *rest = module.split(".")
    if first != PACKAGE or not rest:
        return None
    wing = ".".join(rest[:2])
    if wing in MAY_IMPORT:
        return wing
    return rest[0] if rest[0] in MAY_IMPORT else None


@functools.cache
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

    def walk(node: ast.AST, at_import: bool, for_types: bool = False) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for module in modules(child):
                    yield Import(module, child.lineno, at_import, for_types)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, at_import=False)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(ast.Module(child.body, []), at_import=False, for_types=True)
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
            other = room_named(statement.module)
            is_heavy = statement.module.partition(".")[0] in HEAVY and not room.startswith("local")
            # A room, or one file of it: `engines.arrivals`, `local.models.cache_names`.
            parts = statement.module.split(".")
            named = {other, ".".join(parts[1:3]), ".".join(parts[1:4])}
            is_allowed = not MAY_IMPORT[room].isdisjoint(named)
            if statement.for_types and room in NAME_TYPES and other is not None:
                is_allowed = is_allowed or other.startswith("local")
            is_forbidden = other is not None and other != room and not is_allowed
            if is_heavy or is_forbidden:
                found.append(f"{file.relative_to(tree / PACKAGE)} {statement.module}")
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


def test_the_door_and_registries_alone_name_the_other_wing() -> None:
    """A module that is imported by its name is in no import statement."""
    naming = set()
    for file in (ROOT / PACKAGE).rglob("*.py"):
        is_elsewhere = not room_of(file, ROOT).startswith("local")
        if is_elsewhere and '"harness.local' in file.read_text(encoding="utf-8"):
            naming.add(str(file.relative_to(ROOT / PACKAGE)))
    registries = {f"config/{name}.py" for name in ("acceptance_rules", "faults", "methods")}
    assert naming == {"engines/door/__init__.py", "engines/registry.py", *registries}


def test_what_the_door_is_asked_for_is_there() -> None:
    """`local("engine.pair").plan_pair` is found when it is called, and by no type checker."""
    asked = set()
    for file in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Call):
                continue
            call = node.value
            if isinstance(call.func, ast.Name) and call.func.id == "local":
                asked.add((ast.literal_eval(call.args[0]), node.attr))
    assert len(asked) > 5
    for module, name in asked:
        assert hasattr(local(module), name), f"{module}.{name}"


def test_no_command_is_imported_by_another_one_or_by_any_room() -> None:
    """The registry finds commands by their folders."""
    package = ROOT / PACKAGE
    found = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).parts
        own = parts[1] if parts[0] == "commands" and len(parts) > 2 else None
        for statement in imports(file, ROOT):
            path = statement.module.split(".")[1:]
            is_folder = path[:1] == ["commands"] and (package / "/".join(path[:2])).is_dir()
            # `map` is `latency` over a grid.
            allowed = {own, "latency"} if own == "map" else {own}
            if is_folder and len(path) > 1 and path[1] not in allowed:
                found.append(f"{file.relative_to(package)} {statement.module}")
    assert found == []


def test_no_measurement_imports_a_page() -> None:
    found = [
        f"{file.parent.name} {statement.module}"
        for file in (ROOT / PACKAGE / "commands").rglob("measure.py")
        for statement in imports(file, ROOT)
        if "page" in statement.module.split(".")
    ]
    assert found == []


def test_no_files_import_each_other() -> None:
    assert circle(ROOT) == []


def test_planted_circle_is_found(tmp_path: Path) -> None:
    """Of three files, in a function and for types; the fourth is in none."""
    sources = {
        "__init__.py": "",
        "a.py": "from harness.room import b",
        "b.py": "def f():\n    from .c import g",
        "c.py": "if TYPE_CHECKING:\n    from harness.room.a import A",
        "d.py": "from harness.room import a, b, c",
    }
    room = tmp_path / PACKAGE / "room"
    room.mkdir(parents=True)
    for name, source in sources.items():
        (room / name).write_text(source, encoding="utf-8")
    assert {name.rpartition(".")[2] for name in circle(tmp_path)} == {"a", "b", "c"}


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(file, ROOT) for file in (ROOT / PACKAGE).rglob("*.py")}
    assert rooms == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("file", "source", "is_forbidden"),
    [
        ("local/decoding/loops.py", "import harness.local.models.load as load", True),
        ("local/decoding/loops.py", "from harness.engines.requests import Load", True),
        ("local/runners/deep/eager.py", "from ...models import load", True),
        ("local/runners/eager.py", "from .. import models", True),
        ("results/rows.py", "if TYPE_CHECKING:\n    from harness.local.models import load", True),
        ("results/rows.py", "def f():\n    import torch", True),
        (
            "engines/keeper.py",
            "def f():\n    from harness.local.engine.pair import plan_pair",
            True,
        ),
        ("engines/keeper.py", "if TYPE_CHECKING:\n    from torch import Tensor", True),
        (
            "engines/keeper.py",
            "if TYPE_CHECKING:\n    from harness.local.models import load",
            False,
        ),
        ("local/decoding/loops.py", "import torch\nfrom . import verify", False),
        ("local/decoding/loops.py", "from harness.engines.arrivals import Origin", False),
        ("results/rows.py", "from harness import __version__", False),
    ],
)
def test_violations_alone_are_found(
    tmp_path: Path, file: str, source: str, is_forbidden: bool
) -> None:
    planted = tmp_path / PACKAGE / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source, encoding="utf-8")
    assert len(violations(room_of(planted, tmp_path), tmp_path)) == is_forbidden


def test_the_instrument_imports_nothing_heavy_by_any_way() -> None:
    """The statements of a file do not show what the modules behind them import."""
    instrument = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / PACKAGE).rglob("*.py"))
        if not room_of(file, ROOT).startswith("local") and file.name != "__main__.py"
    ]
    script = f"""
import importlib, sys
for module in {instrument}:
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


# An interpreter, and those it starts, is one without these packages.
WITHOUT_LOCAL = os.pathsep.join(map(str, [ROOT / "tests" / "support" / "without_local", ROOT]))


def test_a_server_is_asked_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """Statistics are, once there is something to count."""
    script = """
import sys
from harness.cli.main import main
try:
    main()
finally:
    print({"scipy", "pandas", "jinja2", "matplotlib"} & set(sys.modules))
"""
    # Nothing listens at port 1.
    asked = ["latency", "engine=server", "engine.url=http://127.0.0.1:1/v1"]
    done = subprocess.run(
        [sys.executable, "-c", script, *asked],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": WITHOUT_LOCAL},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "nothing answers at http://127.0.0.1:1/v1" in done.stderr
    assert done.stdout == "set()\n"


def test_torch_is_an_extra_that_setup_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    def packages(requirements: list[str]) -> set[str]:
        names = set()
        for requirement in requirements:
            if requirement.startswith("specharness["):
                for extra in requirement.partition("[")[2].rstrip("]").split(","):
                    names |= packages(extras[extra])
            else:
                names.add(requirement.partition(">")[0].partition("[")[0])
        return names

    assert not packages(project["dependencies"]) & ABSENT
    assert packages(extras["local"]) == HEAVY
    for extra in ("all", "dev", "serve", "gguf"):
        assert packages(extras[extra]) >= packages(extras["local"])
