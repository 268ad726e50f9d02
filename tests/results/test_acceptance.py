import math
from dataclasses import replace

import pytest

from harness.measuring.rows import LatencyRow
from harness.results.drafts import UNKNOWN, Drafts, positions

# Five iterations with K = 3 and one cut short to K = 1.
OUTCOMES = [(3, 3), (3, 0), (3, 1), (3, 1), (3, 2), (1, 1)]


def test_every_rate_from_its_definition() -> None:
    drafts = Drafts.of(OUTCOMES)
    assert (drafts.drafting, drafts.proposed, drafts.accepted, drafts.decoded) == (6, 16, 8, 14)
    assert drafts.columns() == {
        "acceptance_rate": 8 / 16,
        "conditional_acceptance_rate": 8 / (3 + 1 + 2 + 2 + 3 + 1),
        "mean_acceptance_length": pytest.approx(1 + 8 / 6),
        "mean_proposed": pytest.approx(16 / 6),
        "mean_num_draft_tokens": pytest.approx(16 / 6),
        "tokens_per_iteration": pytest.approx(1 + 8 / 6),
        "acceptance_by_position": [0.8333, 0.5, 0.5],
        "marginal_acceptance_by_position": [0.8333, 0.3333, 0.1667],
        "acceptance_histogram": [1, 3, 1, 1],
    }


def test_what_proposed_nothing_counts_where_time_is_concerned_alone() -> None:
    drafts = Drafts.of([(0, 0), (2, 1)])
    columns = drafts.columns()
    assert (drafts.drafting, drafts.iterations) == (1, 2)
    assert (columns["acceptance_histogram"], columns["mean_proposed"]) == ([0, 1, 0], 2)
    assert (columns["mean_num_draft_tokens"], columns["tokens_per_iteration"]) == (1, 1.5)


def test_nothing_measured_is_none_and_not_zero() -> None:
    assert {*Drafts().columns().values(), *Drafts().count_columns().values()} == {None}
    # An older file has the iterations, and so no drafts.
    idle = LatencyRow(num_decoded=3, num_iterations=3).drafts.columns()
    assert (idle["mean_num_draft_tokens"], idle["acceptance_rate"]) == (0, None)
    assert positions([5]) == [0]


def test_sums_are_counts_again() -> None:
    both = Drafts.of(OUTCOMES[:2]) + Drafts.of(OUTCOMES[2:])
    assert both == replace(Drafts.of(OUTCOMES), answers=2)


def test_a_sum_with_an_unknown_count_is_unknown() -> None:
    without_positions = replace(Drafts.of(OUTCOMES), tested_at=None, k=math.nan)
    columns = (without_positions + Drafts.of([(2, 1)])).columns()
    assert (columns["acceptance_rate"], columns["conditional_acceptance_rate"]) == (9 / 18, None)
    assert columns["acceptance_by_position"] is None
    assert set((UNKNOWN + Drafts.of(OUTCOMES)).columns().values()) == {None}


@pytest.mark.parametrize(
    ("means", "tested", "longest"),
    [
        ([4, 4], [2, 2, 0, 0], 4),
        ([2, 2], [2, 2], 2),
        ([4, 0], [1, 1, 0, 0], 4),
        ([8, 2], None, 5),
        ([4.5, 4.5], None, 5),
    ],
)
def test_positions_are_known_where_all_answers_drafted_alike(
    means: list[float], tested: list[int] | None, longest: int
) -> None:
    """Of drafts of 8 and 2 tokens the mean is 5 by chance. An answer that drafted nothing is like any other."""
    counts = {"answers": 1, "iterations": 1, "drafting": 1, "accepted": 1, "accepted_at": [1, 0, 0]}
    answers = [
        Drafts(**counts, proposed=mean, tested_at=None, k=mean) if mean else Drafts()
        for mean in means
    ]
    total = sum(answers, Drafts())
    assert (total.tested, total.longest) == (tested, longest)
    marginal = total.columns()["marginal_acceptance_by_position"]
    assert marginal == [1, 0, 0, 0][: len(tested or range(3))]
