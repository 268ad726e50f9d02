"""Prompt sets by name, from a directory laid out as the hub's cache, what settings make of tables; endless files."""

import importlib.util
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from omegaconf import OmegaConf

from harness.cli import names
from harness.cli.conversion import from_config
from harness.config.errors import RunError, SettingError
from harness.config.settings import PromptSettings
from harness.measuring.prompts.sets import PromptSet, load_prompts
from in_process import QUICKEST_PAIR, Harness, results
from prompt_rows import NUM_ROWS, ROWS, fill_cache, write_rows
from shipped_copies import copy_shipped

needs_parquet = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed"
)


def preset(name: str, **changes: object) -> PromptSettings:
    """The settings that `prompts=NAME` stands for."""
    names.register()
    source = names.NameSource("harness", "harness-names://")
    config: Any = OmegaConf.to_container(source.load_config(f"prompts/{name}").config, resolve=True)
    return from_config(PromptSettings, config | changes)


OURS = {"lengths", "english", "tiny"}
HUB = {file.stem for file in (names.CONF / "prompts").glob("*.yaml")} - OURS


@pytest.mark.parametrize("name", sorted(HUB))
def test_a_set_by_name_is_read_from_the_cache_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt holds the text of its own row, and templates have nothing left to fill in."""
    monkeypatch.chdir(tmp_path)
    settings = preset(name)
    assert settings.name == name
    assert settings.licence is not None
    assert settings.repository is None or len(settings.revision or "") == 40
    fill_cache(monkeypatch, tmp_path / "hub", settings)
    prompts = load_prompts(settings).prompts
    assert len(prompts) == NUM_ROWS * len(settings.files)
    for number, prompt in enumerate(prompts):
        assert str(number % NUM_ROWS) in prompt.text
        assert not re.search(r"{[a-z_]+}", prompt.text.replace("\\boxed{}", ""))
    categories = {prompt.category for prompt in prompts}
    expected = {
        "mt_bench": {"writing", "math"},
        "math500": {"Algebra", "Geometry"},
        "gsm8k": {None},
    }
    assert categories == expected.get(name, categories)
    if name == "speculators":
        assert len(categories) == 9
    if name == "alpaca":
        assert prompts[1].text == "Name 1 animals.\n\nOnly birds."
    if name == "mbpp":
        assert "\n\nassert f() == 1\nassert f\n" in prompts[1].text


@pytest.mark.parametrize("system", ["Be terse.", [{"type": "text", "text": "Be terse."}]])
@pytest.mark.parametrize("nest", [lambda body: body, lambda body: {"body": body}])
def test_a_system_prompt_beside_messages_is_the_first_of_them(
    tmp_path: Path, system: Any, nest: Callable[[Any], Any]
) -> None:
    """As in bodies of Anthropic's API."""
    asked = {"role": "user", "content": "Say hi."}
    said = {"role": "system", "content": "Be terse."}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([nest({"system": system, "messages": [asked], "max_tokens": 64})]))
    [prompt] = load_prompts(PromptSettings(name="mine", file=str(file))).prompts
    assert (prompt.text, prompt.messages) == ("Say hi.", (said, asked))
    for setting, messages, name in (
        ("Be brief.", [asked], "prompts.system"),
        (None, [said, asked], "system"),
    ):
        file.write_text(json.dumps([{"system": system, "messages": messages}]))
        with pytest.raises(SettingError, match=f"has a system prompt already, besides {name}$"):
            load_prompts(PromptSettings(name="mine", file=str(file), system=setting))


def drawn(seed: int | None) -> PromptSet:
    settings = preset("spec_bench", file="spec.jsonl", seed=seed)
    return load_prompts(settings)


def test_a_seed_draws_from_each_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("spec.jsonl"), [ROWS["spec_bench"](number) for number in range(40)])
    taken = {seed: drawn(seed).take(10) for seed in (None, 0, 1)}
    assert [prompt.index for prompt in taken[None]] == list(range(10))
    assert taken[0] == drawn(0).take(10)
    assert len({tuple(prompt.index for prompt in prompts) for prompts in taken.values()}) == 3
    for prompts in taken.values():
        assert Counter(prompt.category for prompt in prompts) == {"writing": 5, "math": 5}


@needs_parquet
def test_the_preset_for_lengths_has_each_length_as_a_category(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = preset("lengths", lengths=[64, 256])
    fill_cache(monkeypatch, tmp_path / "hub", settings)
    loaded = load_prompts(settings)
    assert Counter(prompt.num_tokens for prompt in loaded.prompts) == {64: 5, 256: 5}
    assert loaded.prompts[1].category == "256 tokens"
    assert len({prompt.text for prompt in loaded.prompts}) == NUM_ROWS


@pytest.mark.parametrize(
    ("rows", "changes", "rule"),
    [
        ([{"ask": "a"}], {"columns": {"prompt": "asks"}}, "has no column asks, which prompts.columns"),
        ([{"ask": "a"}], {"template": "Q: {asks}"}, "has no column asks, which prompts.template"),
        ([{"ask": "a"}], {}, "has none of prompt"),
        ({"ask": "a"}, {}, "must hold a JSON array"),
        (["a", ["b"]], {}, "row 2 must be an object"),
        ([{"prompt": "One short line."}], {"lengths": (512,)}, "must be at most . tokens"),
        ([{"turns": ["a", "b"]}], {"lengths": (1,), "system": "Be brief."}, "cannot be combined"),
        ([{"conversations": [{"from": "gpt", "value": "x"}]}], {}, "nothing from a human"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_the_settings_is_refused(
    rows: object, changes: dict[str, object], rule: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "mine.json", rows)
    with pytest.raises(SettingError, match=rule):
        load_prompts(PromptSettings(name="m", file=str(tmp_path / "mine.json"), **changes))


def test_an_absent_file_says_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = {"spec_bench": "hemingkx/Spec-Bench", "speed_bench": "prepare_data.py"}
    for name, source in sources.items():
        with pytest.raises(SettingError, match=f"no such file.*{source}"):
            load_prompts(preset(name))


def test_a_set_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    absent = r"^prompts: openai/gsm8k has not been downloaded.*fetching$"
    with pytest.raises(RunError, match=absent):
        load_prompts(preset("gsm8k"))


def test_without_a_network_a_set_is_refused_without_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s for another try")

    clock = SimpleNamespace(**vars(time) | {"sleep": wait})
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    nobody_listens = "http://127.0.0.1:9"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, nobody_listens)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", nobody_listens)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(RunError) as refused:
        load_prompts(preset("gsm8k"))
    assert str(refused.value).startswith("prompts: openai/gsm8k cannot be fetched")
    assert "HF_HUB_OFFLINE=1" in str(refused.value)


def test_latency_says_origin_and_licence_once(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cache(monkeypatch, tmp_path / "hub", preset("math500"))
    asked = ["latency", *QUICKEST_PAIR, "prompts=math500", "num_prompts=2", "tokens=16"]
    outcome = harness(*asked, "prompts.seed=3")
    (said,) = [line for line in outcome.stderr.splitlines() if "licence" in line]
    assert all(told in said for told in ("prompts=math500", "HuggingFaceH4/MATH-500", "MIT"))
    rows = results()
    assert set(rows.prompts) == {"math500"}
    assert set(rows.status) == {"ok"}


PAIR = ["model=./model", "draft=none", "num_prompts=2", "chat_template=always"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    copy_shipped(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
)
def test_a_file_without_end(name: str, model: Path, harness: Harness) -> None:
    file = model / name
    for make in (lambda: file.symlink_to("/dev/zero"), lambda: os.mkfifo(file)):
        file.unlink(missing_ok=True)
        make()
        for role in ("model=./model", "draft=./model"):
            refused = harness.refused("latency", *QUICKEST_PAIR, role)
            assert f"=./model: {name} in it is no file but a pipe or a device" in refused
    file.unlink()
    with file.open("wb") as large:
        large.truncate(1 << 29)
    if name != "model.safetensors":
        assert "has 0.54 GB, and at most 0.27 GB are read" in harness.refused("latency", *PAIR)


def test_a_pipe_is_no_file_of_results(harness: Harness, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latency.csv")
    assert "holds no CSV file of" in harness.refused("report", str(tmp_path))
