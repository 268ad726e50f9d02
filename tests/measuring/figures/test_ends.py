"""Tokens after the end of a text, and texts that end by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import ModelSettings
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.measuring.figures.ends import Ends
from harness.servers.events import note_drafts, read_event
from in_process import Harness, results
from measured_runs import figures
from tiny_checkpoints import make_tokenizer

END = 9


def answer(token_ids: list[int], outcomes: list[tuple[int, int]]) -> RequestRecord:
    return RequestRecord(0, 3, token_ids=token_ids, num_tokens=len(token_ids), outcomes=outcomes)


def ends(*answers: RequestRecord) -> dict[str, Any]:
    """The figures of an arm with these answers."""
    return vars(figures(Ends, [Answered(requests=answers, seconds=0.0)], end_tokens={END}))


def test_iterations_are_divided_at_the_end_of_the_text() -> None:
    # The first token, then 3, 1 and 3 tokens; the text ends with the fifth one.
    texts = [answer([1, 2, 3, 4, END, 5, 5, 5], [(2, 2), (2, 0), (2, 2)])]
    columns = ends(*texts)
    assert columns["share_after_end"] == 3 / 8
    assert columns["acceptance_rate_before_end"] == 2 / 4
    assert columns["acceptance_rate_after_end"] == 1.0


@pytest.mark.parametrize(
    ("token_ids", "outcome", "share", "before", "after"),
    [
        # No end; an end within an iteration; iterations that do not fit the tokens.
        ([1, 2, 3], (2, 1), 0, 0.5, None),
        ([END, 5, 5, 5], (4, 4), 3 / 4, None, 1.0),
        ([1, 2, 3, 4, 5, 6], (2, 1), 0, None, None),
    ],
)
def test_what_is_before_the_end_and_after_it(
    token_ids: list[int],
    outcome: tuple[int, int],
    share: float,
    before: float | None,
    after: float | None,
) -> None:
    columns = ends(answer(token_ids, [outcome]))
    assert columns["share_after_end"] == share
    assert columns["acceptance_rate_before_end"] == before
    assert columns["acceptance_rate_after_end"] == after


def test_answers_that_cannot_be_divided_are_left_out_of_rates() -> None:
    """Their share of the tokens is known, and counts; both rates are without them."""
    divided = answer([1, 2, 3, 4, END, 5, 5, 5], [(2, 2), (2, 0), (2, 2)])
    unknown = answer([1, END, 3, 4, 5, 6], [(2, 1)])
    columns = ends(divided, unknown)
    assert columns["share_after_end"] == (3 + 4) / (8 + 6)
    assert columns["acceptance_rate_before_end"] == 0.5


@pytest.mark.parametrize("per_step", [True, False])
def test_iterations_without_a_known_order_are_not_divided(per_step: bool) -> None:
    """A histogram has the rejections first, and its iterations would add up all the same."""
    request = answer([1, 2, 3, 4, END, 5], [])
    counts = {"num_draft_tokens": 6, "num_accepted_draft_tokens": 2}
    histogram = {"acceptance_histogram": [2, 0, 1]}
    steps = {"per_step_drafted": [2, 2, 2], "per_step_accepted": [2, 0, 0]}
    reported = counts | (steps if per_step else histogram)
    note_drafts(request, read_event({"metrics": {"speculative_decoding": reported}}))
    assert len(request.outcomes) == 3
    rates = ends(request)
    assert rates["acceptance_rate_before_end"] == (0.5 if per_step else None)
    assert rates["acceptance_rate_after_end"] == (0 if per_step else None)


def test_iterations_that_a_server_leaves_out_have_no_known_place() -> None:
    request = answer([1, END, 3, 4, 5], [(2, 2)])
    request.count_undrafted()
    assert request.outcomes == [(2, 2), (0, 0)]
    assert ends(request)["acceptance_rate_before_end"] is None


def test_answers_of_a_chat_model_end_by_themselves(
    harness: Harness, save_model: Callable[..., ModelSettings], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = save_model("llama", "chat", tokenizer=tokenizer)
    asked = ["latency", f"model={model.name}", "draft=none", "prompts=prompts.txt", "num_prompts=2"]
    asked += ["decoding.max_new_tokens=8", "num_warmup=0"]
    harness(*asked)
    harness(*asked, "chat_template=never")
    harness(*asked, "decoding.ignore_eos=true")
    assert list(results()["ignore_eos"]) == [False, True, True]
