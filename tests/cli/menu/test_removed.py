"""Names that are gone: one line that says what to type instead."""

from __future__ import annotations

import pytest

from harness.cli.menu.conversion import setting_hints
from harness.cli.menu.removed import COMMANDS, SETTINGS
from harness.cli.menu.typed import for_hydra
from harness.commands.latency.record import LatencySettings
from harness.config.errors import SettingError
from in_process import Harness

KNOWN = setting_hints(LatencySettings)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("gone.old=true", "gone.old: was removed: type new=true"),
        ("old=true", "old: was removed: type new=true"),
        ("gone.old.part=1", "gone.old.part: was removed: type new=true"),
        ("--old", "old: was removed: type new=true"),
        ("engine=abacus", "engine=abacus: was removed: count"),
        ("engine=local,abacus9", "engine=abacus9: was removed: count"),
    ],
)
def test_a_removed_setting_or_value_is_answered_by_its_line(
    typed: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "gone.old", "type new=true")
    monkeypatch.setitem(SETTINGS, "engine=abacus*", "count")
    with pytest.raises(SettingError) as caught:
        for_hydra([typed], "latency", KNOWN)
    assert str(caught.value) == message


def test_a_removed_command_is_answered_by_its_line(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "bake", "buy bread")
    assert harness.refused("bake", "seed=1") == "bake: was removed: buy bread"


def test_nothing_that_can_be_typed_is_called_removed() -> None:
    for name in SETTINGS:
        assert name not in KNOWN
