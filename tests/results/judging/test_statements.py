"""What is said of an interval, of accuracy, of the K at each load, and of why acceptance is low."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from harness.commands.eval.rows import EvalRow
from harness.commands.recovery.rows import RecoveryRow
from harness.measuring.rows import LatencyRow
from harness.results.judging.acceptance import AcceptanceFinding, excluded, finding_of
from harness.results.judging.answers import judged_differences, judged_output
from harness.results.judging.series import (
    LoadRange,
    for_vllm,
    judged_at_once,
    schedule_in_words,
    schedule_of,
)
from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import AcceptanceCauseRow, AcceptanceRow
from harness.results.runs import Run
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import Coverage, Interval
from pages import incoherent


def test_the_interval_of_two_speedups_decides() -> None:
    for low, high, relation, words in [
        (1.1, 1.4, "above", "gains more"),
        (0.9, 1.2, "open", "not significantly different"),
        (1.0, 1.2, "open", "not significantly different"),
        (1 + 1e-15, 1 + 1e-15, "open", "not significantly different"),
        (0.8, 0.8, "below", "gains less"),
        (0.7, 0.9, "below", "gains less"),
        (math.nan, math.nan, "open", "not ranked"),
    ]:
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


def test_no_conclusion_stands_without_bounds_or_against_a_reason() -> None:
    for interval, why in [(Interval(2.0), ""), (Interval(), ""), (Interval(2.0, 1.5, 2.5), "busy")]:
        with pytest.raises(ValueError, match="without bounds or evidence"):
            Statement("pays", "above", interval, why)
        assert Statement("lossless", "lossless", evidence="15 of 15 texts identical").is_conclusion


def test_a_check_without_a_verdict_leaves_the_output_undecided() -> None:
    rows = [
        RecoveryRow(check=check, verdict=verdict)
        for check, verdict in (("greedy", "lossless"), ("sampled", None))
    ]
    assert judged_output(rows[:1], "20 of 20 texts").relation == "lossless"
    assert judged_output(rows, "20 of 20 texts").relation == "open"


def test_evaluations_that_are_read_together_are_one_family() -> None:
    lost = EvalRow(run="a", difference=Interval(-0.05, -0.11, -0.001))
    same = EvalRow(run="b", difference=Interval(0.0, -0.05, 0.05))
    alone_arm, failed = EvalRow(run="c"), EvalRow(run="d", status="failed", error="no server")
    (alone,) = judged_differences([lost])
    assert (alone.words, alone.subject.run, alone.figure) == ("worse", "a", "accuracy")
    together = judged_differences([lost, same, alone_arm, failed])
    assert [(statement.relation, statement.family) for statement in together] == [("open", 2)] * 4
    whys = ["not significant among 2 comparisons", "", "only one arm answered", "no server"]
    assert [statement.why for statement in together] == whys


def row(load: int, k: int, speedup: float, spread: float = 0.1) -> LatencyRow:
    return LatencyRow(
        arm="speculative", model="13B", draft="7B", batch_size=load, num_draft_tokens=k, ms_per_token=9.0,
        speedup=Interval(speedup, speedup - spread, speedup + spread, Coverage(15, "prompt")),
    )  # fmt: skip


def schedule(*rows: LatencyRow) -> list[tuple[list[int], int]] | str:
    """The ranges, or why there are none."""
    ranges, why_none = schedule_of(judged_at_once([Run([each]) for each in rows]))
    return why_none or [tuple(entry) for entry in ranges]


def test_a_range_ends_at_a_measured_load() -> None:
    assert schedule(row(1, 4, 2.0), row(4, 4, 1.5), row(16, 4, 0.7)) == [([1, 4], 4), ([16], 0)]
    # A K that pays from a larger load on.
    rising = [row(load, 3, speedup, 0.01) for load, speedup in ((1, 0.8), (2, 1.5), (16, 1.6))]
    assert schedule(*rising) == [([1], 0), ([2, 16], 3)]
    assert schedule(row(1, 1, 0.8), row(16, 1, 0.8)) == "no K is significantly faster at any load"
    # The best K cannot tell, and another one can.
    unsure = [row(1, 5, 2.0, spread=1.5), row(1, 1, 1.5), row(16, 1, 1.4)]
    assert schedule(*unsure) == [([1, 16], 1)]
    # As the page of the runs at one load does, it takes one that ran quietly.
    busy = replace(row(1, 8, 3.0), drifted=True)
    assert schedule(busy, row(1, 4, 2.0), row(4, 4, 1.5)) == [([1, 4], 4)]
    # Neither does a run that was stopped end speculation at a load.
    stopped = replace(row(4, 4, 0.7), status="interrupted")
    assert schedule(row(1, 4, 2.0), stopped) == [([1, 4], 4)]
    unknown = [replace(row(load, 4, 2.0), num_draft_tokens=None) for load in (1, 4)]
    assert schedule(*unknown) == "the server's K is not known: type K="


def test_a_load_at_which_nothing_is_shown_keeps_the_k_of_the_next_smaller_one() -> None:
    """It is switched off only where that K is shown to lose."""
    open_at_16 = row(16, 4, 1.0)
    alone = replace(row(64, 4, 1.2), speedup=Interval(1.2))
    assert schedule(row(1, 4, 2.0), open_at_16, alone) == [([1, 16, 64], 4)]
    assert schedule(row(1, 4, 2.0), open_at_16, row(16, 8, 0.7)) == [([1, 16], 4)]
    all_lose = [row(1, 4, 2.0), row(16, 2, 0.6), row(16, 8, 0.7), row(64, 2, 1.0)]
    assert schedule(*all_lose) == [([1], 4), ([16, 64], 0)]
    assert schedule(row(1, 4, 1.0), row(16, 4, 2.0)) == "nothing is shown at the smallest load, 1"
    error = "the arms did not do the same work"
    refused = replace(row(16, 4, 1.0), speedup=None, status=NO_VERDICT, error=error)
    assert schedule(row(2, 4, 1.5), refused) == [([2, 16], 4)]


def test_words_name_only_measured_loads_and_vllm_gets_every_load() -> None:
    ranges = [LoadRange([1, 4], 3), LoadRange([6], 2), LoadRange([16], 0)]
    assert schedule_in_words(ranges) == "K=3 at 1, 4; K=2 at 6; none at 16"
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
    finding = finding_of(row, [typed, *(AcceptanceCauseRow(**cause) for cause in causes)])
    assert incoherent(finding.statements) == []
    return finding


def test_a_cause_is_named_by_a_measured_difference() -> None:
    for served, cause, is_named in [
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
    ]:
        finding = found([cause], served_tokens_per_iteration=served)
        assert bool([*finding.explaining, *finding.differing]) == is_named


@pytest.mark.parametrize(
    ("served", "words", "is_open"),
    [(4.18, "as the weights predict", True), (4.2, "cannot tell", False), (3.69, "less", False)],
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
    covers = Coverage(15, "prompt")
    intervals = {place: Interval(*share, covers) for place, share in shares.items()}
    places = [first | {"position": at, "relative": each} for at, each in intervals.items()]
    differing = found(places, served_tokens_per_iteration=4.0).differing
    said = [(statement.subject.position, statement.relation) for statement in differing]
    assert said == [(None, "open"), (2, "above")]
    assert differing[0].family == 3


def test_a_draft_is_held_against_its_card() -> None:
    for columns, words in [
        ({"card_tokens_per_iteration": 4.3}, "below its card"),
        ({"card_tokens_per_iteration": 4.0}, "as its card says"),
        (
            {"card_tokens_per_iteration": 4.0, "tokens_per_iteration": Interval(2.1)},
            "not compared with its card",
        ),
        ({"likelihood_z": -4.8}, "not the model's"),
        ({"likelihood_z": -4.7}, "the model's"),
        ({"impossible_share": 0.006}, "not the model's"),
    ]:
        finding = found([], served_tokens_per_iteration=4.0, **columns)
        said = [statement.words for statement in finding.statements if statement.kind != "engine"]
        assert words in said
