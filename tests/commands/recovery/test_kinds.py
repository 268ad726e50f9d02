"""`recovery engine=server`, kind by kind: which requests get drafts."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from echo_server import EchoServer
from harness.commands.recovery.kinds import Answers, Baseline, kinds
from harness.config.settings import DecodingSettings
from harness.engines.requests import RequestRecord
from in_process import Harness, results
from pair_server import addresses

ASKED = ["recovery", "engine=server", "model=tiny_draft", "decoding=greedy"]
ASKED += ["decoding.max_new_tokens=8", "num_prompts=4", "batch_size=2"]


def test_a_kind_without_drafts_is_named_as_the_server_reports(harness: Harness) -> None:
    server = EchoServer(
        version="0.32.0", num_draft_tokens=4, silent=lambda body: len(body["prompt"]) > 100
    )
    with ExitStack() as opened:
        servers = addresses(opened, EchoServer(version="0.32.0"), server)
        # Its texts are no model's. By its name this server is one that top_k may end.
        harness(*ASKED, *servers, "samplings=[as_asked,top_k]", code=None)
    found = results("recovery").query("check == 'kind'").set_index("sampling")
    assert found.index[found.verdict == "no drafts"].tolist() == ["long cached prompt"]
    assert set(found.verdict) <= {"drafts", "no drafts", "ignored"}
    assert found.acceptance_rate["plain"] == pytest.approx(1 / 3)
    assert found.identical_prompts["plain"] == 4


def test_kinds_that_are_refused_or_ignored_are_named_and_silence_is_a_doubt(
    harness: Harness,
) -> None:
    server = EchoServer(
        version="0.32.0",
        num_draft_tokens=4,
        refuses=("grammar", "n"),
        silent=lambda body: body["temperature"] == 0,
    )
    with ExitStack() as opened:
        servers = addresses(opened, EchoServer(version="0.32.0"), server)
        harness(*ASKED, *servers, code=None)
    found = results("recovery").query("check == 'kind'").set_index("sampling")
    assert found.verdict[["grammar", "n=2"]].tolist() == ["refused", "refused"]
    assert "unknown parameter" in found.finding["grammar"]
    # Letters are no object.
    assert found.verdict["JSON schema"] == "ignored"
    assert found.verdict["plain"] == "no drafts"
    assert not {"tools"} & set(found.index), "they are for chats alone"


def test_drafts_that_are_never_accepted_are_told_from_silence_and_so_is_a_part() -> None:
    def record(*outcomes: tuple[int, int]) -> RequestRecord:
        return RequestRecord(0, 3, token_ids=[5] * 10, num_tokens=10, outcomes=list(outcomes))

    [kind, *_] = kinds(DecodingSettings(), [1, 2], chat=False)
    good = Answers(kind, [record((4, 3), (4, 2))] * 4)
    rejected = Answers(kind, [record((4, 0), (4, 0))] * 4)
    partly = Answers(kind, [record((4, 3)), record(), record((4, 1)), record()])
    silent = Answers(kind, [record()] * 4)
    baseline = Baseline.over([good, rejected, partly, silent])
    found = [each.check(baseline) for each in (good, rejected, partly, silent)]
    assert [each["verdict"] for each in found] == [
        "drafts", "none accepted", "some drafts", "no drafts",
    ]  # fmt: skip
    assert "none in 2 of 4" in found[2]["finding"]
    assert found[0]["identical_prompts"] is None
    # Where no kind always drafts, as with n-grams, a part is nothing special.
    assert partly.check(Baseline.over([partly, silent]))["verdict"] == "drafts"


def answers(seconds: float, regular_s: float, num_together: int = 1) -> Answers:
    """Of one request whose tokens come one by one, or several at once, at this speed."""

    def record(total: float) -> RequestRecord:
        arrivals = [total * (1 + place // num_together) / 10 for place in range(10)]
        return RequestRecord(0, 3, arrivals, total, token_ids=[5] * 10, num_tokens=10)

    [kind, *_] = kinds(DecodingSettings(), [1, 2], chat=False)
    return Answers(kind, [record(seconds)] * 3, [record(regular_s)] * 3)


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0.5, "drafts"), (1.02, "no drafts"), (0.8, "drafts")]
)
def test_where_tokens_come_one_by_one_speed_tells(seconds: float, verdict: str) -> None:
    fast, other = answers(0.5, 1.0), answers(seconds, 1.0)
    baseline = Baseline.over([fast, other])
    assert fast.check(baseline)["verdict"] == "drafts"
    found = other.check(baseline)
    assert found["verdict"] == verdict
    assert "the regular arm's speed" in found["finding"]
    assert found["identical_prompts"] == 3
    slow = answers(1.0, 1.0)
    assert slow.check(Baseline.over([slow]))["verdict"] == "unknown"


def test_without_reports_tokens_that_arrive_together_tell() -> None:
    together, apart, some = (answers(0.5, 1.0, number) for number in (4, 1, 2))
    baseline = Baseline.over([together, apart, some])
    found = [each.check(baseline)["verdict"] for each in (together, apart, some)]
    assert found == ["drafts", "no drafts", "drafts"]
    assert "1.0 tokens at a time" in apart.check(baseline)["finding"]


def test_kinds_before_one_that_ends_the_server_have_their_rows(harness: Harness) -> None:
    """Three kinds of four requests and one that finds out whether it is taken, after the question who it is."""
    server = EchoServer(version="0.32.0", num_draft_tokens=4, die_after=18)
    with ExitStack() as opened:
        servers = addresses(opened, EchoServer(version="0.32.0"), server)
        harness(*ASKED, *servers, code=1)
    found = results("recovery").query("check == 'kind'").verdict.tolist()
    assert found[-1] == "no answer"
    assert set(found[:-1]) == {"drafts"}
    assert 1 <= len(found) - 1 <= 3
