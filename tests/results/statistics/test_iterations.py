"""The cut of a text into iterations, against every outcome of decoding over a vocabulary of three."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness.results.statistics.interval import Coverage, Interval
from harness.results.statistics.iterations import (
    Cut,
    acceptance_chances,
    cut,
    expected_acceptance,
    expected_tokens_per_iteration,
)
from harness.results.statistics.ratios import ExtraIterations, ratio_of_totals

VOCABULARY = range(3)
LENGTH = 5
MOST = 3
Text = tuple[int, ...]
Distribution = Sequence[float]


class Models:
    """A target, and a draft that depends on the text, and on where its iteration began."""

    def __init__(self, seed: int, sharpness: float = 1.0) -> None:
        self.seed = seed
        self.sharpness = sharpness

    @functools.cache  # noqa: B019, as few live as there are seeds
    def _drawn(self, *key: int) -> Distribution:
        weights = np.random.default_rng([self.seed, *key]).exponential(size=3) ** self.sharpness
        return [float(weight) for weight in weights / weights.sum()]

    def target(self, text: Text) -> Distribution:
        return self._drawn(0, *text)

    def draft(self, text: Text, begin: int) -> Distribution:
        return self._drawn(1, begin, *text)


def token_by_token(models: Models, text: Text, drafted: Text) -> dict[Text, float]:
    """The chance of each outcome (accepted tokens and the next one) of verifying a proposal."""
    outcomes: dict[Text, float] = defaultdict(float)
    reach = 1.0
    for place, token in enumerate(drafted):
        before = text + drafted[:place]
        target, draft = models.target(before), models.draft(before, len(text))
        accepted = min(1.0, target[token] / draft[token])
        residual = [max(0.0, target[x] - draft[x]) for x in VOCABULARY]
        for x in VOCABULARY:
            if sum(residual) > 0:
                chance = (1 - accepted) * residual[x] / sum(residual)
                outcomes[(*drafted[:place], x)] += reach * chance
        reach *= accepted
    for x in VOCABULARY:
        outcomes[(*drafted, x)] += reach * models.target(text + drafted)[x]
    return outcomes


def by_blocks(models: Models, text: Text, drafted: Text) -> dict[Text, float]:
    """The same for block verification, as algorithm 2 of Sun et al. 2024 has it."""
    scale = [1.0]
    residuals = []
    for place in range(len(drafted) + 1):
        before = text + drafted[:place]
        target, draft = models.target(before), models.draft(before, len(text))
        residuals.append([max(0.0, scale[place] * target[x] - draft[x]) for x in VOCABULARY])
        if place < len(drafted):
            token = drafted[place]
            scale.append(min(1.0, scale[place] * target[token] / draft[token]))
    passes = []
    for length in range(1, len(drafted) + 1):
        mass = sum(residuals[length])
        whole = length == len(drafted)
        passes.append(scale[length] if whole else mass / (mass + 1 - scale[length]))
    outcomes: dict[Text, float] = defaultdict(float)
    for pattern in itertools.product((False, True), repeat=len(drafted)):
        chance = math.prod(
            p if passed else 1 - p for p, passed in zip(passes, pattern, strict=True)
        )
        kept = max((place + 1 for place, passed in enumerate(pattern) if passed), default=0)
        following = residuals[kept]
        if kept == len(drafted):
            following = list(models.target(text + drafted))
        for x in VOCABULARY:
            if chance and sum(following):
                outcomes[(*drafted[:kept], x)] += chance * following[x] / sum(following)
    return outcomes


Verify = Callable[[Models, Text, Text], dict[Text, float]]


def every_outcome(
    models: Models, verify: Verify, number: int, text: Text = (0,)
) -> dict[Text, dict[int, float]]:
    """For each text of LENGTH tokens that may follow: the chance of each number of iterations."""
    left = LENGTH - len(text)
    if not left:
        return {text: {0: 1.0}}
    found: dict[Text, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for drafted in itertools.product(VOCABULARY, repeat=min(number, left - 1)):
        chance = 1.0
        for place, token in enumerate(drafted):
            chance *= models.draft(text + drafted[:place], len(text))[token]
        for decided, outcome_chance in verify(models, text, drafted).items():
            for whole, counts in every_outcome(models, verify, number, text + decided).items():
                for iterations, rest_chance in counts.items():
                    found[whole][iterations + 1] += chance * outcome_chance * rest_chance
    return found


def cut_of(models: Models, text: Text, block: bool = False) -> Cut:
    target = [1.0, *(models.target(text[:place])[text[place]] for place in range(1, LENGTH))]
    draft = np.full((LENGTH - 1, MOST), np.nan)
    for begin in range(1, LENGTH):
        for place in range(min(MOST, LENGTH - begin)):
            end = begin + place
            draft[begin - 1, place] = models.draft(text[:end], begin)[text[end]]
    return cut(acceptance_chances(target, draft, block=block))


@pytest.mark.parametrize("block", [False, True])
def test_every_text_is_cut_as_decoding_cuts_it(block: bool) -> None:
    models = Models(1, sharpness=2.0)
    for number in range(1, MOST + 1):
        outcomes = every_outcome(models, by_blocks if block else token_by_token, number)
        assert len(outcomes) == 3 ** (LENGTH - 1)
        for text, counts in outcomes.items():
            text_chance = sum(counts.values())
            # The rule is lossless, without which the derivation does not hold.
            own = math.prod(models.target(text[:end])[text[end]] for end in range(1, LENGTH))
            assert text_chance == pytest.approx(own)
            mean = sum(n * chance for n, chance in counts.items()) / text_chance
            square = sum(n * n * chance for n, chance in counts.items()) / text_chance
            found = cut_of(models, text, block)
            assert found.iterations[number - 1] == pytest.approx(mean)
            assert found.variance[number - 1] == pytest.approx(square - mean**2, abs=1e-9)


def test_places_are_counted() -> None:
    """Ten tokens: the draft is right, offers nothing after token 4, and is wrong about token 7."""
    chances = np.ones((9, 4))
    chances[4] = np.nan
    for begin in range(7):
        if begin + 4 >= 7:
            chances[begin, 6 - begin] = 0
    found = cut(chances)
    # K=4: tokens 1 to 5, then 6 and the correction 7, then the last two in one iteration.
    assert found.iterations.tolist() == [5, 4, 4, 3]
    assert found.proposed[3] == 4 + 3 + 1
    assert found.accepted_at[3].tolist() == [3, 1, 1, 1]
    assert found.tested_at[3].sum() == 4 + 2 + 1
    assert expected_acceptance([found, found], 4) == {
        "acceptance_rate": 6 / 8,
        "conditional_acceptance_rate": 6 / 7,
        "mean_acceptance_length": 1 + 6 / 3,
        "marginal_acceptance_by_position": [1, 0.3333, 0.3333, 0.3333],
    }
    assert expected_acceptance([cut([[np.nan]])], 1) == {}, "nothing was proposed"
    # K=1: 0 | 1 2 | 3 4 | 5 | 6 7 | 8 9: nothing is proposed after token 4.
    assert found.drafting[0] == 4
    assert not found.variance.any()


def test_what_the_target_cannot_draw_is_never_accepted() -> None:
    chances = acceptance_chances([1, 0.5, 0, 1], [[0.25, 1], [1, 0], [0, np.nan]])
    assert chances.tolist()[:2] == [[0.5, 0], [0, 0]]
    assert chances[2][0] == 0
    assert np.isnan(chances[2][1])


def test_intervals_are_over_prompts() -> None:
    """Copies of a text are no further evidence."""
    rates = np.random.default_rng(0).uniform(0.3, 0.9, size=12)
    cuts = [cut(np.full((20, 3), rate)) for rate in rates]
    found = expected_tokens_per_iteration(cuts, range(12))
    assert str(found[2].covers) == "12 prompts"
    assert found[0].low < found[0].estimate < found[0].high
    copied = expected_tokens_per_iteration(cuts * 4, [*range(12)] * 4)
    assert [figure.high for figure in copied] == pytest.approx([figure.high for figure in found])


@pytest.mark.parametrize("num_rejected", [0.1, 0.3, 1.0])
def test_the_lower_bound_allows_for_rejections_that_few_texts_have(num_rejected: float) -> None:
    """Of 15 texts in each of 500 samples, some without any rejection."""
    random = np.random.default_rng(0)
    tokens, fewest = np.full(15, 100.0), np.full(15, 50.0)

    def found(iterations: Any) -> Interval:
        extra = ExtraIterations(iterations, fewest)
        return ratio_of_totals([tokens], [iterations], extra_iterations=extra)

    samples = random.poisson(num_rejected, size=(500, 15))
    is_covered = [found(50.0 + rejected).low <= 100 / (50 + num_rejected) for rejected in samples]
    assert np.mean(is_covered) > 0.96
    whole = found(fewest)
    assert whole.low < whole.estimate == whole.high == 2
    assert (
        str(whole.covers)
        == "15 prompts (holds if it is typical that rejections added no iteration)"
    )
    # Garwood's bounds of no event and of one are 3.689 and 5.572.
    for num_seen, more in ((0, 3.689), (1, 5.572 - 1), (2, 2 * 5.572 - 2)):
        iterations = fewest + num_seen * np.eye(15)[0]
        unseen = found(iterations).covers.unseen
        assert unseen == pytest.approx(math.log1p(more / iterations.sum()), rel=1e-3)
    often = found(np.full(15, 53.0))
    assert often.low == pytest.approx(often.estimate)


def test_unlike_lengths_are_no_rare_rejections() -> None:
    """Each of 15 answers had rejections, in proportion to its length, which a few long ones dominate."""
    fewest = np.array([4, 8, 5, 32, 6, 10, 5, 7, 6, 60, 9, 5, 12, 7, 6], dtype=np.float64)
    covers = Coverage(15, "prompt")
    assert ExtraIterations(2 * fewest, fewest).noted_in(covers) == covers
    # Nine of 15 units of equal lengths had any, of which one had most; then three had any.
    shortest = np.full(15, 20.0)
    assert (
        ExtraIterations(20 + np.r_[np.ones(8), np.zeros(6), 20], shortest).noted_in(covers)
        == covers
    )
    most_of_few = ExtraIterations(20 + np.r_[np.zeros(8), np.ones(7)], shortest)
    assert most_of_few.noted_in(covers).num_rejecting == 7
    few = ExtraIterations(20 + np.r_[np.zeros(12), 2, 3, 1], shortest).noted_in(covers)
    assert str(few) == "15 prompts (holds if it is typical that rejections added iterations in 3)"


def test_the_ends_of_short_answers_are_no_rejections() -> None:
    """Eight texts of 24 tokens, of which K=1 accepts all: their last iteration has nothing to propose."""
    cuts = [cut(np.ones((23, 1)))] * 8
    (found,) = expected_tokens_per_iteration(cuts, range(8))
    assert found.estimate == pytest.approx(23 / 12)
    assert found.low < 0.97 * found.estimate
