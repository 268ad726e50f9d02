from __future__ import annotations

import pickle
import typing
from typing import Any

import pytest

from harness.cli.menu.conversion import from_config
from harness.commands.eval.record import Task
from harness.commands.eval.tasks import OPERATIONS
from harness.commands.latency.record import LatencySettings
from harness.config.errors import SettingError
from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
)

MODEL = {"name": "m", "repository": "a/b"}
COMPLETE: dict[str, Any] = {
    "model": MODEL,
    "draft": {"name": "none"},
    "decoding": {"temperature": 1},
    "placement": {},
    "prompts": {"name": "p", "file": "p.txt"},
    "results": {"file": "r.csv"},
}


def test_a_complete_mapping_becomes_settings() -> None:
    settings = from_config(LatencySettings, COMPLETE)
    assert settings.draft is None
    assert settings.decoding.temperature == 1.0
    assert isinstance(settings.decoding.temperature, float)
    assert settings.model == ModelSettings(name="m", repository="a/b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "m"}}, "model.repository: must be set"),
        ({"model": "7B"}, "model=7B: must be a group of settings"),
    ],
)
def test_a_preset_of_ones_own_that_is_wrong_names_setting_rule_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError) as caught:
        from_config(LatencySettings, {**COMPLETE, **changes})
    assert str(caught.value).startswith(message)


def test_lenience_is_lossy_and_googles_alone() -> None:
    assert not DecodingSettings(rule="google").lossy
    assert DecodingSettings(rule="google", lenience=0.9).lossy
    with pytest.raises(SettingError, match=r"decoding\.rule=google"):
        DecodingSettings(lenience=0.9)


def test_errors_survive_pickling_between_processes() -> None:
    error = pickle.loads(pickle.dumps(SettingError("decoding.top_p", "must be in (0, 1]", 2)))
    assert str(error) == "decoding.top_p=2: must be in (0, 1]"
    assert error.exit_code == 2


def test_the_tasks_of_the_setting_are_those_that_there_are() -> None:
    assert set(typing.get_args(Task)) == {*OPERATIONS, "gsm8k"}
