"""What harness takes from Hydra beyond its public interface. With another release of it:

pip install --no-deps --target /tmp/hydra hydra-core==1.3.2
PYTHONPATH=/tmp/hydra pytest tests/cli
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.utils import get_args_parser

from harness.cli import hydra_app

# Every release that pyproject.toml allows. All were tried on 2026-11-23.
TRIED = ["1.3.2", "1.3.3", "1.3.4", "1.3.5", "1.3.6", "1.3.7", "1.3.8"]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_releases_that_are_allowed_were_tried() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert "hydra-core>=1.3.2,<1.4" in dependencies
    assert hydra.__version__ in TRIED, "try it, and add it"


def test_help_texts_are_not_read_as_options_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.14 reads them, where Hydra's own parser fails."""
    add_argument = argparse._ActionsContainer.add_argument

    def checking(container: Any, *names: str, **settings: Any) -> argparse.Action:
        action = add_argument(container, *names, **settings)
        assert action.help is None or "%" not in action.help
        return action

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", checking)
    with pytest.raises((TypeError, ValueError)):
        get_args_parser()
    assert hydra_app.flags(["-m", "K=2"]).multirun
    assert "add_argument" not in vars(argparse.ArgumentParser)
