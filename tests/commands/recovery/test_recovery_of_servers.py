"""`recovery engine=server`: planted faults are caught, and it is said what cannot be tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_server import EchoServer, Serve, serving
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import GreedyTexts, with_ends
from harness.commands.recovery.workload import Answer, PlannedRequest
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.requests import RequestRecord
from in_process import QUICK_MODELS, Harness, results
from planted_faults import planted
from served import served

QUICK = ["model=tiny_draft", "engine=server", "batch_size=16", "num_prompts=1", "tokens=8", "K=1"]
QUICK += ["temperature=1", "shift=0.5", "false_alarm_rate=1e-6"]
QUICK += ["samplings=[as_asked]"]


def refuse(*_: Any, **__: Any) -> Any:
    raise RunError("too large")


@pytest.mark.slow
def test_a_fault_of_the_server_is_caught_by_its_weights(harness: Harness, tmp_path: Path) -> None:
    planted_engine = f"engine={planted('BonusFromWrongPosition')}"
    faulty = [*QUICK_MODELS, "runner=eager", planted_engine]
    with served(tmp_path, *faulty) as url:
        servers = [f"engine.url={url}/v1", f"engine.regular_url={url}/regular/v1"]
        outcome = harness("recovery", *QUICK, "num_draws=200", *servers, code=1)
    assert outcome.complaint.startswith("lossy: ")


@pytest.mark.parametrize("is_ignored", [False, True], ids=["kept to", "ignored in bursts"])
def test_texts_beside_a_grammar_are_the_regular_servers(
    harness: Harness, serve: Serve, is_ignored: bool
) -> None:
    """What the echo servers write stands for what a grammar allows: the model alone would have other texts."""
    # lmdeploy #4551: only the first token is decided outside of speculation.
    regular, server = EchoServer(), EchoServer(stride=2 if is_ignored else 1)
    grammar = "engine.extra={response_format: {type: json_object}}"
    servers = serve(regular, server)
    code = 3 if is_ignored else 0
    harness("recovery", *QUICK, "temperature=0", grammar, *servers, code=code)
    asked = regular.bodies + server.bodies
    assert all(body["response_format"] == {"type": "json_object"} for body in asked)
    (row,) = results("recovery").to_dict("records")
    assert row["verdict"] == ("undecided" if is_ignored else "lossless")
    assert (row["identical_prompts"] < row["num_prompts"]) == is_ignored


@pytest.mark.parametrize(
    ("dialect", "has_weights", "setting", "greedy_verdict", "advice"),
    [
        (
            "vllm",
            False,
            "top_logprobs=-1",
            "lossless",
            "both (vLLM with --max-logprobs=-1, or llama.cpp)",
        ),
        # The letters that it answers with are not the texts that the weights write.
        (
            "sglang",
            True,
            "seed=0",
            "lossy",
            "token ids, which not every server here sends: vLLM and llama.cpp do",
        ),
        (
            "vllm",
            True,
            "engine.extra={response_format: {type: json_object}}",
            "lossless",
            "temperature=0 compares greedy ones with those of engine.regular_url=",
        ),
    ],
)
def test_drawn_texts_without_log_probabilities_are_undecided(
    harness: Harness,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    dialect: Any,
    has_weights: bool,
    setting: str,
    greedy_verdict: str,
    advice: str,
) -> None:
    """Greedy texts are still compared."""
    if not has_weights:
        monkeypatch.setattr("harness.local.engine.pair.plan_pair", refuse)
    # A server like vLLM, here without log-probabilities of prompts.
    servers = serve(EchoServer(dialect=dialect), EchoServer(dialect=dialect))
    code = 1 if greedy_verdict == "lossy" else 3
    outcome = harness("recovery", *QUICK, setting, *servers, code=code)
    greedy, reference = results("recovery").to_dict("records")
    assert (greedy["check"], greedy["verdict"]) == ("greedy", greedy_verdict)
    assert greedy["num_prompts"] == 4
    assert (reference["check"], reference["verdict"]) == ("reference", "undecided")
    assert advice in reference["finding"]
    assert (advice in outcome.complaint) == (greedy_verdict == "lossless")


@pytest.mark.parametrize("chat", [True, False])
def test_one_server_without_a_reference_says_how_to_give_one(
    harness: Harness, serve: Serve, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr("harness.local.engine.pair.plan_pair", refuse)
    [url] = serve(EchoServer(dialect="openai"))
    asked = ["recovery", *QUICK, "temperature=0", url, f"engine.chat={chat}"]
    complaint = harness(*asked, code=3).complaint
    assert "give engine.regular_url=, a server of the same model" in complaint
    reason = "the weights know nothing of engine.chat=true" if chat else "whose weights load here"
    assert reason in complaint
    (row,) = results("recovery").to_dict("records")
    assert (row["check"], row["verdict"]) == ("reference", "undecided")


def test_a_text_that_ends_with_an_end_token_is_whole() -> None:
    """A server may end a text there although ignore_eos was asked of it."""
    ended = RequestRecord(0, 1, token_ids=[5, 6, 2], num_tokens=3)
    greedy = Sampling("greedy", DecodingSettings(temperature=0.0))
    for num_asked, end_tokens, num_cut_short in ((8, (), 1), (8, (2,), 0), (3, (), 0)):
        texts = GreedyTexts(frozenset(end_tokens))
        texts.add(None, PlannedRequest((1,), greedy, num_asked, 0), ended)
        assert texts.num_cut_short == num_cut_short
    # Where it may end, it must not go on.
    for ends, verdict in (({2}, "lossless"), ({6}, "lossy")):
        planned = PlannedRequest((1,), greedy, 8, 0, ends=frozenset(ends))
        assert with_ends({"verdict": "lossless"}, [Answer(planned, ended)])["verdict"] == verdict


ASKED = ["recovery", "engine=server", "model=tiny_draft", "decoding=greedy"]
ASKED += ["decoding.max_new_tokens=8", "num_prompts=4", "batch_size=2"]


def test_a_model_that_nobody_named_is_looked_up_nowhere(harness: Harness) -> None:
    server = EchoServer(models={"somebody/model": None}, num_draft_tokens=4)
    typed = [word for word in ASKED if not word.startswith("model=")]
    with serving(server) as address:
        outcome = harness(*typed, f"engine.url={address}", "chat=false", code=3)
    assert "no exact distribution: model= names the weights" in outcome.stderr
    assert "cannot be loaded here" not in outcome.stderr


def test_a_server_that_takes_one_name_of_its_model(harness: Harness, serve: Serve) -> None:
    """What is sent where no name is known is refused: the advice is to name the model."""
    pinned = [EchoServer(models={}, refuses=("model",)) for _ in range(2)]
    servers = serve(*pinned)
    typed = [word for word in ASKED if not word.startswith("model=")]
    outcome = harness(*typed, *servers, code=1)
    assert "served is a placeholder: engine.model= sets the name" in outcome.stderr
