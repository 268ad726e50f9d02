"""Free text on the command line, and settings changed within a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from harness.commands.compare.record import CompareSettings
from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.menu.overrides import changed, quote_text, with_full_name
from some_settings import settings_of

CHANGEABLE = [
    "decoding.temperature",
    "decoding.num_draft_tokens",
    "decoding.rule",
    "decoding.lenience",
    "view",
]


PLAIN = ["a, b", "it's", "8 * 12 = 96\n3 * 4 =", 'say "x"', "${x}", "漢字 {a} [b] (c", "12", "null"]


@pytest.mark.parametrize(
    "text", [*PLAIN, "back\\slash", "end\\", "\\\\", "\\${x} \\\\${y}", "x\\'y"]
)
def test_a_prompt_arrives_as_it_was_typed(text: str) -> None:
    override = OverridesParser.create().parse_override(quote_text(f"prompt={text}"))
    config = OmegaConf.create({"prompt": override.value()})
    assert OmegaConf.to_container(config, resolve=True) == {"prompt": text}


@pytest.mark.parametrize(
    "argument",
    "model=7B -m --help prompt prompt='a','b' +x=1,2 model=7B,13B model=glob(tiny*) +pair=7B+none".split(),
)
def test_other_arguments_stay_as_they_are(argument: str) -> None:
    assert quote_text(argument) == argument


KNOWN = ["seed", "dtype", "model", "model.dtype", "draft", "draft.dtype", "draft.budget"]
KNOWN += ["results.file", "prompts.file", "decoding.temperature", "decoding.num_draft_tokens"]


@pytest.mark.parametrize(
    ("typed", "full"),
    [
        ("temperature=0,1", "decoding.temperature=0,1"),
        ("num_draft_tokens=auto", "decoding.num_draft_tokens=auto"),
        ("K=2,4", "decoding.num_draft_tokens=2,4"),
        ("budget=8", "draft.budget=8"),
    ],
)
def test_a_setting_may_be_typed_without_its_group(typed: str, full: str) -> None:
    assert with_full_name(typed, KNOWN) == full


@pytest.mark.parametrize(
    "argument",
    [
        *("seed=1", "draft=lookup", "dtype=float16", "draft.dtype=float16"),
        *("file=x.csv", "gamma=2", "decoding.K=2", "+temperature=1", "temperature", "-m", "x=K=1"),
    ],
)
def test_full_names_and_those_of_several_settings_stay(argument: str) -> None:
    assert with_full_name(argument, KNOWN) == argument


@pytest.mark.parametrize(
    "path", ["./mödel", "a b/c", "x=1", "./x#y(z)~", "it's/x", "~/x=1", "漢字.txt", "./a\\"]
)
@pytest.mark.parametrize(
    "key",
    [
        *("model", "+pair", "prompts", "prompts.file", "results.file", "hydra.run.dir"),
        *("draft.rates", "decoding.synthetic_acceptance", "output", "task"),
    ],
)
def test_a_path_may_hold_any_letter(key: str, path: str) -> None:
    override = OverridesParser.create().parse_override(quote_text(f"{key}={path}"))
    assert not override.is_sweep_override()
    assert str(override.value()) == os.path.expanduser(path)


@pytest.mark.parametrize("value", ["bücher.txt", "übung 1", "ein Wörterbuch(2)"])
def test_a_setting_of_a_method_of_ones_own_may_hold_any_letter(value: str) -> None:
    override = OverridesParser.create().parse_override(quote_text(f"draft.file={value}"))
    assert override.value() == value


def test_names_in_a_sweep_may_be_longer_together_than_one_file_name() -> None:
    presets = ",".join(["llama3.1_70B-bnb-4bit", "./my-model"] * 20)
    override = OverridesParser.create().parse_override(quote_text(f"model={presets}"))
    assert [str(choice) for choice in override.sweep_iterator()] == presets.split(",")


def test_several_paths_are_a_sweep_and_a_comma_in_one_that_exists_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ä,b").mkdir()
    parse = OverridesParser.create().parse_override
    assert list(parse(quote_text("model=./ä=1,7B,./ö")).sweep_string_iterator()) == [
        "'./ä=1'",
        "7B",
        "'./ö'",
    ]
    assert parse(quote_text("model=./ä,b")).value() == "./ä,b"
    assert parse(quote_text("hydra.run.dir=ä,${now:%Y}")).value() == "ä,${now:%Y}"


@pytest.fixture
def settings() -> CompareSettings:
    model = ModelSettings(name="7B", repository="team/7B", architecture={"model_type": "llama"})
    return settings_of(
        CompareSettings, model=model, draft=None, placement=PlacementSettings(device_map={"": 0})
    )


def test_settings_change_and_the_rest_stays(settings: CompareSettings) -> None:
    new = changed(settings, "temperature=8e-1 decoding.num_draft_tokens=6 view=race", CHANGEABLE)
    assert (new.decoding.temperature, new.decoding.num_draft_tokens, new.view) == (0.8, 6, "race")
    assert (new.model, new.draft, new.placement) == (settings.model, None, settings.placement)
    assert settings.decoding.temperature == 0.5


@pytest.mark.parametrize(
    ("assignments", "complaint"),
    [
        ("temperature=-1", "decoding.temperature=-1.0: must not be negative"),
        ("temperature=warm", "decoding.temperature=warm: must be a number"),
        ("view=text temperature=1 top_pp=3", "top_pp: no such setting"),
        ("tempratur=1", "tempratur: no such setting (did you mean temperature?)"),
        (
            "decoding.tempratur=1",
            "decoding.tempratur: no such setting (did you mean decoding.temperature?)",
        ),
        ("model=13B", "model: cannot be changed in a session, only decoding.num_draft_tokens"),
        ("temperature 1", ":set=temperature: is followed by key=value"),
        ("temperature=", "decoding.temperature=: must be a number"),
        ("temperature={", "temperature: has a value that cannot be read"),
        ("lenience=0.5", "decoding.lenience=0.5: below 1 needs decoding.rule=google"),
    ],
)
def test_a_wrong_change_is_one_line_and_changes_nothing(
    settings: CompareSettings, assignments: str, complaint: str
) -> None:
    with pytest.raises(SettingError) as error:
        changed(settings, assignments, CHANGEABLE)
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


def test_what_depends_on_each_other_changes_together(settings: CompareSettings) -> None:
    assert changed(settings, "lenience=0.5 rule=google", CHANGEABLE).decoding.lossy
