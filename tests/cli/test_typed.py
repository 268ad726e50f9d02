"""The user's words as Hydra gets them, keywords from Python, and what harness takes of Hydra beyond its interface."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from harness.cli.conversion import setting_hints
from harness.cli.typed import from_keywords, read
from harness.commands.latency.record import LatencySettings
from harness.config.command_line import Words

KNOWN = setting_hints(LatencySettings) | {"prompt": str}


def overrides(*words: str) -> list[str]:
    command = "compare" if words[0].startswith("prompt=") else "latency"
    return read(Words(words), command).settings


def value_of(argument: str) -> Any:
    (setting,) = overrides(argument)
    return OverridesParser.create().parse_override(setting).value()


def test_a_word_becomes_a_setting() -> None:
    for typed, expected in [
        ("K=2,4,8", "decoding.num_draft_tokens=2,4,8"),
        ("T=0", "decoding.temperature=0"),
        ("+T=0", "+decoding.temperature=0"),
        ("tokens=128", "decoding.max_new_tokens=128"),
        ("max_ngram=8", "draft.max_ngram=8"),
        ("dataset=./mine.jsonl", "prompts=./mine.jsonl"),
        *[
            (plain, plain)
            for plain in (
                *("seed=1", "dtype=float16", "draft.dtype=float16", "prompts=gsm8k"),
                *("model.architecture.layers=2", "+my.temperatures=1", "hydra.run.dir=x"),
                *("model=7B,13B", "draft=glob(tiny*)", "+pair=7B+none", "prompt='a','b'"),
            )
        ],
    ]:
        assert overrides(*typed.split()) == [expected]


def test_an_address_is_that_of_a_server() -> None:
    address = "url=http://h/v1"
    full = "engine.url=http://h/v1"
    assert overrides(address) == [full, "engine=server", "model=served"]
    assert overrides(address, "model=7B") == [full, "model=7B", "engine=server"]
    assert overrides(address, "engine=local") == [full, "engine=local"]


def test_options_of_hydra_stay_beside_the_settings() -> None:
    words = "seed=1 --config-dir mine K=2 -c job dry_run=true".split()
    line = read(Words(words), "latency")
    assert line.options == {"presets": "mine", "cfg": "job", "dry_run": "true"}
    assert line.settings == ["seed=1", "decoding.num_draft_tokens=2"]


def test_a_prompt_arrives_as_it_was_typed() -> None:
    for text in [
        *("a, b", "it's", "8 * 12 = 96\n3 * 4 =", 'say "x"', '"Yes," she said. "No."', "${x}"),
        *("漢字 {a} [b] (c", "12", "null", "back\\slash", "end\\", "\\${x} \\\\${y}", "x\\'y"),
    ]:
        config = OmegaConf.create({"prompt": value_of(f"prompt={text}")})
        assert OmegaConf.to_container(config, resolve=True) == {"prompt": text}


@pytest.mark.parametrize("path", ["a b/c", "./x#y(z)~=1", "it's/x", "~/漢字.txt", "./a\\"])
@pytest.mark.parametrize("key", ["model", "results.file"])
def test_a_path_may_hold_any_letter(key: str, path: str) -> None:
    assert value_of(f"{key}={path}") == os.path.expanduser(path)


def test_several_paths_are_a_sweep_and_a_comma_in_one_that_exists_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ä,b").mkdir()
    assert overrides("model=./ä=1,7B,./ö") == ["model='./ä=1',7B,'./ö'"]
    assert value_of("model=./ä,b") == "./ä,b"
    assert value_of("hydra.run.dir=ä,${now:%Y}") == "ä,${now:%Y}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.int64(4), 4),
        (np.float32(0.5), 0.5),
        (np.bool_(False), False),
        (None, None),
        ([1, 2], [1, 2]),
        (("a, b", "it's"), ["a, b", "it's"]),
        ({"model.layers.0": 1, "lm_head": "cpu"}, {"model.layers.0": 1, "lm_head": "cpu"}),
        (Path("model"), "./model"),
    ],
    ids=repr,
)
def test_a_keyword_arrives_as_it_was_given(given: Any, expected: Any) -> None:
    (argument,) = from_keywords({"prompts": {"columns": given}}, KNOWN)
    assert argument.startswith("prompts.columns=")
    assert value_of(argument) == expected


def test_a_mapping_is_a_group_where_the_command_has_one() -> None:
    keywords = {
        "decoding": {"top_p": 0.9, "top_k": 3},
        "hydra": {"run": {"dir": "x"}},
        "draft": None,
    }
    expected = "decoding.top_p=0.9 decoding.top_k=3 hydra.run.dir=x draft=none".split()
    assert from_keywords(keywords, KNOWN) == expected
