"""An installed package offers a command, a kind of head, a method and an engine: its metadata is
all that names them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli.menu import documentation
from harness.commands.registry import COMMANDS
from harness.config.methods import METHODS
from harness.config.sizes import PACKAGE
from harness.engines.registry import ENGINES
from harness.local.drafting.registry import HEADS
from in_process import Harness, results

SUPPORT = Path(__file__).parents[2] / "support"
MEDUSA = PACKAGE / "local" / "models" / "shipped" / "tiny_medusa"
METADATA = "Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n"
ENTRY_POINTS = """
[harness.commands]
lengths = own_command:Lengths
[harness.heads]
hydra = foreign_head:Hydra
[harness.methods]
foreign_method = harness.local.drafting.methods.lookup:Lookup
[harness.engines]
foreign_engine = harness.local.engine.records.huggingface:HuggingFace
"""
# Medusa heads, in a format that no kind of ours recognises.
HEAD = """
from harness.local.drafting.kinds.medusa import Medusa


class Hydra(Medusa):
    trains = False

    def recognises(self, raw):
        return "hydra_heads" in raw
"""


@pytest.fixture(autouse=True)
def _installed(harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    site = tmp_path / "site"
    information = site / "foreign-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(METADATA)
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "foreign_head.py").write_text(HEAD)
    shutil.copy(SUPPORT / "own_command.py", site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "own_command", raising=False)
    yield
    for registry in (COMMANDS, HEADS, METHODS, ENGINES):
        registry._loaded.clear()
    sys.modules.pop("foreign_head", None)


def test_its_command_runs_and_is_listed(harness: Harness) -> None:
    harness("lengths", "num_prompts=1", "decoding.max_new_tokens=4", "decoding=greedy")
    assert list(results("lengths")["longest_answer"]) == [4]
    assert "lengths" in harness().stdout


def test_the_page_of_settings_is_of_this_project_alone(harness: Harness) -> None:
    assert "foreign_method" in harness("latency", "--help").stdout
    page = documentation.document()
    assert "foreign" not in page
    assert "### draft=lookup" in page


def test_its_head_is_recognised_by_its_configuration(harness: Harness) -> None:
    shutil.copytree(MEDUSA, "my_head")
    file = Path("my_head/config.json")
    stored = json.loads(file.read_text())
    stored["hydra_heads"] = stored.pop("medusa_num_heads")
    file.write_text(json.dumps(stored))
    quick = ["num_prompts=1", "num_warmup=0", "decoding=greedy", "decoding.max_new_tokens=12"]
    outcome = harness("latency", "draft=./my_head", *quick)
    assert "hydra head" in outcome.stderr
    row = results().iloc[-1]
    assert row["identical_prompts"] == 1
    assert row["mean_acceptance_length"] > 2
