"""`recovery engine=server`: planted faults are caught, and it is said which kinds of requests get drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_server import EchoServer, Serve, serving
from harness.commands.recovery.kinds import AnswersOfKind, kinds
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
QUICK += ["temperature=1", "shift=0.5", "false_alarm_rate=1e-6", "by_kind=false"]
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


def test_kinds_without_drafts_and_those_refused_or_ignored_are_named(
    harness: Harness, serve: Serve
) -> None:
    server = EchoServer(
        version="0.32.0",
        num_draft_tokens=4,
        refuses=("grammar", "n"),
        silent=lambda body: len(body["prompt"]) > 100,
    )
    servers = serve(EchoServer(version="0.32.0"), server)
    # Its texts are no model's. By its name this server is one that top_k may end.
    harness(*ASKED, *servers, "samplings=[as_asked,top_k]", code=None)
    found = results("recovery").query("check == 'kind'").set_index("sampling")
    assert found.index[found.verdict == "no drafts"].tolist() == ["long cached prompt"]
    assert found.index[found.verdict == "refused"].tolist() == ["grammar", "n=2"]
    assert "unknown parameter" in found.finding["grammar"]
    # Letters are no object.
    assert found.verdict["JSON schema"] == "ignored"
    assert set(found.verdict) <= {"drafts", "no drafts", "ignored", "refused"}
    assert found.acceptance_rate["plain"] == pytest.approx(1 / 3)
    assert "tools" not in found.index, "they are for chats alone"


def test_drafts_that_are_never_accepted_are_told_from_silence_and_so_is_a_part() -> None:
    def record(*outcomes: tuple[int, int]) -> RequestRecord:
        return RequestRecord(0, 3, token_ids=[5] * 10, num_tokens=10, outcomes=list(outcomes))

    kind, *_ = kinds(DecodingSettings(), [1, 2], chat=False)
    good = AnswersOfKind(kind, [record((4, 3), (4, 2))] * 4)
    rejected = AnswersOfKind(kind, [record((4, 0), (4, 0))] * 4)
    partly = AnswersOfKind(kind, [record((4, 3)), record(), record((4, 1)), record()])
    silent = AnswersOfKind(kind, [record()] * 4)
    every = [good, rejected, partly, silent]
    found = [each.check(every) for each in every]
    assert [each["verdict"] for each in found] == [
        "drafts", "none accepted", "some drafts", "no drafts",
    ]  # fmt: skip
    assert "none in 2 of 4" in found[2]["finding"]
    # Where no kind always drafts, as with n-grams, a part is nothing special.
    assert partly.check([partly, silent])["verdict"] == "drafts"


def answers(num_together: int) -> AnswersOfKind:
    """Of one request whose tokens come one by one, or several at once."""
    arrivals = [(1 + place // num_together) / 10 for place in range(10)]
    [kind, *_] = kinds(DecodingSettings(), [1, 2], chat=False)
    record = RequestRecord(0, 3, arrivals, 1.0, token_ids=[5] * 10, num_tokens=10)
    return AnswersOfKind(kind, [record] * 3)


def test_without_reports_tokens_that_arrive_together_tell() -> None:
    every = [answers(number) for number in (4, 1, 2)]
    found = [each.check(every) for each in every]
    assert [each["verdict"] for each in found] == ["drafts", "no drafts", "drafts"]
    assert "1.0 tokens at a time" in found[1]["finding"]


def test_a_kind_that_fails_ends_itself_alone(harness: Harness, serve: Serve) -> None:
    server = EchoServer(
        version="0.32.0", num_draft_tokens=4, breaks=lambda body: "json_schema" in body
    )
    servers = serve(EchoServer(version="0.32.0"), server)
    outcome = harness(*ASKED, *servers, code=None)
    kinds_found = results("recovery").query("check == 'kind'").set_index("sampling")
    assert kinds_found.index[kinds_found.verdict == "failed"].tolist() == ["JSON schema"]
    assert "told to fail" in kinds_found.finding["JSON schema"]
    assert kinds_found.verdict["n=2"] == "drafts"
    assert "Requests of the kind JSON schema failed: " in outcome.stdout
    assert "told to fail" in outcome.stdout
    # The checks that decide were made.
    assert "greedy" in set(results("recovery").check)


def test_a_model_that_nobody_named_is_looked_up_nowhere(harness: Harness) -> None:
    server = EchoServer(models={"somebody/model": None}, num_draft_tokens=4)
    typed = [word for word in ASKED if not word.startswith("model=")]
    with serving(server) as address:
        outcome = harness(*typed, f"engine.url={address}", "chat=false", "by_kind=false", code=3)
    assert "no exact distribution: model= names the weights" in outcome.stderr
    assert "cannot be loaded here" not in outcome.stderr


def test_a_server_that_takes_one_name_of_its_model(harness: Harness, serve: Serve) -> None:
    """What is sent where no name is known is refused: the advice is to name the model."""
    pinned = [EchoServer(models={}, refuses=("model",)) for _ in range(2)]
    servers = serve(*pinned)
    typed = [word for word in ASKED if not word.startswith("model=")]
    outcome = harness(*typed, *servers, code=1)
    assert "served is a placeholder: engine.model= sets the name" in outcome.stderr


def test_kinds_before_one_that_ends_the_server_have_their_rows(
    harness: Harness, serve: Serve
) -> None:
    """Three kinds of four requests and one that finds out whether it is taken, after the question who it is."""
    server = EchoServer(version="0.32.0", num_draft_tokens=4, die_after=18)
    servers = serve(EchoServer(version="0.32.0"), server)
    harness(*ASKED, *servers, code=1)
    found = results("recovery").query("check == 'kind'").verdict.tolist()
    assert found[-1] == "no answer"
    assert set(found[:-1]) == {"drafts"}
    assert 1 <= len(found) - 1 <= 3
