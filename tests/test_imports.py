"""The table of imports in ARCHITECTURE.md: who may import whom, no circles, and no torch where an answer is quick."""

import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

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


@functools.cache
def graph(types: bool = True) -> dict[str, set[str]]:
    """What each module imports, in functions too, and for types alone where that is asked for."""
    asked = {"include_external_packages": True, "exclude_type_checking_imports": not types}
    built = grimp.build_graph(PACKAGE, **asked, cache_dir=None)
    own = [module for module in built.modules if module.startswith(PACKAGE)]
    return {module: built.find_modules_directly_imported_by(module) for module in own}


def room_of(module: str) -> str:
    """The name of a module's room: `results`, `local.drafting`; for what is not ours that of the package."""
    first, *rest = module.split(".")
    if first != PACKAGE:
        return first
    wing = ".".join(rest[:2])
    return wing if wing in MAY_IMPORT else (rest or ["__init__"])[0]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_the_table_allows(room: str) -> None:
    found = []
    for module, imported in graph().items():
        if room_of(module) != room:
            continue
        if not room.startswith("local"):
            found += [f"{module} {package}" for package in imported & HEAVY]
        for other in imported:
            # A room, or one file of it: `engines.arrivals`, `local.models.cache_names`.
            named = {room_of(other), other.removeprefix(f"{PACKAGE}.")}
            for_types = other not in graph(types=False)[module]
            is_allowed = room_of(other) == room or not MAY_IMPORT[room].isdisjoint(named)
            if for_types and room in NAME_TYPES:
                is_allowed = is_allowed or room_of(other).startswith("local")
            if other.startswith(f"{PACKAGE}.") and not is_allowed:
                found.append(f"{module} {other}")
    assert found == []


def test_the_door_and_registries_alone_name_the_other_wing() -> None:
    """A module that is imported by its name is in no import statement."""
    naming = set()
    for file in (ROOT / PACKAGE).rglob("*.py"):
        is_elsewhere = file.relative_to(ROOT / PACKAGE).parts[0] != "local"
        if is_elsewhere and '"harness.local' in file.read_text(encoding="utf-8"):
            naming.add(str(file.relative_to(ROOT / PACKAGE)))
    registries = {f"config/{name}.py" for name in ("acceptance_rules", "methods")}
    assert naming == {"engines/door/__init__.py", "engines/record.py", *registries}


def test_no_command_is_imported_by_another_one_or_by_any_room() -> None:
    """The registry finds commands by their folders."""

    def command_of(module: str) -> str:
        package, _, rest = module.partition(f"{PACKAGE}.commands.")
        folder = rest.partition(".")[0]
        is_folder = not package and (ROOT / PACKAGE / "commands" / folder).is_dir()
        return folder if is_folder else ""

    found = [
        (module, other)
        for module, imported in graph().items()
        for other in imported
        if command_of(other) not in ("", command_of(module))
    ]
    assert found == []


def test_no_files_import_each_other() -> None:
    """In functions or for types alone neither; raises an error that names the circle."""
    graphlib.TopologicalSorter(graph()).prepare()


def test_every_room_is_in_the_table() -> None:
    assert {*map(room_of, graph())} == set(MAY_IMPORT)


def test_the_instrument_imports_nothing_heavy_by_any_way() -> None:
    """The statements of a file do not show what the modules behind them import."""
    others = [module for module in sorted(graph()) if not room_of(module).startswith("local")]
    instrument = [module for module in others if not module.endswith("__main__")]
    script = f"""
import importlib, sys
for module in {instrument}:
    importlib.import_module(module)
    heavy = {ABSENT | {"scipy.stats"}} & set(sys.modules)
    assert not heavy, f"{{module}} imports {{heavy}}"
"""
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_server_is_asked_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """Statistics are, once there is something to count."""
    script = """
import sys
from harness.cli.main import main
try:
    main()
finally:
    print({"torch", "scipy", "pandas", "jinja2", "matplotlib"} & set(sys.modules))
"""
    # Nothing listens at port 1.
    asked = ["latency", "engine=server", "engine.url=http://127.0.0.1:1/v1"]
    done = subprocess.run(
        [sys.executable, "-c", script, *asked],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "nothing answers at http://127.0.0.1:1/v1" in done.stderr
    assert done.stdout == "set()\n"
