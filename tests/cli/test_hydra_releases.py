"""What harness takes from Hydra beyond its public interface. With another release of it:

pip install --no-deps --target /tmp/hydra hydra-core==1.3.2
PYTHONPATH=/tmp/hydra pytest tests/cli
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import hydra

# Every release that pyproject.toml allows. All were tried on 2026-11-23.
TRIED = ["1.3.2", "1.3.3", "1.3.4", "1.3.5", "1.3.6", "1.3.7", "1.3.8"]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_releases_that_are_allowed_were_tried() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert "hydra-core>=1.3.2,<1.4" in dependencies
    assert hydra.__version__ in TRIED, "try it, and add it"
