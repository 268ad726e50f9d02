"""`recovery answers=FILE`: recorded answers of an honest loop and of one with a planted fault, whose server is gone.

The sampled tests have a false-alarm rate of 1e-9.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.run import PlacementSettings
from harness.config.settings import DecodingSettings, ModelSettings
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer
from harness.local.engine.engine import LocalEngine
from in_process import Harness, results
from own_service import own_service
from planted_faults import planted
from tiny_checkpoints import load_pair, save_talkative_pair
from wording import mentions

NUM_ANSWERS = 300
PROMPTS = ["once upon a time\n", "2 + 2 =\n", "the end\n"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of eight likely bytes, with one of which texts end."""
    directory = tmp_path_factory.mktemp("talkative")
    save_talkative_pair(directory, 8)
    weight = AutoModelForCausalLM.from_pretrained(directory / "target").lm_head.weight
    end = int(weight.abs().sum(-1).nonzero()[0])
    for role in ("target", "draft"):
        file = directory / role / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": end}))
    return directory


def end_of(models: Path) -> int:
    config = json.loads((models / "target" / "generation_config.json").read_text())
    return int(config["eos_token_id"])


@functools.cache
def answered(
    models: Path, fault: str = "none", temperature: float = 1.0, top_p: float = 1.0
) -> Sequence[dict[str, Any]]:
    """What a log has of a loop's answers."""
    names = [
        ModelSettings(name=role, repository=str(models / role)) for role in ("target", "draft")
    ]
    pair = load_pair(*names, PlacementSettings())
    decoding = DecodingSettings(
        temperature=temperature, top_p=top_p, num_draft_tokens=2, max_new_tokens=24
    )
    engine = LocalEngine(pair, Preparation(decoding=decoding, runner="eager", fault=fault))
    prompts = [pair.tokenizer(text)["input_ids"] for text in PROMPTS]
    asked = [prompts[number % 3] for number in range(NUM_ANSWERS)]
    question = Question(asked, decoding, 0, range(NUM_ANSWERS), stop_tokens=pair.stop_tokens())
    records = timed_answer(engine, engine.arms[-1], question).requests
    engine.close()
    return [
        {
            "prompt": PROMPTS[number % 3],
            "token_ids": record.token_ids,
            "temperature": temperature,
            "top_p": top_p,
            "seed": number,
        }
        for number, record in enumerate(records)
    ]


def judged(
    harness: Harness, models: Path, lines: Sequence[Any], *settings: str, code: int
) -> pd.DataFrame:
    """The rows of a run over a log with these lines, by check."""
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path("log.jsonl").write_text("\n".join(written))
    asked = ["answers=log.jsonl", f"model={models}/target", "shift=0.1", *settings]
    harness("recovery", *asked, code=code)
    return results("recovery").set_index("check")


def test_answers_of_an_honest_loop_are_lossless(harness: Harness, models: Path) -> None:
    greedy = answered(models, temperature=0.0)[:3]
    lines = [*answered(models), *answered(models, top_p=0.8), *greedy]
    found = judged(harness, models, lines, code=0)
    assert found.verdict.dropna().tolist() == ["lossless"] * 4
    assert found.sampling.dropna().tolist() == ["temperature=1.0", "temperature=1.0 top_p=0.8"]
    # All but the ends of texts.
    tokens = [token for line in lines[:-3] for token in line["token_ids"]]
    of_tokenizer = AutoTokenizer.from_pretrained(models / "target").eos_token_id
    num_ends = tokens.count(end_of(models)) + tokens.count(of_tokenizer)
    assert found.num_draws["sampled"] == len(tokens) - num_ends
    assert found.identical_prompts["greedy"] == 3


def test_ends_may_be_recorded_or_not(harness: Harness, models: Path) -> None:
    """Without them a text has fewer of its likeliest tokens, which is no loss."""
    end = end_of(models)
    lines = [dict(line) for line in answered(models)]
    ended = [line for line in lines if line["token_ids"][-1] == end]
    assert len(ended) > NUM_ANSWERS / 4
    for line in ended:
        line["token_ids"] = line["token_ids"][:-1]
    found = judged(harness, models, [line for line in lines if line["token_ids"]], code=0)
    assert found.verdict["sampled"] == "lossless"


@pytest.mark.parametrize("fault", [planted("LikeliestVerified"), "rollback_off_by_one"])
def test_answers_of_a_broken_loop_are_lossy(harness: Harness, models: Path, fault: str) -> None:
    found = judged(harness, models, answered(models, fault), code=1)
    assert found.verdict["sampled"] == "lossy"
    assert found.p_value["sampled"] < 1e-9


def test_other_settings_than_were_recorded_are_a_loss(harness: Harness, models: Path) -> None:
    lines = [line | {"temperature": 0.7} for line in answered(models)]
    assert judged(harness, models, lines, code=1).verdict["sampled"] == "lossy"


def test_a_server_may_score_them(harness: Harness, models: Path) -> None:
    """By its regular half: the one that speculated is gone."""
    with own_service(models) as url:
        server = [
            "engine=server",
            f"engine.url={url.replace('/v1', '/regular/v1')}",
            "reference=regular",
            "shift=0.3",
        ]
        honest = judged(harness, models, answered(models)[:60], *server, code=0)
        fault = answered(models, "rollback_off_by_one")
        broken = judged(harness, models, fault[:60], *server, code=1)
    assert honest.verdict["sampled"] == "lossless"
    assert broken.verdict["sampled"].tolist()[-1] == "lossy"


def test_lines_that_cannot_be_used_are_counted_and_said(harness: Harness, models: Path) -> None:
    plain = answered(models)[0]
    asked = {"prompt": PROMPTS[0], "temperature": 1}
    lines = [
        plain,
        {"request": asked, "response": {"choices": [{"token_ids": plain["token_ids"]}]}},
        asked | {"text": "abc"},
        {name: value for name, value in plain.items() if name != "temperature"},
        plain | {"stop": ["x"]},
        plain | {"token_ids": None},
        {"token_ids": [97], "temperature": 1},
        {"prompt": PROMPTS[0], "temperature": 1, "choices": [{"text": "a"}, {"text": "b"}]},
        '{"prompt": "once upon',
    ]
    found = judged(harness, models, lines, code=3)
    assert mentions(
        str(found.finding["answers"]),
        *("3 answers of log.jsonl", "1 of them as text", "no temperature: 1", "stop: 1"),
        *("no answer: 1", "no prompt: 1", "several answers: 1", "no JSON: 1"),
    )


def test_a_file_without_a_line_that_can_be_used_is_refused(harness: Harness, models: Path) -> None:
    Path("log.jsonl").write_text("{}\n")
    complaint = harness.refused("recovery", "answers=log.jsonl", f"model={models}/target")
    assert mentions(complaint, "answers", "no line that can be used", "no answer: 1")
    assert "no such file" in harness.refused("recovery", "answers=./absent.jsonl")
