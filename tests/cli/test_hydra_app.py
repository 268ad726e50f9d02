"""What harness takes from Hydra beyond its public interface. Needs no support of other tests, so that it runs with any
release:

pip install --no-deps --target /tmp/hydra hydra-core==1.3.2
PYTHONPATH=/tmp/hydra:. pytest --noconftest -o addopts= tests/cli/test_hydra_app.py
"""

from __future__ import annotations

import argparse
import os
import sys
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

called: list[Any] = []


def task(config: Any) -> None:
    called.append((config.size, list(sys.argv), os.environ["HYDRA_FULL_ERROR"]))
    if config.size == "bad":
        raise ArithmeticError(config.size)


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    called.clear()
    directory = tmp_path / "conf"
    (directory / "model").mkdir(parents=True)
    defaults = "defaults: [{model: small}, {override hydra/job_logging: disabled}, _self_]\n"
    output = "hydra: {output_subdir: null, run: {dir: out}, sweep: {dir: out}}\n"
    (directory / "main.yaml").write_text(f"{defaults}{output}command: latency\nsize: 1\n")
    (directory / "model" / "small.yaml").write_text("layers: 2\n")
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "own.yaml").write_text("layers: 3\n")
    return directory


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
    assert "completion" in repr(hydra_app.options()["-sc"].help)


def test_a_run_and_a_sweep_of_the_line(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = list(sys.argv)
    for line, sizes in [(["program", "size=2"], [2]), (["program", "-m", "size=3,4"], [3, 4])]:
        called.clear()
        with hydra_app.calling(task, line, conf, "main") as call:
            call()
        assert called == [(size, line, "1") for size in sizes]
        assert sys.argv == before
        assert "HYDRA_FULL_ERROR" not in os.environ
