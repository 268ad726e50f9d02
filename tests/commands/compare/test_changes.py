"""Settings that change while the models of `compare` stay loaded."""

from __future__ import annotations

import pytest

from harness.commands.compare.changes import changed
from harness.commands.compare.record import CompareSettings
from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from some_settings import settings_of


@pytest.fixture
def settings() -> CompareSettings:
    model = ModelSettings(name="7B", repository="team/7B", architecture={"model_type": "llama"})
    return settings_of(
        CompareSettings, model=model, draft=None, placement=PlacementSettings(device_map={"": 0})
    )


def test_settings_change_together_and_the_rest_stays(settings: CompareSettings) -> None:
    new = changed(settings, "T=8e-1 K=6 view=race lenience=0.5 rule=google")
    assert (new.decoding.temperature, new.decoding.num_draft_tokens, new.view) == (0.8, 6, "race")
    assert new.decoding.lossy
    assert (new.model, new.draft, new.placement) == (settings.model, None, settings.placement)
    assert settings.decoding.temperature == 0.5
    # As Python and `:set` alone write them.
    new = changed(settings, "temperature=.8 ignore_eos=False")
    assert (new.decoding.temperature, new.decoding.ignore_eos) == (0.8, False)


@pytest.mark.parametrize(
    ("assignments", "complaint"),
    [
        ("temperature=-1", "decoding.temperature=-1.0: must not be negative"),
        ("temperature=warm", "decoding.temperature=warm: has a value that cannot be read"),
        (
            "view=text temperature=1 top_pp=3",
            "top_pp: cannot be changed in a session (did you mean top_p?)",
        ),
        (
            "decoding.tempratur=1",
            "decoding.tempratur: cannot be changed in a session (did you mean temperature?)",
        ),
        ("model=13B", "model: cannot be changed in a session, only decoding.num_draft_tokens"),
        ("temperature 1", "temperature: cannot be read as setting=value"),
        ("temperature=", "decoding.temperature=: has a value that cannot be read"),
        ("temperature={", "decoding.temperature={: has a value that cannot be read"),
        (
            "lenience=0.5",
            "decoding.lenience=0.5: needs decoding.rule=google; the other rules have no lenience",
        ),
    ],
)
def test_a_wrong_change_is_one_line_and_changes_nothing(
    settings: CompareSettings, assignments: str, complaint: str
) -> None:
    with pytest.raises(SettingError) as error:
        changed(settings, assignments)
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)
