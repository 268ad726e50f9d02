"""The seam is as small as ARCHITECTURE.md draws it."""

from __future__ import annotations

import re
from pathlib import Path

from harness.engines.protocol import Arm, Engine

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"


def names_of(kind: type) -> set[str]:
    """The public attributes and methods of a class."""
    names = vars(kind).keys() | kind.__annotations__
    return {name for name in names if not name.startswith("_")}


def test_every_name_of_the_seam_is_drawn() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    _, section = text.split("**An engine answers a question", 1)
    drawing = section.split("```")[1]
    for name, kind in (("engine", Engine), ("arm", Arm)):
        assert set(re.findall(rf"\b{name}\.(\w+)", drawing)) == names_of(kind)
