"""Settings explain themselves, in `--help` and on a page of the site, and their defaults agree."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from documented import ROOT, typed_lines
from harness.cli.menu import documentation
from harness.cli.menu.columns import columns_by_topic
from harness.cli.menu.documentation import Setting
from harness.cli.menu.names import load_preset
from harness.commands.command import ConfiguredCommand
from harness.commands.registry import commands, configured, with_settings
from harness.config.methods import METHODS
from harness.config.run import RunSettings
from harness.engines.registry import ENGINES
from in_process import Harness
from recipes.reference_pages import PAGES

WITH_SETTINGS = [command for command in commands() if isinstance(command, ConfiguredCommand)]


def every_setting() -> list[Setting]:
    found = documentation.described(RunSettings)
    for group in documentation.GROUPS:
        found += documentation.group_settings(group)
    for command in WITH_SETTINGS:
        found += documentation.described(command.settings)
    for method in METHODS.all().values():
        found += documentation.method_settings(method.settings)
    for engine in ENGINES.all().values():
        found += documentation.engine_settings(engine.settings)
    return found


def test_every_setting_has_a_meaning() -> None:
    assert [setting.name for setting in every_setting() if not setting.meaning] == []


def test_the_page_has_every_setting_below_one_heading() -> None:
    rows = re.findall(r"^(?:#+ .*|\| `[^`]+` \|)", PAGES["settings.md"](), re.MULTILINE)
    heading = ""
    placed = []
    for row in rows:
        if row.startswith("#"):
            heading = row
        else:
            placed.append((heading, row))
    assert len(set(placed)) == len(placed)
    assert {row for _, row in placed} == {f"| `{setting.name}` |" for setting in every_setting()}


def test_help_names_every_column(harness: Harness) -> None:
    shown = harness("help", "columns").stdout
    for columns in columns_by_topic().values():
        assert [column.name for column in columns if f"\n  {column.name}" not in shown] == []


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
    groups = {group: config[group] for group in documentation.GROUPS if group in config}
    for group, values in [("", config), *groups.items()]:
        own = documentation.GROUPS[group] if group else kind
        defaults = {field.name: field.default for field in dataclasses.fields(own)}
        for name in values.keys() & defaults.keys():
            assert values[name] != defaults[name], (file, group, name)


@pytest.mark.parametrize("command", WITH_SETTINGS, ids=lambda command: command.name)
def test_help_has_the_meaning_and_the_value_of_each_setting(
    harness: Harness, command: ConfiguredCommand[Any]
) -> None:
    shown = harness(command.name, "temperature=0.7", "--help", "all").stdout
    for setting in documentation.described(command.settings):
        assert f"\n  {setting.name}" in shown
    assert "decoding.temperature      0 is greedy [0.7]" in shown


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md")]))
def test_links_of_pages_lead_to_files(page: Path) -> None:
    """Those of `docs/` are checked when the site is built."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    own = [link for link in links if not link.startswith("http")]
    assert [link for link in own if not (page.parent / link).exists()] == []
