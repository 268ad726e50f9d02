"""The requests of `recovery`: mixed, and answered together as each would be alone."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from echo_questions import TOKENIZER
from harness.commands.recovery.sampling import samplings
from harness.commands.recovery.scores import ScoredText, choose_place
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest, Workload
from harness.config.settings import DecodingSettings
from harness.engines.requests import RequestRecord
from harness.results.statistics.drawn_tokens import DrawnText

DECODING = DecodingSettings(max_new_tokens=12, num_draft_tokens=2, temperature=1.0)
PROMPTS = [list(TOKENIZER.encode(text)) for text in ("once upon a time", "2 + 2 =", "the end")]


def workload() -> Workload:
    settings: Any = SimpleNamespace(decoding=DECODING, seed=0)
    return Workload(Asking(settings, PROMPTS, samplings(DECODING), frozenset()))


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
    answers = [Answer(one, RequestRecord(0, 1, token_ids=[9] * one.num_tokens)) for one in asked]
    second = made.second_turns(answers, 10)
    longest = max(map(len, PROMPTS))
    assert {one.prompt[: len(one.prompt)] for one in second}.isdisjoint(prompts)
    assert max(len(one.prompt) for one in second) <= longest + 12 + 8
    again = workload().first_turns(40)
    assert again == asked


def test_many_requests_go_on_at_one_place() -> None:
    made = workload()
    at_place = made.at_place((3, 1, 4), 30)
    assert {one.prompt for one in at_place} == {(3, 1, 4)}
    # The target's own token, two that are proposed, and the bonus token.
    assert {one.num_tokens for one in at_place} == {4}
    assert {one.sampling.name for one in at_place} == {"as asked"}
    first = made.first_turns(0)
    answers = [Answer(one, RequestRecord(0, 1, token_ids=[9] * one.num_tokens)) for one in first]
    asked = made.second_turns(answers, 40, at_place, num_in_flight=6)
    assert sum(one.is_at_place and one.is_compared for one in asked) == 30
    # They come in groups of six among the others.
    lengths = [
        len(list(group))
        for at_place, group in itertools.groupby(asked, operator.attrgetter("is_at_place"))
        if at_place
    ]
    assert len(lengths) > 2
    assert all(length % 6 == 0 for length in lengths)


def drawn_text(
    prompt: tuple[int, ...],
    widths: list[float],
    entropies: list[float],
    outcomes: Sequence[tuple[int, int]] = (),
) -> ScoredText:
    """A text with the outcomes of its iterations, where they are known."""
    request = PlannedRequest(prompt, samplings(DECODING)[0], len(widths), 0)
    record = RequestRecord(0, 1, num_tokens=len(widths), outcomes=list(outcomes))
    zeros = np.zeros(len(widths))
    tokens = tuple(range(len(widths)))
    text = DrawnText(
        prompt=prompt,
        setting="any",
        is_at_place=False,
        tokens=tokens,
        widths=np.array(widths),
        is_impossible=zeros.astype(bool),
        parts=zeros.astype(int),
        part_masses=zeros,
        ranks=[0] * len(widths),
    )
    return ScoredText(Answer(request, record), text, np.array(entropies))


def test_the_place_is_where_a_proposal_was_rejected_and_the_second_token_is_most_open() -> None:
    widths, entropies = [1.0, 0.9, 1.0, 0.5], [0.0, 0.3, 2.0, 1.0]
    # Token 1 in place of the first of two proposed, and token 3 of the second.
    certain = drawn_text((7,), widths, entropies, [(2, 0), (2, 1)])
    assert choose_place([certain]) == (7, 0, 1)
    # Without knowing where, it may be any.
    assert choose_place([drawn_text((7,), widths, entropies)]) == (7, 0)
    other = drawn_text((8,), [1.0, 1.0], [0.0, 9.0], [(2, 0)])
    assert choose_place([certain, other, certain]) == (8,)
    assert choose_place([drawn_text((7,), widths, entropies, [(3, 3)])]) == (7,)
