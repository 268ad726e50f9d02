"""Acceptance of a run as other tools read it: `speculation_profile.json`.

It has the schema 1.0 of NVIDIA's Model-Optimizer (pull requests 2247, 2313 and 2315), which
Dynamo's mocker and vLLM's synthetic acceptance read; under `harness` it has what that schema lacks, the
intervals among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.config.synthetic import TESTED_SHARES
from harness.results.acceptance import Acceptance, mean_length_per_request
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ratio_of_totals

PROFILE_FILE = "speculation_profile.json"

_SCHEMA_VERSION = "1.0"
_DECIMALS = 6
# Positions with an interval; a longer proposal has rates alone.
_MOST_INTERVALS = 32
# There is a bootstrap for every position.
_MOST_RESAMPLES = 2000


@dataclass(frozen=True)
class MeasuredAcceptance:
    """The acceptance of a run, by prompt.

    Attributes:
        requests: of each prompt.
        categories: of the same prompts; None where a prompt has none.
        num_resamples, seed: of the bootstrap over prompts.
        num_levels: of the trees that were proposed, whose levels are the positions; None for chains.
        extrapolates: whether a smaller K would accept the beginnings of what was accepted, so that
            its lengths follow.
    """

    requests: Sequence[Acceptance]
    categories: Sequence[str | None]
    num_resamples: int
    seed: int
    num_levels: int | None = None
    extrapolates: bool = True

    @property
    def drafted(self) -> list[Acceptance]:
        """The requests in which an iteration proposed anything."""
        return [request for request in self.requests if request.num_iterations]

    @property
    def total(self) -> Acceptance:
        return sum(self.requests, Acceptance())

    @property
    def num_places(self) -> int:
        """Draft positions. Of a tree its levels, of which it has fewer than tokens."""
        places = self.total.num_places
        return places if self.num_levels is None else min(places, self.num_levels)

    def rate_of_tested(self, place: int) -> Interval:
        """Accepted over tested at a draft position, from 0."""
        tested = [request for request in self.drafted if request.num_tested_at(place)]
        return self._ratio(
            [request.num_accepted_at(place) for request in tested],
            [request.num_tested_at(place) for request in tested],
        )

    def marginal(self, place: int) -> Interval:
        """Accepted at a draft position, from 0, over iterations."""
        accepted = [request.num_accepted_at(place) for request in self.drafted]
        return self._ratio(accepted, self._num_iterations())

    def length_with(self, num_draft_tokens: int) -> Interval:
        """Return the mean acceptance length if iterations had proposed `num_draft_tokens` at most."""
        tokens = [request.num_tokens_with(num_draft_tokens) for request in self.drafted]
        return self._ratio(tokens, self._num_iterations())

    def by_category(self) -> dict[str, Acceptance]:
        """The acceptance of each category, of those that are known."""
        found: dict[str, Acceptance] = {}
        for category, request in zip(self.categories, self.requests, strict=True):
            if category is not None:
                found[category] = found.get(category, Acceptance()) + request
        return found

    def _num_iterations(self) -> list[int]:
        return [request.num_iterations for request in self.drafted]

    def _ratio(self, tops: Sequence[int], bottoms: Sequence[int]) -> Interval:
        num_resamples = min(self.num_resamples, _MOST_RESAMPLES)
        return ratio_of_totals(tops, bottoms, num_resamples, self.seed)


def length_columns(measured: MeasuredAcceptance) -> dict[str, Any]:
    """The mean acceptance length for each smaller K; none where these do not follow."""
    num_places = min(measured.num_places, _MOST_INTERVALS) if measured.extrapolates else 0
    lengths = [measured.length_with(number) for number in range(1, num_places + 1)]
    if not lengths or not all(length.is_known for length in lengths):
        # With a gap, later entries would be those of another K: rather no list.
        return {}
    rounded = [
        Interval(round(length.estimate, 4), round(length.low, 4), round(length.high, 4))
        for length in lengths
    ]
    return {"acceptance_length_by_num_draft_tokens": rounded}


def speculation_profile(
    measured: MeasuredAcceptance,
    *,
    method: str,
    is_block: bool,
    about: Mapping[str, Any],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """The profile of a run in which something was drafted.

    Args:
        method: how it was drafted.
        is_block: whether whole blocks were verified, so that no rate by position describes it.
        about: further entries of the schema: models, conditions.
        own: further entries under `harness`.
    """
    total = measured.total
    marginal = [rate or 0.0 for rate in total.marginal_rates[: measured.num_places]]
    # In this schema a ratio of marginal rates. Ours, of the tokens tested, are under `harness`.
    conditional = _conditional_by_schema(marginal)
    rates_of_tested = [rate or 0.0 for rate in total.conditional_rates[: measured.num_places]]
    profile: dict[str, Any] = {
        "schema_version": _SCHEMA_VERSION,
        "measured": True,
        "method": method,
        "num_speculative_tokens": measured.num_places,
        "conditional_accept_rates": None if is_block else _rounded(conditional),
        "marginal_accept_rates": None if is_block else _rounded(marginal),
        "mean_accept_length": round(total.mean_acceptance_length or 0.0, _DECIMALS),
        "mean_accept_length_per_request": _per_request(measured),
        "acceptance_length_histogram": _histogram(total),
        # Whether the lengths of smaller K follow from these rates, or are to be measured.
        "accept_length_model": "chain_analytic" if measured.extrapolates else "measured_per_k",
        "verification_method": "block" if is_block else "longest_prefix",
        "per_category": _by_category(measured),
        **about,
        "validation": _validation(total, marginal),
    }
    if is_block:
        # The entry `validation` needs no vectors: accepted counts add up for blocks, too.
        reason = "block verification does not keep the longest-prefix of accepted tokens"
        profile["vectors_unavailable_reason"] = reason
    intervals = {} if is_block else _intervals(measured)
    rates = {}
    if not is_block:
        rates["accept_rates_of_tested"] = _rounded(rates_of_tested)
        num_tested = [total.num_tested_at(place) for place in range(measured.num_places)]
        rates[TESTED_SHARES] = _rounded([number / total.num_iterations for number in num_tested])
    return profile | {"harness": {**own, **rates, "intervals_95": intervals}}


def _conditional_by_schema(marginal: Sequence[float]) -> list[float]:
    """Conditional rates as the schema has them: the marginal rate of a position over that of the one before.

    A proposal that ends early counts as a rejection here, but not in `accept_rates_of_tested`. Where one iteration
    accepted 3 of 4 tokens, and one both of 2, the third position has 1/2 here and 1 there.
    """
    before = [1.0, *marginal[:-1]]
    return [
        rate / earlier if earlier else 0.0 for rate, earlier in zip(marginal, before, strict=True)
    ]


def _per_request(measured: MeasuredAcceptance) -> float | None:
    length = mean_length_per_request(measured.requests)
    return None if length is None else round(length, _DECIMALS)


def _histogram(total: Acceptance) -> dict[str, int]:
    """Iterations by their tokens, the target's own counted: from 1 on."""
    return {str(1 + accepted): times for accepted, times in enumerate(total.histogram) if times}


def _by_category(measured: MeasuredAcceptance) -> dict[str, dict[str, Any]] | None:
    found = {
        category: {
            "mean_accept_length": round(acceptance.mean_acceptance_length or 0.0, _DECIMALS),
            "num_steps": acceptance.num_iterations,
        }
        for category, acceptance in measured.by_category().items()
        if acceptance.num_iterations
    }
    return found or None


def _validation(total: Acceptance, marginal: Sequence[float]) -> dict[str, Any]:
    reported = total.mean_acceptance_length or 0.0
    implied = 1 + sum(marginal)
    falls = all(later <= earlier for earlier, later in pairwise(marginal))
    return {
        "mean_consistency": {
            "passed": abs(implied - reported) < 1e-6,
            "implied_mean_accept_length": round(implied, _DECIMALS),
            "reported_mean_accept_length": round(reported, _DECIMALS),
        },
        "marginal_monotonicity": {"passed": falls},
    }


def _intervals(measured: MeasuredAcceptance) -> dict[str, Any]:
    """95 % intervals over prompts; None where there are too few."""
    most = measured.num_places
    places = range(min(most, _MOST_INTERVALS))
    return {
        "covers": measured.length_with(most).covers,
        "mean_accept_length": _bounds(measured.length_with(most)),
        "accept_rates_of_tested": [_bounds(measured.rate_of_tested(place)) for place in places],
        "marginal_accept_rates": [_bounds(measured.marginal(place)) for place in places],
    }


def _bounds(interval: Interval) -> list[float] | None:
    return _rounded([interval.low, interval.high]) if interval.has_bounds else None


def _rounded(rates: Sequence[float]) -> list[float]:
    return [round(rate, _DECIMALS) for rate in rates]
