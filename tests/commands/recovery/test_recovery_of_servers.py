"""`recovery engine=server`: an honest server passes, and one with a planted fault is caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from echo_server import EchoServer, serving
from harness.commands.recovery.scores import GreedyTexts
from harness.config.errors import RunError
from harness.engines.requests import RequestRecord
from harness.local.drafting.method import Pair
from in_process import Harness, results
from pair_server import addresses, pair_servers, shipped_pair

QUICK = ["model=tiny_draft", "engine=server", "batch_size=16", "num_prompts=1", "tokens=8", "K=1"]
QUICK += ["temperature=1", "shift=0.5", "false_alarm_rate=1e-6", "by_kind=false"]
QUICK += ["samplings=[as_asked]"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands draw less than a user's may: these faults are large."""
    monkeypatch.setattr("harness.commands.recovery.record.FEWEST_DRAWS", 100)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A target that is its own draft: what the servers do is tested, and 2 layers do it 12 times as fast."""
    return shipped_pair("tiny_draft", "tiny_draft")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, pair: Pair, fault: str = "none", **changes: object) -> list[str]:
    """Settings with the addresses of two servers of the pair; the changes are of the one that speculates."""
    return addresses(stack, *pair_servers(pair, fault, **changes))


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"temperature_factor": 3.0}, ["num_draws=300"]),
        ({"fault": "bonus_from_wrong_position"}, ["decoding.temperature=0"]),
    ],
    ids=["draws", "greedy texts"],
)
def test_a_fault_of_the_server_is_caught(
    harness: Harness, stack: ExitStack, pair: Pair, changes: dict, check: list[str]
) -> None:
    servers = started(stack, pair, **changes)
    outcome = harness("recovery", *QUICK, *check, *servers, code=1)
    assert outcome.complaint.startswith("lossy: ")


@pytest.mark.parametrize("is_ignored", [False, True], ids=["kept to", "ignored in bursts"])
def test_texts_beside_a_grammar_are_the_regular_servers(
    harness: Harness, stack: ExitStack, pair: Pair, is_ignored: bool
) -> None:
    """Even tokens stand for what a grammar allows: the model alone would have others."""
    regular, server = pair_servers(pair)
    regular.spoil = lambda rows: [[token & ~1 for token in row] for row in rows]
    server.spoil = regular.spoil
    if is_ignored:
        # lmdeploy #4551: only the first token is decided outside of speculation.
        server.spoil = lambda rows: [[row[0] & ~1, *row[1:]] for row in rows]
    grammar = "engine.extra={response_format: {type: json_object}}"
    servers = addresses(stack, regular, server)
    code = 1 if is_ignored else None
    harness("recovery", *QUICK, "num_draws=100", grammar, *servers, code=code)
    asked = regular.bodies + server.bodies
    assert all(body["response_format"] == {"type": "json_object"} for body in asked)
    rows = results("recovery")
    assert ("lossy" in set(rows["verdict"])) == is_ignored


def test_without_token_ids_the_arms_are_compared(
    harness: Harness, stack: ExitStack, pair: Pair
) -> None:
    servers = started(stack, pair, dialect="sglang", temperature_factor=3.0)
    harness("recovery", *QUICK, "num_draws=150", *servers, code=1)
    assert set(results("recovery")["check"]) == {"greedy", "sampled"}


@pytest.mark.parametrize("chat", [True, False])
def test_one_server_without_a_reference_says_how_to_give_one(
    harness: Harness, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RunError("too large")

    monkeypatch.setattr("harness.local.engine.pair.plan_pair", refuse)
    url = stack.enter_context(serving(EchoServer(dialect="openai")))
    asked = ["recovery", *QUICK, f"engine.url={url}", f"engine.chat={chat}"]
    complaint = harness(*asked, code=3).complaint
    assert "give engine.regular_url=, a server of the same model" in complaint
    reason = "the weights know nothing of engine.chat=true" if chat else "whose weights load here"
    assert reason in complaint
    (row,) = results("recovery").to_dict("records")
    assert (row["check"], row["verdict"]) == ("reference", "undecided")


def test_a_text_that_ends_with_an_end_token_is_whole() -> None:
    """A server may end a text there although ignore_eos was asked of it."""
    ended = RequestRecord(0, 1, token_ids=[5, 6, 2], num_tokens=3)
    for num_asked, end_tokens, num_cut_short in ((8, (), 1), (8, (2,), 0), (3, (), 0)):
        texts = GreedyTexts(frozenset(end_tokens))
        texts.add(None, num_asked, ended)
        assert texts.num_cut_short == num_cut_short
