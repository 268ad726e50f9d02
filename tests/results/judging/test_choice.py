"""What may be said of several K by their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from harness.results.judging.choice import Choice, choice_of
from harness.results.price.value import ratio
from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.multiplicity import widened
from harness.results.statistics.ratios import ratio_of_totals

COVERS = Coverage(15, "prompt")


def choice(speedups: dict[int, Interval]) -> Choice:
    return choice_of(speedups, lambda k, best: ratio(speedups[k], speedups[best]))


def known(estimates: dict[int, float], share: float) -> dict[int, Interval]:
    """Each known to this share."""
    return {
        k: Interval(value, value * (1 - share), value * (1 + share), COVERS)
        for k, value in estimates.items()
    }


@pytest.mark.parametrize(
    ("estimates", "share", "words", "alike"),
    [
        ({1: 0.79, 2: 0.85, 3: 0.9, 4: 0.95}, 0.15, "none of K=1 to 4 is shown to pay", [1, 2, 3, 4]),
        ({1: 0.5, 2: 0.6, 3: 0.7}, 0.02, "no K of 1 to 3 pays", [3]),
        ({1: 1.5, 2: 1.52, 3: 1.51}, 0.05, "K=1 to 3 cannot be told apart", [1, 2, 3]),
        ({1: 1.2, 2: 1.9, 4: 1.91, 8: 1.88}, 0.02, "K=2, 4 and 8 cannot be told apart", [2, 4, 8]),
        ({1: 1.5, 2: 2.0, 3: 1.6}, 0.02, "K=2 is shown to be the best of 1 to 3", [2]),
        ({1: 1.5, 2: 2.0}, 0.02, "K=2 is shown to be the best of 1 and 2", [2]),
        ({2: 1.5, 8: 2.0}, 0.02, "K=8 is shown to be the best of 2 and 8", [8]),
    ],
)  # fmt: skip
def test_what_is_said_of_several_k(
    estimates: dict[int, float], share: float, words: str, alike: list[int]
) -> None:
    judged = choice(known(estimates, share))
    assert (judged.words, judged.alike) == (words, alike)
    statements = [*judged.verdicts.values(), *judged.standings.values()]
    assert {statement.family for statement in statements} == {len(estimates)}


def test_without_bounds_nothing_is_known() -> None:
    unknown = choice({1: Interval(1.5), 2: Interval(2.0)})
    assert (unknown.is_judged, unknown.words, unknown.none_pays) == (False, "", False)
    assert unknown.paying == []


def test_the_best_is_none_that_is_not_shown_to_pay() -> None:
    wild = Interval(1.6, 0.98, 2.6, COVERS)
    speedups = {2: Interval(1.1, 1.05, 1.15, COVERS), 4: wild}
    judged = choice_of(speedups, lambda k, best: Interval(0.7, 0.65, 0.75, COVERS))
    assert (judged.best, judged.words) == (4, "shown to pay: K=2")


def test_intervals_hold_for_all_k_at_once() -> None:
    """1.04 (1.005 to 1.08) pays alone, and not as one of ten."""
    alone = {1: Interval(1.04, 1.005, 1.08, COVERS)}
    assert choice(alone).paying == [1]
    others = known(dict.fromkeys(range(2, 11), 0.9), 0.01)
    judged = choice({**alone, **others})
    assert judged.paying == []
    assert judged.verdicts[1].interval.low < 1.005


def test_a_choice_is_compared_in_all_pairs_of_which_any_may_be_with_the_best() -> None:
    speedups = known({1: 1.2, 2: 1.5, 3: 1.4, 4: 1.1}, 0.05)
    judged = choice(speedups)
    for k, verdict in judged.verdicts.items():
        assert verdict.interval == widened(speedups[k], 4)
    for k, standing in judged.standings.items():
        assert standing.interval == widened(ratio(speedups[k], speedups[2]), 6)


def test_of_ten_equal_k_none_is_called_the_best() -> None:
    """Over 300 pages, of 12 prompts each, and their yields by each prompt: at most 5 %."""
    rng = np.random.default_rng(106)
    winners = 0
    for _ in range(300):
        hardness = rng.lognormal(0, 0.3, 12)
        speedups = {}
        for k in range(1, 11):
            own = np.exp(rng.normal(0, 0.1, 12))
            speedups[k] = ratio_of_totals([1.4 * hardness * own], [hardness])
        winners += len(choice(speedups).alike) == 1
    assert winners / 300 <= 0.05
