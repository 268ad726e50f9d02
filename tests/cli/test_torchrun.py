"""torchrun's processes become one that starts the ranks, and its number must be the one asked for."""

from __future__ import annotations

import os

import pytest

from harness.cli.ranks import num_ranks, take_over_from_torchrun, with_ranks
from harness.commands.latency.record import LatencySettings
from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from some_settings import settings_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the first of two processes; they are as before after the test."""
    for name in ("HARNESS_RANKS", "HARNESS_RANK_MACHINES"):
        monkeypatch.setenv(name, "")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def split(**changes: object) -> LatencySettings:
    placement = PlacementSettings(strategy="tensor_parallel")
    model = ModelSettings(name="m", repository="m", **changes)
    return settings_of(LatencySettings, model=model, draft=None, placement=placement)


@pytest.mark.usefixtures("torchrun")
def test_only_the_variables_of_torchrun_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("LOCAL_CACHE", "ROLE_ARN", "MASTER_KEY", "RANKING")
    for name in others:
        monkeypatch.setenv(name, "mine")
    assert not take_over_from_torchrun()
    assert not set(TORCHRUN) & set(os.environ)
    assert all(os.environ[name] == "mine" for name in others)


@pytest.mark.usefixtures("torchrun")
def test_another_number_than_torchruns_is_refused_wherever_it_was_asked_for() -> None:
    take_over_from_torchrun()
    assert num_ranks(with_ranks(split())) == 2
    assert num_ranks(with_ranks(split(gpus=2))) == 2
    with pytest.raises(SettingError, match=r"model\.gpus=4: must be left out under torchrun"):
        with_ranks(split(gpus=4))
