"""`recovery load=6` finds what single requests do not show, and accuses no honest engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_questions import TOKENIZER
from harness.commands.recovery.sampling import samplings
from harness.commands.recovery.workload import PlannedRequest, Workload, is_taken
from harness.config.errors import RunError
from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
    PlacementSettings,
)
from harness.engines.protocol import Arm
from harness.engines.record import Preparation
from harness.engines.requests import RequestRecord
from harness.engines.timing import generate, quick_garbage_collections
from harness.local.drafting.methods.model import ModelDraftSettings
from harness.local.engine.engine import LocalArm, LocalEngine
from harness.local.engine.pair import Pair
from in_process import Harness, results
from own_service import own_service
from planted_faults import IN_BATCHES, planted
from tiny_checkpoints import load_pair, save_talkative_pair
from wording import mentions

DECODING = DecodingSettings(max_new_tokens=12, num_draft_tokens=2, temperature=1.0)
UNDER_LOAD = [planted(name) for name in IN_BATCHES]
PROMPTS = [list(TOKENIZER.encode(text)) for text in ("once upon a time", "2 + 2 =", "the end")]
QUICK = [
    "details=true",
    "num_prompts=3",
    "decoding.max_new_tokens=12",
    "decoding.num_draft_tokens=2",
    "decoding.temperature=3",
    "num_draws=1000",
    "shift=0.3",
    "false_alarm_rate=1e-6",
    "load=6",
]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands draw less than a user's may: these faults are large."""
    monkeypatch.setattr("harness.commands.recovery.record.FEWEST_DRAWS", 100)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    save_talkative_pair(path, 8)
    return path


@pytest.fixture(scope="module")
def named(directory: Path) -> list[str]:
    return [
        f"model={directory}/target",
        f"draft={directory}/draft",
        f"prompts={directory}/prompts.txt",
    ]


@pytest.fixture(scope="module")
def pair(directory: Path) -> Pair:
    target = ModelSettings(name="target", repository=str(directory / "target"))
    draft = ModelDraftSettings(name="draft", repository=str(directory / "draft"))
    return load_pair(target, draft, PlacementSettings())


def open_arm(pair: Pair, fault: str = "none") -> tuple[LocalEngine, LocalArm]:
    engine = LocalEngine(
        pair, Preparation(decoding=DECODING, runner="eager", batch_size=6, fault=fault)
    )
    arm = engine.arms[-1]
    assert isinstance(arm, LocalArm)
    return engine, arm


def workload() -> Workload:
    return Workload(PROMPTS, samplings(DECODING, [])[:4], DECODING, seed=0)


def alone(engine: LocalEngine, arm: LocalArm, asked: PlannedRequest) -> list[int]:
    with quick_garbage_collections():
        return generate(engine, arm, asked.request(seed=0).question).tokens[0]


def test_texts_under_load_are_those_of_the_same_requests_alone(pair: Pair) -> None:
    engine, arm = open_arm(pair)
    asked = workload().first_turns(20)
    answers = {
        answer.index: answer for answer in arm.under_load([one.request(0) for one in asked], 6)
    }
    assert sorted(answers) == list(range(len(asked)))
    num_same = 0
    for place, one in enumerate(asked):
        text, whole = answers[place].token_ids, alone(engine, arm, one)
        num_same += text == whole[: len(text)]
        if one.leave_after is None:
            assert len(text) == one.num_tokens
        else:
            assert one.leave_after <= len(text) <= one.leave_after + 2
    # In a batch logits are rounded otherwise, which may move a draw between two rare tokens.
    assert num_same >= 0.9 * len(asked)


@pytest.fixture(scope="module")
def honest_texts(pair: Pair) -> list[list[int]]:
    """Of the first requests, each by itself."""
    honest = open_arm(pair)
    return [alone(*honest, asked) for asked in workload().first_turns(4)]


@pytest.mark.parametrize("fault", UNDER_LOAD)
def test_alone_no_fault_shows(pair: Pair, honest_texts: list[list[int]], fault: str) -> None:
    faulty = open_arm(pair, fault)
    assert [alone(*faulty, asked) for asked in workload().first_turns(4)] == honest_texts


def test_an_engine_that_dies_of_a_sampling_setting_is_told_with_it() -> None:
    class Dying(Arm):
        def under_load(self, requests: object, num_in_flight: int) -> Iterator[RequestRecord]:
            raise RunError("vLLM: max(): Expected reduction dim")
            yield

    [sampling] = [one for one in samplings(DECODING, []) if one.name == "top_k=5"]
    with pytest.raises(RunError, match=r"^top_k=5: vLLM: max\(\)"):
        is_taken(Dying(), PlannedRequest((1, 2), sampling, 1, 0), seed=0)


def test_the_requests_are_mixed() -> None:
    made = workload()
    asked = made.first_turns(40)
    assert len({one.index for one in asked}) == len(asked)
    assert {one.sampling.name for one in asked} == {
        "greedy", "as asked", "temperature=0.7", "top_k=5", "top_p=0.8",
    }  # fmt: skip
    assert len({one.num_tokens for one in asked}) > 5
    assert 0 < sum(not one.is_compared for one in asked) < len(asked) / 6
    prompts = {one.prompt for one in asked}
    assert {tuple(prompt) for prompt in PROMPTS} < prompts
    beginnings = [one for one in prompts for other in prompts if one == other[: len(one)] != other]
    assert len(beginnings) >= 2 * len(PROMPTS)
    second = made.second_turns(asked, [[9] * one.num_tokens for one in asked], 10)
    longest = max(map(len, PROMPTS))
    assert {one.prompt[: len(one.prompt)] for one in second}.isdisjoint(prompts)
    assert max(len(one.prompt) for one in second) <= longest + 12 + 8
    again = workload().first_turns(40)
    assert again == asked


@pytest.mark.slow
def test_an_honest_engine_is_lossless_under_load(harness: Harness, named: list[str]) -> None:
    outcome = harness("recovery", *named, *QUICK)
    work = [
        "testing the speculative arm",
        "1,000 drawn tokens over 4 sampling settings",
        "6 in flight",
    ]
    assert mentions(outcome.stderr, *work)
    assert mentions(outcome.stdout, "Under load: 6 requests", "Drawn as asked, temperature=1")
    assert mentions(outcome.stdout, "Lossless:", "15 of 15 greedy texts")
    rows = results("recovery")
    parts = rows[rows["sampling"].notna()]
    assert len(parts) == 2 * 4 + 1
    assert {"as asked, first tokens", "top_p=0.8, later tokens", "neighbouring tokens"} < set(
        parts["sampling"]
    )
    assert (rows["load"] == 6).all()
    assert rows["num_draws"].max() == pytest.approx(1000, rel=0.15)
    assert rows["identical_prompts"][0] == rows["num_prompts"][0] == 15
    undecided = harness("recovery", *named, *QUICK, "num_draws=200", code=3)
    assert "would be enough" in undecided.complaint


@pytest.mark.slow
@pytest.mark.parametrize("fault", UNDER_LOAD)
def test_faults_are_found_under_load(harness: Harness, named: list[str], fault: str) -> None:
    outcome = harness("recovery", *named, *QUICK, f"fault={fault}", code=1)
    assert outcome.complaint.startswith("lossy: ")


@pytest.mark.slow
def test_our_service_is_tested_over_http(
    harness: Harness, directory: Path, named: list[str]
) -> None:
    with own_service(directory) as url:
        asked = [named[0], named[2], *QUICK, "num_draws=1600", "engine=server", f"engine.url={url}"]
        outcome = harness("recovery", *asked)
    rows = results("recovery")
    assert rows["refused"].dropna().unique().tolist() == [
        "min_p=0.1, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias"
    ]
    assert mentions(outcome.stdout, "Refused by the engine", "min_p=0.1")


@pytest.mark.slow
def test_a_server_without_token_ids_is_compared_with_itself(harness: Harness) -> None:
    """Its chats have no text that the model could be asked for."""
    from echo_server import EchoServer, serving

    server = EchoServer(dialect="openai")
    with serving(server) as url:
        outcome = harness(
            "recovery", "model=tiny_draft", *QUICK, "num_draws=300", "engine=server",
            "engine.chat=true", f"engine.url={url}", code=3,
        )  # fmt: skip
    assert "answers are compared with those to the same requests alone" in outcome.stderr
    rows = results("recovery")
    assert rows["verdict"][0] == "lossless"
    assert "lossy" not in set(rows["verdict"])
    assert "top_k=5" in rows["refused"].iloc[-1]


@pytest.mark.slow
def test_samplings_can_be_left_out_and_the_one_that_ends_a_vllm_is_named_before(
    harness: Harness,
) -> None:
    from echo_server import EchoServer, serving

    server = EchoServer(version="0.32.0")
    with serving(server) as url:
        asked = ["recovery", "model=tiny_draft", *QUICK, "num_draws=300", "engine=server"]
        asked += ["engine.chat=true", f"engine.url={url}"]
        outcome = harness(*asked, "samplings=[as_asked,top_k]", code=3)
        assert any(body.get("top_k", 0) > 0 for body in server.bodies)
        assert not any(body.get("top_p", 1) < 1 for body in server.bodies)
        server.bodies.clear()
        server.fail_every = 1
        without = harness(*asked, "samplings=[as_asked,top_p]", code=1)
        assert not any(body.get("top_k", 0) > 0 for body in server.bodies)
    assert mentions(outcome.stderr, "top_k may end this server", "known-faults.md")
    assert "samplings=[as_asked]" in outcome.stderr, "the command without it"
    assert "may end this server" not in without.stderr
    tested = results("recovery")["sampling"].dropna()[:2]
    assert list(tested) == ["as asked, beside those alone", "top_k=5, beside those alone"]


@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        (["samplings=[top_k]"], "needs load"),
        (["load=2", "samplings=[]"], "must name at least one"),
        (["load=2", "samplings=[top_p,top_p]"], "must not name one twice"),
        (["load=2", "samplings=[topk]"], "top_k"),
        (["load=2", "samplings=[min_p]"], "engine=local"),
    ],
)
def test_wrong_samplings_are_refused(harness: Harness, typed: list[str], rule: str) -> None:
    assert rule in harness.refused("recovery", *typed)


@pytest.mark.slow
def test_a_server_that_draws_nothing_is_not_called_lossless(harness: Harness) -> None:
    from echo_server import EchoServer, serving

    class Greedy(EchoServer):
        async def _complete(self, body: dict[str, Any], *connection: Any) -> bool:
            if body["temperature"] == 0:
                return await super()._complete(body, *connection)
            self._send(connection[1], 400, {"error": {"message": "temperature must be 0"}})
            return True

    with serving(Greedy()) as url:
        asked = ["model=tiny_draft", *QUICK, "engine=server", f"engine.url={url}"]
        outcome = harness("recovery", *asked, code=1)
    assert mentions(outcome.complaint, "refuses temperature=3", "decoding=greedy")
