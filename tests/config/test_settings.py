"""Settings, rules of acceptance, and synthetic acceptance in each of its shapes."""

from __future__ import annotations

import math
import pickle
from typing import Any, ClassVar

import pytest

from harness.cli.conversion import from_config
from harness.commands.latency.record import LatencySettings
from harness.commands.recovery.record import RecoverySettings
from harness.config.acceptance_rules import AcceptanceRule
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, ModelSettings

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
    settings = from_config(LatencySettings, {**COMPLETE, "seed": 2**63 - 1})
    assert settings.draft is None
    assert settings.seed == 2**63 - 1
    assert settings.decoding.temperature == 1.0
    assert isinstance(settings.decoding.temperature, float)
    assert settings.model == ModelSettings(name="m", repository="a/b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "m"}}, "model.repository: must be set"),
        ({"model": "7B"}, "model=7B: must be a group of settings"),
        ({"seed": 2**63}, f"seed={2**63}: must be below 2^63"),
    ],
)
def test_a_preset_of_ones_own_that_is_wrong_names_setting_rule_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError) as caught:
        from_config(LatencySettings, {**COMPLETE, **changes})
    assert str(caught.value).startswith(message)


def test_a_wrong_word_in_a_list_is_named_alone() -> None:
    with pytest.raises(SettingError) as caught:
        from_config(RecoverySettings, {"samplings": ["top_k", "top_9"]})
    assert str(caught.value).startswith("samplings=top_9: each must be one of as_asked, ")


def test_lenience_is_lossy_and_googles_alone() -> None:
    assert not DecodingSettings(rule="google").lossy
    assert DecodingSettings(rule="google", lenience=0.9).lossy
    with pytest.raises(SettingError, match=r"decoding\.rule=google"):
        DecodingSettings(lenience=0.9)


def test_errors_survive_pickling_between_processes() -> None:
    error = pickle.loads(pickle.dumps(SettingError("decoding.top_p", "must be in (0, 1]", 2)))
    assert str(error) == "decoding.top_p=2: must be in (0, 1]"
    assert error.exit_code == 2


class Honest(AcceptanceRule):
    lossless = True


class HonestWhenDrawn(Honest):
    lossless_greedily: ClassVar[bool | None] = False


@pytest.mark.parametrize(
    ("rule", "greedily", "drawn"),
    [(AcceptanceRule(), False, False), (Honest(), True, True), (HonestWhenDrawn(), False, True)],
)
def test_a_rule_is_greedily_what_it_is_otherwise_unless_it_says_so(
    rule: AcceptanceRule, greedily: bool, drawn: bool
) -> None:
    assert rule.is_lossless(0.0) is greedily
    assert rule.is_lossless(0.7) is drawn


@pytest.mark.parametrize("asked", [math.nan, 1.5, -0.1, (), (0.5, 2.0)])
def test_a_rate_is_a_probability(asked: Any) -> None:
    with pytest.raises(SettingError, match=r"must be in \[0, 1\]"):
        DecodingSettings(synthetic_acceptance=asked)
