"""Every figure of a served pair's page against what the servers themselves wrote down, for servers of many kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pytest

from echo_server import EchoServer, NotedAnswer, Serve
from in_process import Harness, only, results

NUM_PROMPTS = 8
# The client sees what a server wrote a little later, on a busy machine more than a little. Figures are computed from
# what the client saw, to the last digit.
LATER = 1.5
LATER_MS = 50


@dataclass
class Truth:
    """The counts of an arm, from the notes of its server."""

    answers: list[NotedAnswer]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def ms(self) -> float:
        return 1000 * sum(answer.seconds[-1] for answer in self.answers)

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
    "iterations, unequal answers": (
        {"drafts": ALL_DRAFT, "lengths": (3, 30), "first_s": 0.04},
        [],
    ),
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
def test_figures_are_those_that_the_servers_noted(
    harness: Harness, serve: Serve, case: str
) -> None:
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
    summary = " ".join(harness("latency", *asked, *serve(*servers)).summary.split())
    arms = results().to_dict("records")
    prompts = pd.read_csv(only("latency_prompts.csv"))

    # Under load each prompt's own times count; requests that only keep up the load are noted, too.
    each_ms = []
    for server, row in zip(servers, arms, strict=True):
        answers = prompts[prompts.arm == row["arm"]]
        truth = Truth(server.noted[-len(answers) :])
        assert row["num_tokens"] == answers.num_tokens.sum() == truth.num_tokens
        if not settings:
            assert truth.ms <= answers.time_ms.sum() <= LATER * truth.ms + LATER_MS * len(answers)
        ms_per_token = answers.time_ms.sum() / answers.num_tokens.sum()
        assert row["ms_per_token"] == pytest.approx(ms_per_token)
        assert row["time_to_first_token_ms"] == pytest.approx(answers.time_to_first_token_ms.mean())
        decoding_ms = (answers.time_ms - answers.time_to_first_token_ms).sum()
        each_ms.append(decoding_ms / (answers.num_tokens - 1).sum())
    regular, row = arms
    assert row["speedup"] == pytest.approx(regular["ms_per_token"] / row["ms_per_token"])
    if not settings:
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
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
    assert ("the cost of an iteration are unknown" in summary) == is_held_back
    assert ("first token ms" in summary) != is_held_back
    assert bool(pd.isna(row["time_per_output_token_p50_ms"])) == is_held_back

    shown = re.search(r"([\d.]+) tokens per iteration", summary)
    assert float(shown[1]) == pytest.approx(truth.tokens_per_iteration, abs=0.051)
    # A regular step is one token's time, an iteration that of all that it yields.
    share = re.search(r"a regular step is (\d+) % of an iteration", summary)
    # Beside other programs no cost is named.
    assert (share is None) == ("The machine was not quiet" in summary or is_held_back)
    if share is not None:
        expected = 100 * each_ms[0] / (each_ms[1] * row["tokens_per_iteration"])
        assert float(share[1]) == pytest.approx(expected, abs=0.51)
