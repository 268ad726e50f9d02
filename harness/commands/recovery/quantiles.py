"""Tests of drawn tokens by their quantiles in the target's distribution after the text before them.

The tokens after a context are sorted from the likeliest down. A token's quantile is the mass of the
tokens above it, plus a random part of its own mass. With masses 0.5, 0.3 and 0.2 the second token's
quantile is drawn from 0.5 to 0.8. If each token is drawn from the exact distribution after the text
before it, quantiles are independent and uniform in [0, 1), in any text and with any sampling
setting (Rosenblatt 1952; with the random part, Brockwell 2007). So the tokens of all requests are
one sample.

`Scores` takes the texts of requests, and gives these quantiles; of greedy texts it gives the places
where they leave the likeliest tokens. A `QuantileTest` is the test that quantiles are uniform.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from harness.commands.recovery.logprobs import ReturnedLogprobs
from harness.commands.recovery.lossless import (
    MIN_EXPECTED,
    ROUNDING_ALLOWANCE,
    SHARE_OF_LEVEL,
    GreedyTexts,
    SampledCheck,
)
from harness.commands.recovery.workload import PlannedRequest, Sampling
from harness.engines.checks.divergence import check_known, first_divergence
from harness.engines.protocol import TextReference, in_batches
from harness.engines.requests import RequestRecord
from harness.results.statistics.arrays import Floats
from harness.results.statistics.chi_square import chi_square_test

# More cells find narrow shifts better, and broad ones worse.
_MOST_CELLS = 20
_MOST_CELLS_A_SIDE = 5
# A quantile is below 1.
_LARGEST_QUANTILE = np.nextafter(1.0, 0.0)
# Texts of each sampling setting from which rounding is estimated.
_NUM_ROUNDED = 8
# Texts whose logits are computed together: of a large vocabulary, those of one text are many.
_MOST_TOGETHER = 8


def quantiles(
    probabilities: Floats, tokens: Sequence[int], generator: np.random.Generator
) -> Floats:
    """Return the quantile of each token [n] in its distribution [n, V]."""
    rows = np.arange(len(tokens))
    drawn = probabilities[rows, list(tokens)][:, np.newaxis]
    above = (probabilities * (probabilities > drawn)).sum(-1)
    tied = (probabilities * (probabilities == drawn)).sum(-1)
    random_part = generator.random(len(tokens)) * tied
    return np.minimum(above + random_part, _LARGEST_QUANTILE)


def cell_masses(exact: Floats, other: Floats, num_cells: int) -> Floats:
    """Return the shares of quantiles in equal cells, if tokens are drawn from `other`.

    Both distributions are [n, V]; quantiles are those in the exact one. With exact [[0.5, 0.3, 0.2]],
    other [[0.6, 0.2, 0.2]] and 2 cells the shares are [0.6, 0.4].
    """
    edges = np.linspace(0, 1, num_cells + 1)
    masses = np.zeros(num_cells)
    for exact_row, other_row in zip(exact, other, strict=True):
        # Equally likely tokens have their quantiles at random in all of their mass.
        _, groups = np.unique(-exact_row, return_inverse=True)
        exact_sums = np.concatenate([[0], np.bincount(groups, exact_row).cumsum()])
        other_sums = np.concatenate([[0], np.bincount(groups, other_row).cumsum()])
        masses += np.diff(np.interp(edges, exact_sums, other_sums))
    return masses / masses.sum()


def num_cells_for(num_quantiles: int) -> int:
    """Return the number of cells of a test: each expects enough for the χ² approximation."""
    return max(1, min(_MOST_CELLS, num_quantiles // MIN_EXPECTED))


class QuantileTest:
    """The tests of one run.

    Args:
        level_share: each test's share of the run's false-alarm rate; its significance level is
            `SHARE_OF_LEVEL` of that.
        shift: the change of the quantiles' distribution that must be found, as total variation.
    """

    def __init__(self, level_share: float, shift: float) -> None:
        self._level_share = level_share
        self._shift = shift

    def check(self, sample: Floats, rounded: Floats | None = None) -> SampledCheck:
        """Test that quantiles are uniform.

        Args:
            sample: the quantiles [n].
            rounded: `cell_masses` if logits are rounded in another way, as many as the test has
                cells (`num_cells_for`); None for no rounding.
        """
        num_cells = num_cells_for(len(sample))
        counts, _ = np.histogram(sample, num_cells, (0, 1))
        rounding_distance = 0.0 if rounded is None else _chi_square_distance(rounded)
        return self._check(counts, rounding_distance)

    def check_pairs(self, texts: Sequence[Floats]) -> SampledCheck:
        """Test that neighbours in a text are independent, given the quantiles of each text."""
        pairs = np.zeros((0, 2))
        if texts:
            pairs = np.concatenate([_neighbours(text) for text in texts])
        num_cells = len(pairs) // MIN_EXPECTED
        cells_a_side = max(1, min(_MOST_CELLS_A_SIDE, math.isqrt(num_cells)))
        first, second = pairs.T
        bounds = [(0, 1), (0, 1)]
        counts, _, _ = np.histogram2d(first, second, cells_a_side, bounds)
        return self._check(counts.ravel())

    def for_power(self, num_quantiles: int) -> SampledCheck:
        """Check a sample that is exactly uniform, to know the power of such a check."""
        num_cells = num_cells_for(num_quantiles)
        return self._check(np.full(num_cells, num_quantiles / num_cells))

    def _check(self, counts: ArrayLike, rounding_distance: float = 0.0) -> SampledCheck:
        """Test counts per cell, by a χ² statistic with `num_cells` - 1 degrees of freedom."""
        counts = np.asarray(counts)
        num_cells = len(counts)
        num_quantiles = round(counts.sum())
        statistic = 0.0
        visible = 0.0
        if num_cells > 1:
            uniform = np.full(num_cells, 1 / num_cells)
            statistic = chi_square_test(counts, uniform, MIN_EXPECTED).statistic
            # The shift that is hardest to find: every cell has the share 2 · shift too much or too
            # little. Shift 0.05 and 10 cells: five cells with 0.11, five with 0.09. That raises
            # Σ (observed − expected)² / expected by n (2 · shift)².
            visible = num_quantiles * (2 * self._shift) ** 2
        return SampledCheck(
            significance_level=SHARE_OF_LEVEL * self._level_share,
            num_draws=num_quantiles,
            statistic=statistic,
            degrees_of_freedom=num_cells - 1,
            rounding=ROUNDING_ALLOWANCE * num_quantiles * rounding_distance,
            visible=np.array([visible]),
        )


def _neighbours(text: Floats) -> Floats:
    """Return pairs [n // 2, 2] of neighbours from a text's quantiles [n], each in one pair."""
    num_pairs = len(text) // 2
    return text[: 2 * num_pairs].reshape(num_pairs, 2)


def _chi_square_distance(masses: Floats) -> float:
    """Return Σ (mass − uniform)² / uniform."""
    num_cells = len(masses)
    squares = (masses - 1 / num_cells) ** 2
    return float((squares * num_cells).sum())


class TokenGroup(NamedTuple):
    """Drawn tokens of a sampling setting that are tested together.

    Attributes:
        name: `first tokens` or `later tokens`.
        quantiles: of the tokens in the exact distribution.
        rounded_masses: shares of quantiles in the cells of the test, if tokens were drawn from
            logits that are rounded in another way; None if not known.
    """

    name: str
    quantiles: Floats
    rounded_masses: Floats | None


class Scores:
    """The scores of all texts that were added.

    Args:
        num_in_flight: as many texts are scored together, up to a limit.

    Attributes:
        greedy: each greedy text against the likeliest tokens.
        returned: the log-probabilities of requests that asked for them.
    """

    def __init__(
        self,
        reference: TextReference,
        end_tokens: frozenset[int],
        num_in_flight: int,
        seed: int,
    ) -> None:
        self.greedy = GreedyTexts(end_tokens)
        self.returned = ReturnedLogprobs()
        self._reference = reference
        self._batch_size = min(num_in_flight, _MOST_TOGETHER)
        self._generator = np.random.default_rng([seed, 1])
        # By name of the sampling setting: the quantiles of each text, and of some texts the
        # probabilities [n, V] by two routes that differ by rounding alone.
        self._quantiles: dict[str, list[Floats]] = defaultdict(list)
        self._two_routes: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)

    def add(self, answered: Sequence[tuple[PlannedRequest, RequestRecord]]) -> Iterator[None]:
        """Score texts; yields after each."""
        for planned, answer in answered:
            if planned.is_greedy and not answer.token_ids:
                self.greedy.add(None, planned.num_tokens, answer)
        # Texts of about the same length need little filling.
        with_tokens = [pair for pair in answered if pair[1].token_ids]
        by_length = sorted(with_tokens, key=lambda pair: len(pair[1].token_ids))
        for batch in in_batches(by_length, self._batch_size):
            for planned, answer in batch:
                check_known([*planned.prompt, *answer.token_ids], self._reference.vocabulary_size)
            prompts = [planned.prompt for planned, _ in batch]
            texts = [answer.token_ids for _, answer in batch]
            logits = self._reference.logits_along(prompts, texts)
            for row, (planned, answer) in enumerate(batch):
                own_logits = logits[row, : len(answer.token_ids)]
                if planned.is_greedy:
                    self._add_greedy(planned, answer, own_logits)
                else:
                    self._add_drawn(planned, answer, own_logits)
                yield

    def groups(self, sampling: Sampling) -> list[TokenGroup]:
        """The first tokens of a setting's texts, and the later ones."""
        return [
            self._group("first tokens", sampling, slice(0, 1)),
            self._group("later tokens", sampling, slice(1, None)),
        ]

    @property
    def quantiles_by_text(self) -> list[Floats]:
        """The quantiles of each drawn text, of all sampling settings."""
        return [of_text for texts in self._quantiles.values() for of_text in texts]

    def _group(self, name: str, sampling: Sampling, positions: slice) -> TokenGroup:
        values = _joined([of_text[positions] for of_text in self._quantiles[sampling.name]])
        rounded_masses = None
        routes = self._two_routes[sampling.name]
        exact = _joined([probabilities[positions] for probabilities, _ in routes])
        others = _joined([others[positions] for _, others in routes])
        if len(exact):
            rounded_masses = cell_masses(exact, others, num_cells_for(len(values)))
        return TokenGroup(name, values, rounded_masses)

    def _add_greedy(self, planned: PlannedRequest, answer: RequestRecord, logits: Tensor) -> None:
        likeliest = logits.argmax(-1).tolist()
        divergence = first_divergence(self._reference, planned.prompt, likeliest, answer.token_ids)
        self.greedy.add(divergence, planned.num_tokens, answer)

    def _add_drawn(self, planned: PlannedRequest, answer: RequestRecord, logits: Tensor) -> None:
        sampling = planned.sampling
        text = answer.token_ids
        exact = sampling.probabilities_along(logits, planned.prompt, text)
        self._quantiles[sampling.name].append(quantiles(exact, text, self._generator))
        routes = self._two_routes[sampling.name]
        if len(routes) < _NUM_ROUNDED:
            other_logits = self._reference.logits_again(planned.prompt, text)
            if other_logits is not None:
                others = sampling.probabilities_along(other_logits, planned.prompt, text)
                routes.append((exact, others))
        if sampling.asks_logprobs:
            values = logits.double().cpu().numpy()
            own = values[range(len(text)), text]
            # One of many equally likely tokens is one that the reference does not know.
            is_known = (values == own[:, np.newaxis]).sum(-1) == 1
            with np.errstate(divide="ignore"):
                raw = np.where(is_known, own - np.logaddexp.reduce(values, axis=-1), np.nan)
                processed = np.where(is_known, np.log(exact[range(len(text)), text]), np.nan)
            # An answer without any has no entries.
            returned = answer.logprobs or [None] * len(text)
            self.returned.add(returned[: len(text)], raw, processed)


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays) if arrays else np.zeros(0)
