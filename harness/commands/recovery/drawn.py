"""Do drawn tokens follow the target's distribution? χ² tests of their quantiles in it.

The tokens after a text are sorted from the likeliest down. A token's quantile is the mass of the
tokens above it, plus a random part of its own mass. With masses 0.5, 0.3 and 0.2 the second token's
quantile is drawn from 0.5 to 0.8. If each token is drawn from the exact distribution after the text
before it, quantiles are independent and uniform in [0, 1), in any text and with any sampling
setting (Rosenblatt 1952; with the random part, Brockwell 2007). So any tokens are one sample.

Tokens that follow the same text have one distribution. Where there are enough of them, as at the
place where many requests go on (`choose_place`), they are tested by themselves, in cells that end
where a token's mass ends: this finds changes that cancel out over many texts, and has no cells for
what cannot be drawn. All others are tested together.

Without the exact distribution, tokens of two arms that follow the same text are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from harness.commands.recovery.greedy import Finding
from harness.commands.recovery.workload import PlannedRequest
from harness.results.statistics.arrays import Floats
from harness.results.statistics.chi_square import (
    chi_square_distance,
    chi_square_p_value,
    chi_square_tail_power,
    chi_square_test,
    least_visible_shift,
)

# Fewest draws that a cell of the χ² test is expected to get. Far out in the tail the χ²
# approximation rejects too often, and the more so the rarer the cells: with 100 the true
# false-alarm rate at a nominal 1e-11 is 3e-10 (exact binomial sums of two cells). So each test uses
# a hundredth of its share, and the stated rate is kept.
MIN_EXPECTED = 100
SHARE_OF_LEVEL = 0.01
# With less than this chance of seeing the stated shift, finding nothing proves nothing.
REQUIRED_POWER = 0.99
# The null may be twice as far from the exact distribution as two ways of computing it are apart:
# the loop's forward passes have shapes that differ from both. Distances are squared, so 4 = 2². In
# float32 this is nothing; in half precision it is most of the threshold.
ROUNDING_ALLOWANCE = 4.0
# Equal cells may be narrower by their rounding.
_LEAST_EXPECTED = MIN_EXPECTED - 1e-6
# More cells find narrow shifts better, and broad ones worse.
_MOST_CELLS = 10
_MOST_CELLS_A_SIDE = 5
# Texts from which the rounding of tokens that follow different texts is estimated.
_NUM_ROUNDED = 8
# The most draws that `draws_needed` tries.
_MOST_DRAWS = 4_000_000


@dataclass(frozen=True, eq=False)
class DrawnText:
    """A text of n tokens that was drawn.

    Attributes:
        request: that it answers.
        lowest: [n], where the mass of each token begins: the mass of the likelier ones.
        widths: [n], the masses of the tokens; of equally likely ones together.
        quantiles: [n], of the tokens.
        entropies: [n], of the distributions that the tokens were drawn from, in nats.
        rejected: places in the text, but the first one, where a proposal was rejected; None where
            that is not known.
    """

    request: PlannedRequest
    tokens: tuple[int, ...]
    lowest: Floats
    widths: Floats
    quantiles: Floats
    entropies: Floats
    rejected: Sequence[int] | None = None


class QuantileRanges(NamedTuple):
    """Where the quantiles of n tokens begin, and how wide their ranges are: [n] each."""

    lowest: Floats
    widths: Floats


def quantile_ranges(exact: Floats, tokens: Sequence[int]) -> QuantileRanges:
    """The ranges of the quantiles of tokens [n] in their distributions [n, V]."""
    own = exact[range(len(tokens)), tokens][:, np.newaxis]
    # Equally likely tokens have their quantiles at random in all of their mass.
    return QuantileRanges((exact * (exact > own)).sum(-1), (exact * (exact == own)).sum(-1))


class Routes(NamedTuple):
    """The distributions [n, V] along a text by two routes that differ by rounding alone."""

    exact: Floats
    again: Floats


# The routes along a text; None without a second one.
TwoRoutes = Callable[[DrawnText], Routes | None]


@dataclass(frozen=True, kw_only=True)
class TokenResult:
    """Whether drawn tokens follow the exact distribution: the result of one χ² test, or of several
    together.

    Attributes:
        significance_level: a p-value below it calls the arm lossy.
        num_draws: tokens.
        rounding: by how much rounding of the logits may raise the statistic on average.
        visible: by how much the stated shift of all tokens would raise it on average.
    """

    significance_level: float
    num_draws: int
    statistic: float
    degrees_of_freedom: int
    rounding: float
    visible: float

    @property
    def p_value(self) -> float:
        return chi_square_p_value(self.statistic, self.degrees_of_freedom, self.rounding)

    @property
    def power(self) -> float:
        """Chance that the test sees the shift."""
        return chi_square_tail_power(
            self.degrees_of_freedom,
            noncentrality=self.visible,
            alpha=self.significance_level,
            tolerated=self.rounding,
        )

    @property
    def verdict(self) -> Finding:
        if self.p_value < self.significance_level:
            return "lossy"
        return "lossless" if self.power >= REQUIRED_POWER else "undecided"


def together(results: Sequence[TokenResult]) -> TokenResult:
    """Independent tests as one: a small loss everywhere shows in the sum before it shows in any
    part.
    """
    return dataclasses.replace(
        results[0],
        num_draws=sum(result.num_draws for result in results),
        statistic=sum(result.statistic for result in results),
        degrees_of_freedom=sum(result.degrees_of_freedom for result in results),
        rounding=sum(result.rounding for result in results),
        visible=sum(result.visible for result in results),
    )


def draws_needed(power: Callable[[int], float], least: int) -> int | None:
    """The fewest draws, `least` or more, that are enough for a verdict; None where no number is.

    Args:
        power: of the tests of a number of draws.
    """
    number = least
    while number <= _MOST_DRAWS:
        if power(number) >= REQUIRED_POWER:
            return number
        number = round(1.1 * number)
    return None


@dataclass(frozen=True)
class TokenTest:
    """The tests of one run.

    Attributes:
        level_share: each test's share of the run's false-alarm rate; its significance level is
            `SHARE_OF_LEVEL` of that.
        shift: the change of a token's distribution that must be found, as total variation.
    """

    level_share: float
    shift: float

    def check(
        self,
        texts: Sequence[DrawnText],
        places: slice = slice(None),
        two_routes: TwoRoutes = lambda text: None,
    ) -> TokenResult:
        """Test the tokens at some places of texts."""
        followers: dict[Any, list[tuple[DrawnText, int]]] = defaultdict(list)
        for text in texts:
            for place in range(len(text.tokens))[places]:
                asked = text.request
                text_before = asked.prompt, asked.sampling.name, text.tokens[:place]
                followers[text_before].append((text, place))
        common = [members for members in followers.values() if len(members) >= 2 * MIN_EXPECTED]
        # Which texts are computed twice must not depend on rounding: processes that share a split
        # model compute them together.
        rounded = [(members[0][0], slice(members[0][1], members[0][1] + 1)) for members in common]
        routes = [(two_routes(text), at) for text, at in rounded]
        others = [(two_routes(text), places) for text in texts[:_NUM_ROUNDED]]

        parts = []
        for members, route in zip(common, routes, strict=True):
            begins = np.unique([text.lowest[place] for text, place in members])
            ends = np.append(begins[begins > 0], 1.0)
            wanted = _equal_cells(len(members))[1:]
            nearest = np.abs(ends - wanted[:, np.newaxis]).argmin(-1)
            edges = np.unique([0.0, *ends[nearest], 1.0])
            part = self._check_cells(members, edges, [route])
            if part.degrees_of_freedom:
                parts.append(part)
                members.clear()
        rest = list(itertools.chain(*followers.values()))
        parts.append(self._check_cells(rest, _equal_cells(len(rest)), others))
        return together(parts)

    def check_pairs(self, texts: Sequence[DrawnText]) -> TokenResult:
        """Test that neighbours in a text are independent; each token is in one pair."""
        pairs = np.zeros((0, 2))
        if texts:
            pairs = np.concatenate(
                [text.quantiles[: len(text.tokens) // 2 * 2].reshape(-1, 2) for text in texts]
            )
        cells_a_side = int(np.sqrt(len(pairs) // MIN_EXPECTED).clip(1, _MOST_CELLS_A_SIDE))
        bounds = [(0, 1), (0, 1)]
        counts, _, _ = np.histogram2d(pairs[:, 0], pairs[:, 1], cells_a_side, bounds)
        return self._test([counts.ravel()], np.full(counts.size, 1 / counts.size))

    def compare(
        self, sample: Sequence[Sequence[int]], other: Sequence[Sequence[int]], num_tokens: int
    ) -> TokenResult:
        """Compare the first tokens of as many continuations of one prompt by two arms.

        It takes twice the draws of `check` to see the same shift, and half of them are the regular
        arm's.

        Two samples of n draws each deviate by half of their difference d from the distribution p of
        both together: n Σ (d/2)²/p each, n/2 Σ d²/p together. So distances count for n / 2. This
        distribution was estimated, so both statistics together have the degrees of freedom of one.
        """
        of_places = []
        for place in range(num_tokens):
            followers: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
            for number, texts in enumerate((sample, other)):
                for text in texts:
                    before = tuple(text[:place])
                    followers.setdefault(before, ([], []))[number].extend(text[place : place + 1])
            parts = [self._test([np.zeros(1)], np.ones(1))]
            for pair in followers.values():
                num_each = min(map(len, pair))
                counts = [Counter(tokens[:num_each]) for tokens in pair]
                tokens = sorted(counts[0] | counts[1])
                if num_each >= 2 * MIN_EXPECTED:
                    both = np.array([[one[token] for token in tokens] for one in counts])
                    parts.append(self._test(list(both), both.sum(0) / both.sum()))
            of_places.append(together(parts))
        # The first token is the target's own: a mistake in speculation shifts later ones.
        visible = together(of_places[1:]).visible
        return dataclasses.replace(together(of_places), visible=visible)

    def expected(self, num_tokens: int) -> TokenResult:
        """Check tokens that are exactly uniform, to know the power of such a check."""
        num_cells = len(_equal_cells(num_tokens)) - 1
        return self._test(
            [np.full(num_cells, num_tokens / num_cells)], np.full(num_cells, 1 / num_cells)
        )

    def _check_cells(
        self,
        tokens: Sequence[tuple[DrawnText, int]],
        edges: Floats,
        routes: Iterable[tuple[Routes | None, slice]],
    ) -> TokenResult:
        """Test tokens, places of texts, by the number of quantiles between the edges of cells.

        Args:
            routes: distributions along some of the texts by two routes, and the places in them.
        """
        counts, _ = np.histogram([text.quantiles[place] for text, place in tokens], edges)
        moved = np.zeros(len(counts))
        for distributions, places in routes:
            if distributions is not None:
                exact = distributions.exact[places]
                moved += cell_masses(exact, distributions.again[places], edges)
        return self._test([counts], np.diff(edges), moved)

    def _test(
        self, samples: Sequence[ArrayLike], masses: Floats, moved: Floats | None = None
    ) -> TokenResult:
        """Test counts per cell: of one sample against the cells' masses, or of two against those of both together.

        Args:
            moved: the masses if logits are rounded in another way, up to a factor; zeros or None if
                that is not known.
        """
        num_draws = round(float(np.sum(samples[-1])))
        statistic = visible = rounding = 0.0
        degrees_of_freedom = 0
        if num_draws:
            results = [chi_square_test(counts, masses, _LEAST_EXPECTED) for counts in samples]
            statistic = sum(result.statistic for result in results)
            degrees_of_freedom = results[0].degrees_of_freedom
            shifted = least_visible_shift(masses, self.shift)
            distance = chi_square_distance(masses, shifted, num_draws, _LEAST_EXPECTED)
            visible = num_draws / len(samples) * distance
        if num_draws and moved is not None and moved.any():
            distance = chi_square_distance(masses, moved / moved.sum(), num_draws, _LEAST_EXPECTED)
            rounding = ROUNDING_ALLOWANCE * num_draws * distance
        return TokenResult(
            significance_level=SHARE_OF_LEVEL * self.level_share,
            num_draws=num_draws,
            statistic=statistic,
            degrees_of_freedom=degrees_of_freedom,
            rounding=rounding,
            visible=visible,
        )


def cell_masses(exact: Floats, other: Floats, edges: Floats) -> Floats:
    """The mass of quantiles in each cell, if tokens are drawn from `other`, summed over rows.

    Both distributions are [n, V]; quantiles are those in the exact one. With exact [[0.5, 0.3, 0.2]],
    other [[0.6, 0.2, 0.2]] and edges [0, 0.5, 1] the masses are [0.6, 0.4].
    """
    masses = np.zeros(len(edges) - 1)
    for exact_row, other_row in zip(exact, other, strict=True):
        # Equally likely tokens have their quantiles at random in all of their mass.
        _, groups = np.unique(-exact_row, return_inverse=True)
        exact_sums = np.concatenate([[0], np.bincount(groups, exact_row).cumsum()])
        other_sums = np.concatenate([[0], np.bincount(groups, other_row).cumsum()])
        masses += np.diff(np.interp(edges, exact_sums, other_sums))
    return masses


def _equal_cells(num_quantiles: int) -> Floats:
    """Edges of equal cells: each expects enough for the χ² approximation."""
    num_cells = max(1, min(_MOST_CELLS, num_quantiles // MIN_EXPECTED))
    return np.linspace(0, 1, num_cells + 1)
