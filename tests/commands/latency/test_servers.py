"""`engine=server` through the command line, against servers on this machine: their counters and own words, and every
figure of a page against what the servers wrote down.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import processes
from echo_server import EchoServer, NotedAnswer, Serve, serving
from in_process import Harness, only, results
from wording import mentions

QUICK = ["engine=server", "model=tiny", "num_prompts=9", "decoding.max_new_tokens=8"]


@pytest.mark.parametrize("typed", [[], ["model=tiny"]])
def test_the_title_and_rows_name_the_model_that_is_served(
    harness: Harness, serve: Serve, typed: list[str]
) -> None:
    """As it is documented: through the chat endpoint, where no model is typed. `model=` chooses the tokenizer."""
    servers = EchoServer(models={"m": None}), EchoServer(models={"m": None}, num_draft_tokens=4)
    addresses = [word.removeprefix("engine.") for word in serve(*servers)]
    page = harness("latency", *typed, "n=8", "tokens=8", *addresses).stdout
    assert page.startswith("m with the server's draft")
    assert set(results()["model"]) == {"m"}
    for server in servers:
        assert all(body["model"] == "m" for body in server.bodies)
        assert all(("messages" in body) != bool(typed) for body in server.bodies)


def test_a_run_that_only_sends_requests_waits_for_no_torch(tmp_path: Path, serve: Serve) -> None:
    """torch and transformers' models take seconds to import, in a process that sends HTTP. Without model= it needs no
    tokenizer, which would import both.
    """
    script = """
import re
import sys
from harness.cli.main import main
try:
    main()
finally:
    print({"torch", "transformers.configuration_utils"} & set(sys.modules))
"""
    servers = EchoServer(), EchoServer(num_draft_tokens=4)
    asked = [word for word in QUICK if word != "model=tiny"]
    command = [sys.executable, "-c", script, "latency", *asked, "decoding=greedy"]
    done = processes.run(*serve(*servers), cwd=tmp_path, command=command, code=None)
    (summary,) = tmp_path.rglob("summary.txt")
    assert re.search(r"\bidentical_prompts( +9\b)+", summary.read_text())
    assert done.stdout.endswith("set()\n")


def test_nothing_about_a_server_is_taken_from_the_settings(harness: Harness, serve: Serve) -> None:
    """Nothing that a draft of that name would be here; its name and K are the user's labels."""
    servers = EchoServer(version="0.32.0"), EchoServer(version="0.32.0", num_draft_tokens=4)
    labelled = ["draft=tiny_medusa", "decoding.num_draft_tokens=8"]
    harness("latency", *QUICK, *labelled, *serve(*servers))
    row = results().iloc[-1]
    assert row["server"] == "vLLM 0.32.0"
    assert row["mean_proposed"] == 4
    assert row["num_draft_tokens"] == 8
    unknown = ["draft_method", "draft_repository", "quantization", "rule"]
    assert row[[*unknown, "placement", "torch_version", "num_threads"]].isna().all()
    report = harness("report", "output=page").stdout
    assert "tiny_medusa (as labelled)" in report
    assert "K=8 (as labelled)" in report


def test_empty_answers_are_left_out_and_no_failures(harness: Harness, serve: Serve) -> None:
    servers = EchoServer(lengths=(0, 9, 9)), EchoServer(lengths=(0, 9, 9), drafts=((2, 1),))
    asked = ["engine=server", "model=tiny", "num_prompts=15", "decoding=greedy"]
    asked += ["decoding.ignore_eos=false", "decoding.max_new_tokens=9"]
    done = harness("latency", *asked, *serve(*servers), code=None)
    rows = results()
    num_empty = sum(answer.num_tokens == 0 for answer in servers[0].noted[-15:])
    assert rows["num_empty"].tolist() == [num_empty] * 2
    assert 0 < num_empty < 15
    assert rows["num_failed"].tolist() == [0, 0]
    assert rows["num_tokens"].tolist() == [9 * (15 - num_empty)] * 2
    said = f"left out: {num_empty} of 15 regular and {num_empty} of 15 speculative."
    assert said in " ".join(done.summary.split())
    nothing = EchoServer(lengths=(0,)), EchoServer(lengths=(0,))
    refused = harness("latency", *asked, *serve(*nothing), "resume=false", code=1).complaint
    assert mentions(refused, "15 of 15 regular requests failed", "the answer has no token")


def test_of_several_models_the_typed_one_is_asked_for(harness: Harness, serve: Serve) -> None:
    """What a server of an unknown kind serves need not be in its list."""
    several = {"tiny_draft.gguf": None, "other": "/x/tiny_draft"}
    servers = EchoServer(version="1"), EchoServer(models=several, version="1")
    addresses = serve(*servers)
    refused = harness.refused("latency", *QUICK, *addresses)
    listed = "tiny_draft.gguf, other (/x/tiny_draft)"
    assert mentions(refused, "engine.model: must name a model", addresses[-1], listed)
    assert not any(server.bodies for server in servers)
    named = ["engine.model=other", "engine.regular_model=tiny"]
    harness("latency", *QUICK, *addresses, *named)
    assert [server.bodies[-1]["model"] for server in servers] == ["tiny", "other"]
    assert set(results()["served_model"]) == {'["tiny", "other (/x/tiny_draft)"]'}
    unknown = EchoServer()
    harness("latency", *QUICK, *serve(unknown), "engine.model=../unlisted")
    assert {body["model"] for body in unknown.bodies} == {"../unlisted"}


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_too_short_a_context_is_refused(harness: Harness, serve: Serve, dialect: str) -> None:
    servers = EchoServer(), EchoServer(context=60, dialect=dialect)
    addresses = serve(*servers)
    refused = harness.refused("latency", *QUICK[:-1], *addresses, "decoding.max_new_tokens=30")
    assert mentions(refused, "decoding.max_new_tokens=30", "engine.url", "60 tokens")
    assert not any(server.bodies for server in servers)
    harness("latency", *QUICK, *addresses)


def test_a_server_alone_that_drafts_is_a_speculative_arm(harness: Harness, serve: Serve) -> None:
    addresses = serve(EchoServer(num_draft_tokens=4, version="1.0", started=100))
    harness("latency", *QUICK, *addresses)
    row = results().iloc[-1]
    assert (row["arm"], row["num_prompts"]) == ("speculative", 9)
    assert set(pd.read_csv(only("latency_prompts.csv"))["arm"]) == {"speculative"}
    asked = ["eval", *QUICK, "num_prompts=4", *addresses]
    harness(*asked)
    rows = results("eval")
    assert set(rows["arm"]) == {"speculative"}
    assert rows["acceptance_rate"].iloc[-1] == pytest.approx(1 / 3)
    # Answers that are taken over say which arm it was, without a server that is asked.
    harness(*asked)
    again = results("eval").iloc[-1]
    assert (again["arm"], again["num_resumed"]) == ("speculative", 4)


def test_servers_are_told_apart_by_what_they_say(harness: Harness, serve: Serve) -> None:
    for dialect, version in (("vllm", "0.32.0"), ("llama.cpp", "b6000-abc"), ("sglang", "\x1b[2J")):
        servers = [
            EchoServer(dialect=dialect, version=version, num_draft_tokens=count)
            for count in (None, 4)
        ]
        harness("latency", *QUICK, "num_prompts=2", *serve(*servers))
    assert list(results()["server"].unique()) == ["vLLM 0.32.0", "llama.cpp b6000-abc", "SGLang"]


def test_failed_requests_are_counted_and_the_key_is_nowhere(
    harness: Harness, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat_key(event: Any) -> Any:
        for choice in (event or {}).get("choices", ()):
            choice["text"] += " sk-s3cret"
        return event

    # Without token ids, so that its text counts.
    server = EchoServer(key="sk-s3cret", fail_every=4, dialect="openai", twist=repeat_key)
    asked = "engine.api_key_variable=A_KEY", "num_warmup=0"
    addresses = serve(server)
    monkeypatch.setenv("A_KEY", "sk-s3cret")
    outcome = harness("latency", *QUICK, *addresses, *asked, code=1)
    (row,) = results().to_dict("records")
    assert (row["arm"], row["num_failed"], row["num_tokens"]) == ("regular", 2, 7 * 8)
    assert pd.isna(row["draft"])
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("s3cret" in text for text in [*texts, outcome.stdout, outcome.stderr])
    assert harness.as_reported(outcome)


def test_a_server_that_is_down_gets_no_old_rows(harness: Harness, tmp_path: Path) -> None:
    with serving(EchoServer()) as url:
        asked = [*QUICK, f"engine.url={url}"]
        harness("latency", *asked)
        assert "measured before" in harness("latency", "-m", *asked, "resume=always").stderr
    outcome = harness("latency", "-m", *asked, "resume=always", code=1)
    assert "measured before" not in outcome.stderr


def test_answers_of_different_lengths_give_no_verdict(harness: Harness, serve: Serve) -> None:
    servers = EchoServer(), EchoServer(num_draft_tokens=4, stop_after=3)
    addresses = serve(*servers)
    outcome = harness("latency", *QUICK, *addresses, code=3)
    assert mentions(outcome.complaint, "no verdict", "the same work", "72", "27")
    assert set(results()["status"]) == {"no_verdict"}
    assert list(results()["num_tokens"]) == [72, 27]
    assert results()["speedup"].isna().all()
    assert harness.as_reported(outcome)
    race = ["compare", "engine=server", "model=tiny", "prompt=7 * 8 =", "decoding.max_new_tokens=8"]
    harness(*race, *addresses)
    assert results("compare")["speedup"].isna().all()


def test_an_arm_without_an_answer_fails_the_run_and_keeps_the_other(
    harness: Harness, serve: Serve
) -> None:
    addresses = serve(EchoServer(), EchoServer(die_after=1))
    outcome = harness("latency", *QUICK, *addresses, "num_warmup=0", code=1)
    # After five of nine prompts: the others would have no partners.
    assert outcome.complaint.startswith("speculative: 5 requests in a row got no answer")
    regular, speculative = results().to_dict("records")
    assert (regular["status"], regular["num_tokens"]) == ("failed", 5 * 8)
    assert speculative["num_failed"] == 5


def test_a_page_that_stays_away_is_said(
    harness: Harness, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.servers.counters._RETRY_S", 0.0)
    servers = [EchoServer(metrics=True, num_draft_tokens=n) for n in (None, 4)]
    servers[1].lost_pages = range(8, 20)
    harness("latency", *QUICK, "num_prompts=8", *serve(*servers))
    row = results().iloc[-1]
    # Of each of 8 laps all 8 tokens are counted, or none.
    assert 0 < row["server_tokens"] < 8 * 8
    assert row["server_tokens"] % 8 == 0
    assert row["mean_acceptance_length"] == pytest.approx(1 + 4 / 3)


def test_requests_have_what_the_user_adds(harness: Harness, serve: Serve) -> None:
    """A template's variables go to a server that applies it, beside further entries of the body."""
    server = EchoServer()
    thoughtless = {"enable_thinking": False}
    further = ["prompts.template_arguments={enable_thinking: false}", "engine.extra={priority: 2}"]
    [url] = serve(server)
    settings = ["engine=server", "model=tiny", url, "num_prompts=2", *further]
    harness("latency", *settings, "engine.chat=true", "decoding.max_new_tokens=4")
    assert server.bodies[-1]["chat_template_kwargs"] == thoughtless
    assert server.bodies[-1]["priority"] == 2
    harness("latency", *settings, "decoding.max_new_tokens=4")
    assert "chat_template_kwargs" not in server.bodies[-1]
    assert results()["measurement"].nunique() == 2


EVAL = ["eval", "engine=server", "model=tiny", "num_prompts=6", "batch_size=2", "seeds=[0]"]
EVAL += ["decoding=greedy"]


def test_eval_keeps_what_it_has_and_goes_on_after_a_failed_request(
    harness: Harness, serve: Serve
) -> None:
    servers = EchoServer(version="1"), EchoServer(version="1", num_draft_tokens=4)
    urls = serve(*servers)
    # Answers of a server that may have been restarted with other flags are not taken up.
    for server in servers:
        server.started = 1
    # One request finds out how the server is asked, two are a warm-up, and each batch is two.
    servers[0].bodies.clear()
    servers[0].fail_every = 8
    failed = harness(*EVAL, *urls, code=1)
    assert mentions(failed.complaint, "regular: 1 of 2 requests failed", "500 X: ")
    servers[0].fail_every = 0
    again = harness(*EVAL, *urls, code=3)
    assert "8 of 12 answers are in" in again.stderr
    # Six questions say little of others.
    assert "cannot tell: a difference of 5 points is not excluded" in again.complaint
    rows = results("eval")
    assert list(rows[rows["seed"] == "all"]["status"]) == ["failed"] * 2 + ["ok"] * 2
    assert list(rows[rows["seed"] == "all"]["num_prompts"]) == [4, 4, 6, 6]
    assert rows["identical_prompts"].iloc[-1] == 6


def test_compare_races_two_servers(harness: Harness, serve: Serve) -> None:
    settings = ["engine=server", "model=tiny", "decoding=greedy", "tokens=12", "prompt=Once upon"]
    harness("compare", *settings, *serve(EchoServer(), EchoServer(num_draft_tokens=4)))
    race = results("compare").iloc[-1]
    assert race["regular_completion"] == race["speculative_completion"] != ""
    # What the server does not tell is not denied.
    assert np.isnan(race["num_rejections"])


NUM_PROMPTS = 8


@dataclass
class Truth:
    """The counts of an arm, from the notes of its server."""

    answers: list[NotedAnswer]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def outcomes(self) -> list[tuple[int, int]]:
        return [outcome for answer in self.answers for outcome in answer.outcomes]

    @property
    def tokens_per_iteration(self) -> float:
        return (self.num_tokens - len(self.answers)) / len(self.outcomes)

    @property
    def num_drafted(self) -> int:
        return sum(drafted for drafted, _ in self.outcomes)

    @property
    def num_accepted(self) -> int:
        return sum(accepted for _, accepted in self.outcomes)


ALL_DRAFT = ((4, 2), (4, 4), (4, 0))
FEW_DRAFT = ((4, 4), *[(0, 0)] * 9)
IN_FLIGHT = ["batch_size=4", "num_prompts=15"]
# A server's behaviour, and settings of the run; how acceptance is reported otherwise is in tests/measuring/figures.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "iterations, unequal answers": ({"drafts": ALL_DRAFT, "lengths": (3, 30), "first_s": 0.04}, []),
    "counters of several in flight, few iterations draft": (
        {"metrics": True, "drafts": FEW_DRAFT, "slots": 4},
        IN_FLIGHT,
    ),
    "totals of answers that end early": (
        {
            "dialect": "llama.cpp",
            "drafts": ALL_DRAFT,
            "lengths": (7, 30, 12),
            "drafts_until": "limit",
        },
        [],
    ),
    "most of a stream is held back": (
        {"metrics": True, "drafts": ALL_DRAFT, "held_tokens": 24},
        [],
    ),
}
# Of the regular server, unless a case says otherwise.
TIMES = {"first_s": 0.01, "delay_s": 0.001, "drafts_until": "end", "slots": 1}


@pytest.mark.parametrize("case", CASES)
def test_figures_are_those_that_servers_noted(harness: Harness, serve: Serve, case: str) -> None:
    behaviour, settings = TIMES | CASES[case][0], CASES[case][1]
    servers = EchoServer(**{**behaviour, "drafts": ()}), EchoServer(**behaviour)
    # A step that drafts takes longer.
    servers[1].delay_s = 1.5 * servers[0].delay_s
    asked = [
        "engine=server",
        "model=tiny",
        f"num_prompts={NUM_PROMPTS}",
        "decoding.max_new_tokens=30",
    ]
    asked += ["decoding.ignore_eos=false", "decoding=greedy", "resume=false", *settings]
    printed = harness("latency", *asked, *serve(*servers))
    summary = " ".join(printed.summary.split())
    arms = results().to_dict("records")
    prompts = pd.read_csv(only("latency_prompts.csv"))

    # Under load each prompt's own times count; requests that only keep up the load are noted, too.
    each_ms = []
    for server, row in zip(servers, arms, strict=True):
        answers = prompts[prompts.arm == row["arm"]]
        truth = Truth(server.noted[-len(answers) :])
        assert row["num_tokens"] == answers.num_tokens.sum() == truth.num_tokens
        ms_per_token = answers.time_ms.sum() / answers.num_tokens.sum()
        assert row["ms_per_token"] == pytest.approx(ms_per_token)
        assert row["time_to_first_token_ms"] == pytest.approx(answers.time_to_first_token_ms.mean())
        decoding_ms = (answers.time_ms - answers.time_to_first_token_ms).sum()
        each_ms.append(decoding_ms / (answers.num_tokens - 1).sum())
    regular, row = arms
    # Where one arm happened to be slow, the speed-up may be an impossible one.
    if row["status"] == "ok":
        assert row["speedup"] == pytest.approx(regular["ms_per_token"] / row["ms_per_token"])
    if not settings:
        assert row["tokens_per_second"] == pytest.approx(1000 / row["ms_per_token"], rel=0.1)

    truth = Truth(servers[1].noted[-int(row["num_prompts"]) :])
    # A lap's counters are read while requests that only keep up the load are at work.
    near = 0.02 if settings else 1e-6
    accepted = truth.num_accepted / truth.num_drafted
    assert row["acceptance_rate"] == pytest.approx(accepted, rel=near)
    # Of totals the iterations of answers that end by themselves are unknown.
    are_known = servers[1].drafts_until != "limit"
    if are_known:
        assert row["tokens_per_iteration"] == pytest.approx(truth.tokens_per_iteration, rel=near)
        proposed = truth.num_drafted / len(truth.outcomes)
        # What those draft counts, too: the more, the fewer iterations draft.
        assert row["mean_num_draft_tokens"] == pytest.approx(proposed, rel=2.5 * near)
    else:
        assert pd.isna(row["tokens_per_iteration"])
    if not settings:
        answers = prompts[prompts.arm == "speculative"].itertuples()
        for answer, noted in zip(answers, truth.answers, strict=True):
            assert pd.isna(answer.num_iterations) or answer.num_iterations == len(noted.outcomes)
    if not are_known:
        assert "tokens per iteration" not in summary
        return
    is_held_back = servers[1].held_tokens > 1
    assert ("the cost of an iteration and the time per token" in summary) == is_held_back
    assert ("first token ms" in printed.stdout) != is_held_back
    assert bool(pd.isna(row["time_per_output_token_p50_ms"])) == is_held_back

    shown = re.search(r"([\d.]+) tokens per iteration", summary)
    assert float(shown[1]) == pytest.approx(truth.tokens_per_iteration, abs=0.051)
    # A regular step is one token's time, an iteration that of all that it yields.
    share = re.search(r"a regular step is (\d+) % of an iteration", summary)
    # Beside other programs no cost is named, nor where one arm happened to be slow.
    assert share is None or not ("Processes waited for a core" in summary or is_held_back)
    if share is not None:
        expected = 100 * each_ms[0] / (each_ms[1] * row["tokens_per_iteration"])
        assert float(share[1]) == pytest.approx(expected, abs=0.51)
