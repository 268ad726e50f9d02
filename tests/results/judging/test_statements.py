"""What is said of an interval, of accuracy, of output, of the K at each load, and of why acceptance is low."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from harness.commands.eval.page import judged_differences
from harness.commands.eval.rows import EvalRow
from harness.commands.recovery.record import Recovery
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import judged_output, recovery_page
from harness.measuring.rows import LatencyRow
from harness.results.judging.acceptance import AcceptanceFinding, excluded, finding_of
from harness.results.judging.series import Range, for_vllm, in_words, judged_at_once, schedule_of
from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import AcceptanceCauseRow, AcceptanceRow
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    p_value_of_difference,
)
from pages import incoherent


@pytest.mark.parametrize(
    ("low", "high", "relation", "words"),
    [
        (1.1, 1.4, "above", "gains more"),
        (0.9, 1.2, "open", "cannot be told apart"),
        (1.0, 1.2, "open", "cannot be told apart"),
        (1 + 1e-15, 1 + 1e-15, "open", "cannot be told apart"),
        (0.8, 0.8, "below", "gains less"),
        (0.7, 0.9, "below", "gains less"),
        (math.nan, math.nan, "open", "not ranked"),
    ],
)
def test_the_interval_of_two_speedups_decides(
    low: float, high: float, relation: str, words: str
) -> None:
    statement = Statement.ordered("compared", Interval((low + high) / 2, low, high))
    assert (statement.relation, statement.words) == (relation, words)
    assert bool(statement.why) == math.isnan(low)


def test_a_reason_leaves_it_open_whatever_the_interval_is() -> None:
    statement = Statement.ordered("pays", Interval(2.0, 1.5, 2.5), "unequal work")
    assert (statement.relation, statement.words) == ("open", "cannot tell")
    assert statement.as_json()["why"] == "unequal work"
    assert Statement.ordered("pays", Interval(2.0, 1.5, 2.5)).as_json()["why"] is None
    founded = Statement("lossless", "lossless", evidence="15 of 15")
    assert (founded.reason, founded.as_json()["evidence"]) == ("15 of 15", "15 of 15")
    assert Statement.ordered("pays", Interval()).as_json()["evidence"] is None


@pytest.mark.parametrize(
    ("interval", "why"), [(Interval(2.0), ""), (Interval(), ""), (Interval(2.0, 1.5, 2.5), "busy")]
)
def test_no_conclusion_stands_without_bounds_or_against_a_reason(
    interval: Interval, why: str
) -> None:
    with pytest.raises(ValueError, match="without bounds or evidence"):
        Statement("pays", "above", interval, why)
    assert Statement("lossless", "lossless", evidence="15 of 15 texts identical").is_conclusion


def test_an_arm_is_better_or_worse_where_the_interval_excludes_no_difference() -> None:
    answers = [True] * 80 + [False] * 20
    lost = [True] * 60 + [False] * 40
    for before, after, words in (
        (answers, answers, "no significant difference"),
        (answers[:40], answers[:40], "cannot tell"),
        (answers, lost, "worse"),
        (lost, answers, "better"),
        ([True] * 5, [True] * 5, "cannot tell"),
    ):
        row = EvalRow(difference=difference_of_paired_proportions(before, after))
        (statement,) = judged_differences([row])
        assert statement.words == words


def test_five_answers_lost_of_a_hundred_are_worse_alone_but_not_among_four() -> None:
    """Interval and p-value are one test: McNemar's p-value, 0.06, contradicts the interval here."""
    before, after = [True] * 98 + [False] * 2, [False] * 5 + [True] * 93 + [False] * 2
    lost = EvalRow(difference=difference_of_paired_proportions(before, after))
    same = EvalRow(difference=difference_of_paired_proportions([True] * 100, [True] * 100))
    assert lost.difference is not None
    assert lost.difference.high < 0
    (alone,) = judged_differences([lost])
    assert (alone.words, alone.family) == ("worse", 1)
    among, *_ = judged_differences([lost, same, same, same])
    assert (among.words, among.family) == ("cannot tell", 4)
    assert among.why == "not significant among 4 comparisons"
    assert among.interval == alone.interval


@pytest.mark.parametrize("low", [1e-9, -1e-9])
def test_a_p_value_is_below_5_percent_where_the_interval_excludes_0(low: float) -> None:
    assert (p_value_of_difference(Interval(0.1, low, 0.4)) < 0.05) == (low > 0)
    assert (p_value_of_difference(Interval(-0.1, -0.4, -low)) < 0.05) == (low > 0)
    assert math.isnan(p_value_of_difference(Interval()))
    assert p_value_of_difference(Interval(0.1, 0.1, 0.1)) == 0


def test_evaluations_that_are_read_together_are_one_family() -> None:
    lost = EvalRow(run="a", difference=Interval(-0.05, -0.11, -0.001))
    same = EvalRow(run="b", difference=Interval(0.0, -0.05, 0.05))
    alone_arm, failed = EvalRow(run="c"), EvalRow(run="d", status="failed", error="no server")
    (alone,) = judged_differences([lost])
    assert (alone.words, alone.subject.run, alone.figure) == ("worse", "a", "accuracy")
    together = judged_differences([lost, same, alone_arm, failed])
    assert [(statement.relation, statement.family) for statement in together] == [("open", 2)] * 4
    assert [statement.why for statement in together] == [
        "not significant among 2 comparisons",
        "",
        "only one arm answered",
        "no server",
    ]


GREEDY = RecoveryRow(
    run="r", status="ok", check="greedy", verdict="lossless", num_prompts=15, identical_prompts=15
)
DRAWN = {"check": "draws", "verdict": "undecided"}
WEAK = DRAWN | {"num_draws": 900, "shift": 0.1, "power": 0.4}
OF_A_SHIFT = "would see a shift of 10 % between parts of their distribution with a chance"
OF_NO_SHIFT = OF_A_SHIFT.replace("10 %", "0 %")
IDENTICAL = "15 of 15 greedy texts identical"


@pytest.mark.parametrize(
    ("changes", "relation", "reason", "exit_code"),
    [
        ({}, "lossless", IDENTICAL, None),
        ({"verdict": "lossy"}, "lossy", IDENTICAL, 1),
        (
            {"lossy": True, "lenience": 0.5},
            "lossy",
            "lenience 0.5 is lossy by definition, although these checks do not show it",
            1,
        ),
        (
            {"verdict": "undecided"},
            "open",
            "greedy texts differ, and no logits say whether rounding explains it",
            3,
        ),
        ({"status": "interrupted"}, "open", "interrupted", None),
        (
            WEAK | {"rounding": 0.04},
            "open",
            f"900 drawn tokens {OF_A_SHIFT} of at least 40.0 % only; raise num_draws or shift",
            3,
        ),
        (
            WEAK | {"rounding": 0.05},
            "open",
            "rounding (0.05) is nearly as large as the shift (0.1) that is to be seen: a larger shift= can be tested,"
            " or the engine in float32",
            3,
        ),
        (
            WEAK | {"rounding": 0.09, "num_draws_needed": 2_000},
            "open",
            f"900 drawn tokens {OF_A_SHIFT} of at least 40.0 % only; at least num_draws=2000 is needed",
            3,
        ),
        (
            WEAK | {"evidence": 3.0},
            "open",
            "900 drawn tokens are evidence of 1 to 1,000 against the target's distribution, not yet decisive;"
            " raise num_draws or shift",
            3,
        ),
        (
            DRAWN,
            "open",
            f"0 drawn tokens {OF_NO_SHIFT} of at least 0.0 % only; raise num_draws or shift",
            3,
        ),
    ],
)
def test_a_run_has_one_statement_with_its_reason(
    changes: dict[str, object], relation: str, reason: str, exit_code: int | None
) -> None:
    row = RecoveryRow.from_values({**GREEDY.values(), **changes})
    page = recovery_page([Run([row])])
    (statement,) = page.statements
    assert (statement.relation, statement.reason, statement.figure) == (relation, reason, "output")
    assert statement.why == (reason if relation == "open" else "")
    bad_answer = Recovery().bad_answer([row])
    assert (bad_answer and bad_answer.exit_code) == exit_code


def test_the_check_that_sees_least_is_named() -> None:
    found = [
        RecoveryRow.from_values({**GREEDY.values(), **DRAWN, "power": power})
        for power in (0.5, None, 0.2)
    ]
    assert "a chance of at least 0.0 % only" in judged_output(found, "").why


def row(load: int, k: int, speedup: float, spread: float = 0.1) -> LatencyRow:
    return LatencyRow(
        arm="speculative", model="13B", draft="7B", batch_size=load, num_draft_tokens=k, ms_per_token=9.0,
        speedup=Interval(speedup, speedup - spread, speedup + spread, Coverage(15, "prompt")),
    )  # fmt: skip


def schedule(*rows: LatencyRow) -> list[tuple[int, int, int]] | str:
    """The ranges, or why there are none."""
    ranges, why_none = schedule_of(judged_at_once([Run([each]) for each in rows]))
    return why_none or [tuple(entry) for entry in ranges]


def test_a_range_ends_at_a_measured_load() -> None:
    assert schedule(row(1, 4, 2.0), row(4, 4, 1.5), row(16, 4, 0.7)) == [(1, 4, 4), (16, 16, 0)]
    # A K that pays from a larger load on.
    rising = [row(load, 3, speedup, 0.01) for load, speedup in ((1, 0.8), (2, 1.5), (16, 1.6))]
    assert schedule(*rising) == [(1, 1, 0), (2, 16, 3)]
    assert schedule(row(1, 1, 0.8), row(16, 1, 0.8)) == "no K is shown to pay at any load"
    # The best K cannot tell, and another one can.
    unsure = [row(1, 5, 2.0, spread=1.5), row(1, 1, 1.5), row(16, 1, 1.4)]
    assert schedule(*unsure) == [(1, 16, 1)]
    # As the page of the runs at one load does, it takes one that ran quietly.
    busy = replace(row(1, 8, 3.0), drifted=True)
    assert schedule(busy, row(1, 4, 2.0), row(4, 4, 1.5)) == [(1, 4, 4)]


def test_a_load_at_which_nothing_is_shown_keeps_the_k_of_the_next_smaller_one() -> None:
    """It is switched off only where that K is shown to lose."""
    open_at_16 = row(16, 4, 1.0)
    alone = replace(row(64, 4, 1.2), speedup=Interval(1.2))
    # Loads between it and its neighbours were not measured.
    kept = [(1, 1, 4), (16, 16, 4), (64, 64, 4)]
    assert schedule(row(1, 4, 2.0), open_at_16, alone) == kept
    assert schedule(row(1, 4, 2.0), open_at_16, row(16, 8, 0.7)) == kept[:2]
    all_lose = [row(1, 4, 2.0), row(16, 2, 0.6), row(16, 8, 0.7), row(64, 2, 1.0)]
    assert schedule(*all_lose) == [(1, 1, 4), (16, 16, 0), (64, 64, 0)]
    assert schedule(row(1, 4, 1.0), row(16, 4, 2.0)) == "nothing is shown at the smallest load, 1"
    error = "the arms did not do the same work"
    refused = replace(row(16, 4, 1.0), speedup=None, status=NO_VERDICT, error=error)
    assert schedule(row(2, 4, 1.5), refused) == [(2, 2, 4), (16, 16, 4)]


def test_a_server_whose_k_is_unknown_has_no_schedule() -> None:
    unknown = [replace(row(load, 4, 2.0), num_draft_tokens=None) for load in (1, 4)]
    assert schedule(*unknown) == "the server's K is not known: type K="


def test_words_say_what_was_not_measured_and_vllm_gets_every_load() -> None:
    ranges = [Range(1, 4, 3), Range(6, 6, 2), Range(16, 16, 0)]
    words = "K=3 at 1 to 4; 5 not measured; K=2 at 6; 7 to 15 not measured; none at 16"
    assert in_words(ranges) == words
    assert in_words(ranges[1:2]) == "K=2 at 6"
    assert json.loads(for_vllm(ranges)) == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 6, 2], [7, 16, 0]],
    }


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
