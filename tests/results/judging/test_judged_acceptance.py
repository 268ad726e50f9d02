"""What is said of why acceptance is low, from planted rows."""

from __future__ import annotations

from typing import Any

import pytest

from harness.results.judging.acceptance import AcceptanceFinding, excluded, finding_of
from harness.results.rows.acceptance import AcceptanceCauseRow, AcceptanceRow
from harness.results.statistics.interval import Coverage, Interval
from statements import incoherent

WEIGHTS = Interval(4.0, 3.7, 4.3)
TOKENS = Interval(3.9, 3.6, 4.2, Coverage(15, "prompt"))
LATE = {"cause": "positions", "condition": "late", "is_asked": False, "own_texts": True}
COLD = {"cause": "temperature", "condition": "temperature 0", "is_asked": True, "own_texts": True}


def found(causes: list[dict[str, Any]], **columns: Any) -> AcceptanceFinding:
    shared = {"num_draft_tokens": 4, "tokens_per_iteration": TOKENS, "impossible_share": 0.0}
    row = AcceptanceRow(**shared | {"weights_tokens_per_iteration": WEIGHTS} | columns)
    typed = AcceptanceCauseRow(served=Interval(2.0), weights=WEIGHTS)
    finding = finding_of([row], row, [typed, *(AcceptanceCauseRow(**cause) for cause in causes)])
    assert incoherent(finding.statements) == []
    return finding


def test_a_position_is_the_first_that_is_below() -> None:
    shares = [(0.79, 0.8), (0.5, 0.8), (0.4, 0.8)]
    places = [
        {"position": place, "served": Interval(served), "weights": Interval(of, of - 0.1, of + 0.1)}
        for place, (served, of) in enumerate(shares, start=1)
    ]
    finding = found(places, served_tokens_per_iteration=2.0)
    assert finding.engine is not None
    assert finding.engine.words == "accepts less than its weights"
    assert finding.first_below == 2


@pytest.mark.parametrize(
    ("served", "cause", "is_named"),
    [
        (2.0, LATE | {"served": Interval(2.0), "weights": Interval(2.1, 1.9, 2.3)}, True),
        # Three standard deviations of the weights are 1.91: it may be like that or not.
        (1.9, LATE | {"served": Interval(1.9), "weights": Interval(2.2, 1.9, 2.5)}, False),
        # The engine is not like that either.
        (2.0, LATE | {"served": Interval(2.0), "weights": Interval(3.0, 2.9, 3.1)}, False),
        # Nothing has to be explained.
        (4.1, LATE | {"served": Interval(4.1), "weights": WEIGHTS}, False),
        (2.0, LATE | {"why": "needs bitsandbytes"}, False),
        (4.1, COLD | {"relative": Interval(1.5, 1.2, 1.9)}, True),
        (4.1, COLD | {"relative": Interval(1.1, 0.9, 1.4)}, False),
        (4.1, COLD | {"why": "chats are sent whole"}, False),
    ],
)
def test_a_cause_is_named_by_a_measured_difference(
    served: float, cause: dict[str, Any], is_named: bool
) -> None:
    finding = found([cause], served_tokens_per_iteration=served)
    assert bool([*finding.explaining, *finding.differing]) == is_named


@pytest.mark.parametrize(
    ("served", "words", "is_open"),
    [(4.18, "as its weights say", True), (4.2, "cannot tell", False), (3.69, "less", False)],
)
def test_between_three_and_five_deviations_it_cannot_be_told(
    served: float, words: str, is_open: bool
) -> None:
    """The limits, 0.3 on each side, are 4.75 standard deviations: three of these are 0.19."""
    engine = found([], served_tokens_per_iteration=served).engine
    assert engine is not None
    assert words in engine.words
    assert engine.is_judged_open == is_open
    # The farther limit is 0.48 away from it.
    assert not is_open or excluded(engine, WEIGHTS) == "no difference above 12 %"


def test_intervals_of_several_causes_hold_at_once() -> None:
    relative = Interval(1.2, 1.01, 1.43, Coverage(15, "prompt"))
    alone = found([COLD | {"relative": relative}], served_tokens_per_iteration=4.0)
    assert len(alone.differing) == 1
    both = found([COLD | {"relative": relative}] * 2, served_tokens_per_iteration=4.0)
    assert [statement.family for statement in both.causes] == [2, 2]
    assert not both.differing


def test_two_commands_are_compared_at_each_position() -> None:
    first = {"cause": "command", "condition": "with the first command", "is_asked": True}
    shares = {None: (1.1, 0.98, 1.2), 1: (1.0, 0.9, 1.1), 2: (1.5, 1.2, 1.9)}
    places = [
        first | {"position": place, "relative": Interval(*share, Coverage(15, "prompt"))}
        for place, share in shares.items()
    ]
    differing = found(places, served_tokens_per_iteration=4.0).differing
    said = [(statement.subject.position, statement.relation) for statement in differing]
    assert said == [(None, "open"), (2, "above")]
    assert differing[0].family == 3


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"card_tokens_per_iteration": 4.3}, "below its card"),
        ({"card_tokens_per_iteration": 4.0}, "as its card says"),
        ({"relative_to_guess": Interval(0.9, 0.8, 0.99)}, "no better than a guess"),
        ({"relative_to_guess": Interval(1.1, 0.9, 1.3)}, "cannot tell"),
        ({"likelihood_z": -4.8}, "not the model's"),
        ({"likelihood_z": -4.7}, "the model's"),
        ({"impossible_share": 0.006}, "not the model's"),
    ],
)
def test_a_draft_is_held_against_its_card_and_a_guess(columns: Any, words: str) -> None:
    finding = found([], served_tokens_per_iteration=4.0, **columns)
    said = [statement.words for statement in finding.statements if statement.kind != "engine"]
    assert words in said
