"""Settings explain themselves, in `--help` and on a page of the site, and their defaults agree."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documented import ROOT, typed_lines
from harness.cli.help import TEXTS
from harness.cli.names import load_preset
from harness.commands.audit.rows import NUMBERS
from harness.commands.command import ConfiguredCommand
from harness.commands.registry import commands, configured, with_settings
from harness.config.methods import METHODS
from harness.config.run import RunSettings
from harness.engines.record import ENGINES
from in_process import Harness
from recipes import described
from recipes.described import Setting
from recipes.help_texts import help_texts

WITH_SETTINGS = [command for command in commands() if isinstance(command, ConfiguredCommand)]


def every_setting() -> list[Setting]:
    found = described.described(RunSettings)
    for group in described.GROUPS:
        found += described.group_settings(group)
    for command in WITH_SETTINGS:
        found += described.described(command.settings)
    for method in METHODS.all().values():
        found += described.method_settings(method.settings)
    for engine in ENGINES.all().values():
        found += described.engine_settings(engine.settings)
    return found


def test_every_setting_has_a_meaning() -> None:
    assert [setting.name for setting in every_setting() if not setting.meaning] == []


def test_texts_of_help_are_as_settings_and_columns_are() -> None:
    """After a change of a setting, a column or a preset: `python -m recipes.help_texts`."""
    texts = help_texts()
    by_hand = {"audit.txt", "report.txt"}
    assert {file.name for file in TEXTS.iterdir()} == {*texts, *by_hand}
    for name, text in texts.items():
        assert (TEXTS / name).read_text(encoding="utf-8") == text, name
    for name in NUMBERS:
        assert name in (TEXTS / "audit.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("", "harness COMMAND --help shows"),
        ("help", "harness COMMAND --help shows"),
        ("--help", "harness COMMAND --help shows"),
        ("latency --help", "--cfg job prints the"),
        ("latency K=4 -m -h", "--cfg job prints the"),
        ("help latency all", "\nengine=server\n"),
        ("latency help presets", "model="),
        ("help presets", "model="),
        ("help columns", "speedup ±"),
        ("report --help", "usage: harness report"),
        ("help audit all", "usage: harness audit"),
    ],
)
def test_help_is_found(harness: Harness, typed: str, shown: str) -> None:
    assert shown in harness(*typed.split()).stdout


def test_help_needs_neither_hydra_nor_pandas() -> None:
    program = (
        "import sys; from harness.cli.main import main\n"
        "try: main()\n"
        "finally: print({'hydra', 'pandas', 'pydantic', 'rich', 'numpy'} & sys.modules.keys())"
    )
    for words in (["--help"], ["latency", "--help"], ["help", "columns"], ["report", "-h"]):
        line = [sys.executable, "-c", program, *words]
        done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
        assert done.stdout.endswith("\nset()\n"), words


def test_commands_can_be_typed_in_bash_and_zsh() -> None:
    """zsh takes brackets without quotes for patterns of file names."""
    typed = typed_lines()
    assert len(typed) > 80
    for line in typed:
        own, _, _ = line.partition(" -- ")  # braces of one word mean nothing to either shell
        without_quoted = re.sub("'[^']*'|\"[^\"]*\"", "", own).partition(" #")[0]
        assert not set("[](){}*") & set(without_quoted), line


@pytest.mark.parametrize("file", ["common", *with_settings()])
def test_no_default_is_written_twice(file: str) -> None:
    """The classes have the defaults; files of `conf/` hold what differs from them."""
    kind = RunSettings if file == "common" else configured(file).settings
    config = load_preset(file)
    groups = {group: config[group] for group in described.GROUPS if group in config}
    for group, values in [("", config), *groups.items()]:
        own = described.GROUPS[group] if group else kind
        defaults = {field.name: field.default for field in dataclasses.fields(own)}
        for name in values.keys() & defaults.keys():
            assert values[name] != defaults[name], (file, group, name)


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md")]))
def test_links_of_pages_lead_to_files(page: Path) -> None:
    """Those of `docs/` are checked when the site is built."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    own = [link for link in links if not link.startswith("http")]
    assert [link for link in own if not (page.parent / link).exists()] == []
