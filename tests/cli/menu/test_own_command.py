"""A command in a user's own file, with its own kind of row, does everything that ours do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from harness.commands.registry import COMMANDS
from in_process import QUICKEST_PAIR, Harness, results

SOURCE = Path(__file__).parents[2] / "support" / "own_command.py"
COMMAND = "./own_command.py:Lengths"
QUICK = [*QUICKEST_PAIR, "decoding.max_new_tokens=4", "decoding=greedy"]


@pytest.fixture(autouse=True)
def _own_file(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the file to where the command runs; nothing of it stays in this process afterwards."""
    shutil.copy(SOURCE, ".")
    monkeypatch.delitem(sys.modules, "own_command", raising=False)
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
    monkeypatch.setattr(COMMANDS, "_loaded", dict(COMMANDS._loaded))


def test_it_runs_alone_and_is_reported(harness: Harness) -> None:
    harness(COMMAND, *QUICK, "num_prompts=1")
    assert list(results("lengths")["longest_answer"]) == [4]
    shown = harness("report", COMMAND, "results").stdout
    assert COMMAND in shown
    assert "longest answer" in " ".join(shown.split())
    assert "4" in Path("results/report.md").read_text()


def test_it_sweeps_and_is_not_measured_twice(harness: Harness) -> None:
    swept = harness(COMMAND, *QUICK, "-m", "num_prompts=1,2")
    assert "[2/2] num_prompts=2: 4.0 tokens" in swept.stderr
    assert "longest answer" in " ".join(swept.stdout.split())
    again = harness(COMMAND, *QUICK, "-m", "num_prompts=1,2")
    assert again.stderr.count("measured before") == 2
    # How long the rest takes is not known from jobs that took no time.
    assert "(measured before; 1 left)" in again.stderr
    with Path("own_command.py").open("a") as file:
        file.write("# Another version.\n")
    changed = harness(COMMAND, *QUICK, "-m", "num_prompts=1,2")
    assert changed.stderr.count("measured before") == 0


def test_a_setting_without_a_default_must_be_typed(harness: Harness) -> None:
    file = Path("own_command.py")
    file.write_text(file.read_text().replace('unit: str = "tokens"', "unit: str"))
    assert harness.refused(COMMAND, *QUICK) == "unit: must be set"
    assert "unit" in harness(COMMAND, "--help").stdout
    harness(COMMAND, *QUICK, "num_prompts=1", "unit=letters")
    assert list(results("lengths")["unit"]) == ["letters"]


def test_its_rows_are_kept_without_a_page(harness: Harness) -> None:
    file = Path("own_command.py")
    file.write_text(file.read_text().partition("    def page(")[0])
    harness(COMMAND, *QUICK, "-m", "num_prompts=1,2")
    assert list(results("lengths")["longest_answer"]) == [4, 4]
    harness("report", COMMAND, "results")
