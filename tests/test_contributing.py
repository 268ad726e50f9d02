"""What `CONTRIBUTING.md` names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:conf|harness|tests|recipes|benchmarks)/[\w./]*)`", TEXT)))
CLASSES = re.findall(r"`(\w+)`\s\(`(harness/[\w/]+\.py)`\)", TEXT)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "file"), CLASSES)
def test_a_class_is_in_its_file(name: str, file: str) -> None:
    assert re.search(rf"^class {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_they_are_found() -> None:
    assert len(PATHS) > 20
    assert len(CLASSES) >= 7
