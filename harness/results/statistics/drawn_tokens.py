"""Tests whether drawn tokens follow the exact distribution, by bets (`bets`) that are valid at any time.

The tokens that can follow a text are sorted from the likeliest to the least likely, and each is placed at the middle of
its mass on [0, 1]: tokens with masses 0.5, 0.3 and 0.2 are at 0.25, 0.65 and 0.9. [0, 1] is divided into equal *parts*,
such as halves. If each token is drawn from the exact distribution after the text before it, then the drawn token is in
a part with a probability equal to the total mass of the tokens in that part. This holds for any text and any sampling
setting, so draws after different texts can be tested together.

Several bettors share a capital of 1, and bet on the following:

- the part that contains a token, of 2, 4, 8, 10 or 16 equal parts;
- the token itself, if many texts have the same tokens before it;
- that tokens appear which cannot be drawn at all (the support);
- the parts and the support of *recovered* tokens, which replace rejected draft tokens, if the draft's distributions are
  known. A recovered token follows the *residual*: the positive part of the target's distribution minus the draft's,
  normalised. These bettors look at recovered tokens alone, because the errors of a wrong residual cancel between texts
  if all tokens are tested together;
- the parts of *bonus* tokens, which follow a draft of which every token was accepted. They are few, so an error in them
  would hardly show among all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np

from harness.results.statistics import Flags, Floats, Ints
from harness.results.statistics.bets import (
    LEARNERS,
    SHARES_OUTSIDE,
    bets_on_outcomes,
    bets_on_parts,
    bets_on_support,
    learner_on_parts,
    log_capital,
    power_on_parts,
)
from harness.results.statistics.interval import DASH

Finding = Literal["lossless", "lossy", "undecided"]

# A power of 10. If the evidence against a distribution is at least this large, the result is never `lossless`.
NOTABLE_EVIDENCE = 3.0
# If the probability of detecting the stated shift is below this, the absence of evidence proves nothing: the result is
# `undecided`.
REQUIRED_POWER = 0.99
# The arm's distribution may differ from the exact one by this many times the distance between two ways of computing the
# exact distribution. The factor is above 1 because the loop's forward passes have other shapes than the passes of both
# ways. In float32 the distance is negligible.
_ROUNDING_ALLOWANCE = 2.0
# The numbers of equal parts between which a shift is sought (the *scales*). There are several, so that one of them
# detects the shift whatever its form. `NUM_FINE` finest parts can be summed to the parts of every scale.
SCALES = (2, 4, 8, 10, 16)
NUM_FINE = math.lcm(*SCALES)
# The bettors, in this order: on the parts of each scale; on tokens; on the support; on the finest scale of bonus
# tokens; on the finest scale of recovered tokens; on the support of recovered tokens.
NUM_BETTORS = len(SCALES) + len(LEARNERS) + len(SHARES_OUTSIDE) + 1 + 1 + len(SHARES_OUTSIDE)
# At least this share of tokens outside the support is always tolerated.
_LEAST_OUTSIDE = 1e-4
# Nothing is bet on a recovered token if the mass of its residual, before it is normalised, is below this: such a
# residual is mostly rounding.
_LEAST_RESIDUAL = 0.01
# The numbers of draws that `needed` tries; each is 3 % larger than the one before.
_TRIED_DRAWS = np.geomspace(10, 4_000_000, 437)


# The form of a rounding, here without any: an array [sum(SCALES) + 1] of mean differences between two ways of computing
# the same distributions. The first entries are the differences in the mass of each part, for one scale after the other;
# the last entry is the total variation between the tokens' distributions.
NO_ROUNDING = np.zeros(sum(SCALES) + 1)


def rounding_between(exact: Floats, again: Floats) -> Floats:
    """The rounding, in the form of `NO_ROUNDING`, between distributions [n, V] that were computed in two ways.

    Args:
        exact: the distributions computed in one way; they also determine the parts.
        again: the same distributions computed in the other way.
    """
    moved = again - exact
    fine = masses_of_parts(moved, parts_of(exact)).mean(0)
    apart = [np.abs(coarser(fine, scale)) for scale in SCALES]
    return np.concatenate([*apart, [np.abs(moved).sum(-1).mean() / 2]])


class Recovered(NamedTuple):
    """The tokens of a text that replaced rejected draft tokens, and the residuals from which they should be drawn.

    Only the m tokens whose residual has enough mass (`_LEAST_RESIDUAL`) are included.

    Attributes:
        places: [m], the places of the recovered tokens in the text.
        masses: [m], the masses of their residuals before these are normalised.
        is_impossible: [m], whether the token has mass in the target's distribution, but none in the residual.
        parts: [m], the part of each token in its residual, from 0 to `NUM_FINE` - 1.
        part_masses: [m, `NUM_FINE`], the mass of every part of each residual.
    """

    places: Ints
    masses: Floats
    is_impossible: Flags
    parts: Ints
    part_masses: Floats

    @classmethod
    def of(cls, exact: Floats, draft: Floats, tokens: Sequence[int], places: Sequence[int]) -> Self:
        """The recovered tokens of a text.

        Args:
            exact, draft: [n, V], the target's and the draft's distributions for each token of the text.
            tokens: [n], the text.
            places: the places of its recovered tokens.
        """
        at = np.array(places, dtype=np.int64)
        residuals = np.maximum(exact[at] - draft[at], 0.0)
        masses = residuals.sum(-1)
        is_clear = masses >= _LEAST_RESIDUAL
        at, masses = at[is_clear], masses[is_clear]
        residuals = residuals[is_clear] / masses[:, np.newaxis]
        parts = parts_of(residuals)
        rows, recovered = np.arange(len(at)), np.array(tokens)[at]
        is_impossible = (residuals[rows, recovered] == 0) & (exact[at, recovered] > 0)
        part_masses = masses_of_parts(residuals, parts)
        return cls(at, masses, is_impossible, parts[rows, recovered], part_masses)


@dataclass(frozen=True, eq=False)
class DrawnText:
    """A text of n drawn tokens.

    Attributes:
        prompt: the tokens before the text.
        setting: the name of its sampling setting.
        is_at_place: whether the text follows the one prefix after which `recovery` draws many texts. No bet on the
            support is made there, because a single tie would count in every text.
        tokens: [n], the ids of the tokens.
        widths: [n], the mass of each token and of all tokens that are equally likely.
        is_impossible: [n], whether the token has no mass, and rounding does not explain the token.
        parts: [n], the part that contains each token, from 0 to `NUM_FINE` - 1.
        part_masses: [n, `NUM_FINE`], the mass of every part of each distribution.
        ranks: [n], how many tokens are likelier than the drawn token.
        recovered: its recovered tokens; None if the draft's distributions are not known.
        bonus: places of its bonus tokens; empty if they are not known.
    """

    prompt: tuple[int, ...]
    setting: str
    is_at_place: bool
    tokens: tuple[int, ...]
    widths: Floats
    is_impossible: Flags
    parts: Ints
    part_masses: Floats
    ranks: Sequence[int]
    recovered: Recovered | None = None
    bonus: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        exact: Floats,
        tokens: Sequence[int],
        *,
        prompt: tuple[int, ...],
        setting: str,
        is_at_place: bool = False,
        explained: Sequence[int] = (),
        recovered: Recovered | None = None,
        bonus: Sequence[int] = (),
    ) -> Self:
        """Make a text, with its figures computed from the exact distributions [n, V] of its tokens.

        Args:
            explained: places of tokens without mass that rounding explains.
        """
        rows = range(len(tokens))
        drawn = exact[rows, tokens][:, np.newaxis]
        parts = parts_of(exact)
        widths = (exact * (exact == drawn)).sum(-1)
        is_impossible = widths == 0
        is_impossible[list(explained)] = False
        return cls(
            prompt=prompt,
            setting=setting,
            is_at_place=is_at_place,
            tokens=tuple(tokens),
            widths=widths,
            is_impossible=is_impossible,
            parts=parts[rows, tokens],
            part_masses=masses_of_parts(exact, parts),
            ranks=(exact > drawn).sum(-1).tolist(),
            recovered=recovered,
            bonus=bonus,
        )


@dataclass(frozen=True, kw_only=True)
class TokenResult:
    """The result of the test whether drawn tokens follow the exact distribution.

    Attributes:
        verdict: `lossy` if the winnings were enough; `lossless` if the power is enough and there is hardly any evidence
            against the distribution; otherwise `undecided`.
        num_draws: number of tokens.
        num_impossible: tokens with probability 0 that rounding does not explain.
        num_explained: tokens with probability 0 that rounding explains.
        evidence: the largest capital at any time, as a power of 10; at least 0.
        num_draws_until: number of tokens after which the capital was large enough to call the arm lossy; None if it
            never was.
        p_value: an upper bound of the probability that the capital ever gets this large by chance; None without tokens.
        power: a lower bound of the probability of detecting the stated shift between parts, on any of `SCALES`.
        visible_shift: the smallest shift, of those up to 0.5, that is detected with `REQUIRED_POWER`; None if none is.
        rounding: the shift that rounding is allowed to explain: twice the distance between two ways of computing the
            same distributions.
    """

    verdict: Finding
    num_draws: int
    num_impossible: int
    num_explained: int
    evidence: float
    num_draws_until: int | None
    p_value: float | None
    power: float
    visible_shift: float | None
    rounding: float


@dataclass(frozen=True)
class TokenTest:
    """The test of one run's drawn tokens.

    Attributes:
        level: an upper bound of the probability that a lossless arm is called lossy.
        shift: the shift that must be detected: the total variation between the masses of parts, on any of `SCALES`.
    """

    level: float
    shift: float

    @property
    def _log_wanted(self) -> float:
        """The logarithm of the capital at which an arm is called lossy."""
        return -math.log(self.level)

    def check(self, texts: Sequence[DrawnText], roundings: Sequence[Floats]) -> TokenResult:
        """Test texts in the order in which they were answered.

        Args:
            texts: all texts of the run.
            roundings: [num_texts], the rounding of each text, in the form of `NO_ROUNDING`.
        """
        if not texts:
            return self._result(np.zeros((1, 0)))
        lengths = [len(text.tokens) for text in texts]
        positions = np.concatenate([np.arange(length) for length in lengths])
        allowed = _ROUNDING_ALLOWANCE * np.repeat(np.array(roundings), lengths, axis=0)
        *allowed_by_scale, allowed_total = np.split(allowed, np.cumsum(SCALES), axis=-1)
        allowed_masses = dict(zip(SCALES, allowed_by_scale, strict=True))
        allowed_total = allowed_total[:, 0]
        fine_masses = np.concatenate([text.part_masses for text in texts])
        masses = {scale: coarser(fine_masses, scale) for scale in SCALES}
        fine_parts = np.concatenate([text.parts for text in texts])
        parts = {scale: fine_parts * scale // NUM_FINE for scale in SCALES}

        # The target draws the first token of a text without speculation, so the bettors on scales neither bet on it nor
        # learn from it.
        is_decided = positions != 0
        on_scales = []
        for scale in SCALES:
            learners = [learner_on_parts(scale, self.shift)]
            # With `is_decided` as the key, the bettors learn about decided tokens from decided tokens alone.
            bets = bets_on_parts(
                parts[scale], masses[scale], is_decided, learners, allowed_masses[scale]
            )
            on_scales.append(np.where(is_decided, bets, 0.0))

        starts = np.cumsum([0, *lengths[:-1]])
        bonus = [
            start + place for start, text in zip(starts, texts, strict=True) for place in text.bonus
        ]
        finest = SCALES[-1]
        on_bonus = np.zeros((1, len(positions)))
        on_bonus[:, bonus] = bets_on_parts(
            parts[finest][bonus],
            masses[finest][bonus],
            [None] * len(bonus),  # one key: the bettor learns from all bonus tokens
            [learner_on_parts(finest, self.shift)],
            allowed_masses[finest][bonus],
        )
        on_recovered = self._on_recovered(texts, starts, allowed_total)

        # The bettors on tokens learn separately for each prompt, setting and beginning of the text.
        contexts = [
            (text.prompt, text.setting, text.tokens[:index])
            for text in texts
            for index in range(len(text.tokens))
        ]
        widths = np.concatenate([text.widths for text in texts])
        # Equally likely tokens have the same rank, and count as one outcome with their common mass (`widths`).
        ranks = [rank for text in texts for rank in text.ranks]
        on_tokens = bets_on_outcomes(ranks, widths, contexts, LEARNERS, allowed_total)

        # After the one shared prefix, a single tie at the edge of a truncation would count in every text.
        at_place = np.repeat([text.is_at_place for text in texts], lengths)
        is_impossible = np.concatenate([text.is_impossible for text in texts])
        bets = bets_on_support(is_impossible, np.maximum(allowed_total, _LEAST_OUTSIDE))
        on_support = np.where(at_place, 0.0, bets)

        num_decided = int(is_decided.sum())
        by_scale = [allowed[is_decided].sum(-1) for allowed in allowed_by_scale]
        allowed_shift = float(np.mean(by_scale, axis=-1).max()) / 2 if num_decided else 0.0
        shifts = np.arange(1, 501) / 1000
        visible = shifts[self.power(num_decided, allowed_shift, shifts) >= REQUIRED_POWER]
        return self._result(
            np.concatenate([*on_scales, on_tokens, on_support, on_bonus, on_recovered]),
            power=float(self.power(num_decided, allowed_shift)),
            allowed_shift=allowed_shift,
            visible_shift=next(iter(visible.tolist()), None),
            num_impossible=int(is_impossible.sum()),
            num_explained=int((widths == 0).sum() - is_impossible.sum()),
        )

    def _on_recovered(
        self, texts: Sequence[DrawnText], starts: Ints, allowed_total: Floats
    ) -> Floats:
        """Bets on recovered tokens [1 + len(SHARES_OUTSIDE), n]: on their parts, and on the support of their residuals.
        Bets on other tokens are 0.

        Args:
            starts: [num_texts], the place of each text's first token among all tokens.
            allowed_total: [n], for each token of all texts, how much mass may belong to other tokens because of
                rounding.
        """
        bets = np.zeros((1 + len(SHARES_OUTSIDE), len(allowed_total)))
        known = [
            (start, text.recovered)
            for start, text in zip(starts, texts, strict=True)
            if text.recovered is not None and len(text.recovered.places)
        ]
        if not known:
            return bets
        at = np.concatenate([start + recovered.places for start, recovered in known])
        masses = np.concatenate([recovered.masses for _, recovered in known])
        # The factor 2 is for the draft's rounding, which is as large as the target's. It is divided by the mass because
        # most of a small residual is rounding.
        allowed = np.minimum(2 * allowed_total[at] / masses, 1.0)
        # A total variation of `allowed` moves a mass of at most twice as much. It is spread evenly over the parts.
        scale = SCALES[-1]
        bets[:1, at] = bets_on_parts(
            np.concatenate([recovered.parts for _, recovered in known]) * scale // NUM_FINE,
            coarser(np.concatenate([recovered.part_masses for _, recovered in known]), scale),
            [None] * len(at),
            [learner_on_parts(scale, self.shift)],
            np.repeat(2 * allowed[:, np.newaxis] / scale, scale, axis=1),
        )
        is_impossible = np.concatenate([recovered.is_impossible for _, recovered in known])
        bets[1:, at] = bets_on_support(is_impossible, np.maximum(allowed, _LEAST_OUTSIDE))
        return bets

    def power(
        self, num_draws: Floats | int, rounding: float, shift: Floats | None = None
    ) -> Floats:
        """A lower bound of the probability of detecting a shift in this many tokens that speculation decides.

        It is the power of the bettor on the finest parts alone: a bettor on fewer parts detects an equal shift between
        its parts sooner.

        Args:
            rounding: the shift that rounding is allowed to explain.
            shift: the shift to be detected; None for the shift of the test.
        """
        return power_on_parts(
            np.maximum(num_draws, 1),
            self.shift if shift is None else shift,
            self._log_wanted + math.log(NUM_BETTORS),
            SCALES[-1],
            learner_on_parts(SCALES[-1], self.shift).concentration,
            rounding,
        )

    def needed(self, rounding: float = 0.0) -> int | None:
        """About how many tokens that speculation decides are enough to detect the shift; None if four million are not
        enough.
        """
        enough = _TRIED_DRAWS[self.power(_TRIED_DRAWS, rounding) >= REQUIRED_POWER]
        return math.ceil(enough[0]) if len(enough) else None

    def _result(
        self,
        bettors: Floats,
        power: float = 0.0,
        allowed_shift: float = 0.0,
        visible_shift: float | None = None,
        num_impossible: int = 0,
        num_explained: int = 0,
    ) -> TokenResult:
        """Make the result, from the logarithms [b, n] of the factors of the bettors' capital."""
        num_draws = bettors.shape[-1]
        # [n + 1], before the first draw and after each draw: the largest logarithm of the capital so far.
        best_log_capital = np.maximum.accumulate(np.append(0.0, log_capital(bettors)))
        num_until = int(np.searchsorted(best_log_capital, self._log_wanted))
        is_found = num_until < len(best_log_capital)
        evidence = float(best_log_capital[-1]) / math.log(10)
        shows_nothing = power >= REQUIRED_POWER and evidence < NOTABLE_EVIDENCE
        verdict: Finding = "lossless" if shows_nothing else "undecided"
        return TokenResult(
            verdict="lossy" if is_found else verdict,
            num_draws=num_draws,
            num_impossible=num_impossible,
            num_explained=num_explained,
            evidence=evidence,
            num_draws_until=num_until if is_found else None,
            p_value=math.exp(-best_log_capital[-1]) if num_draws else None,
            power=power,
            visible_shift=visible_shift,
            rounding=allowed_shift,
        )


def parts_of(exact: Floats) -> Ints:
    """The part of [0, 1] that contains each token of distributions [n, V], as a number [n, V] from 0 to `NUM_FINE` - 1.

    A token is at the middle of its mass, after the masses of all likelier tokens. Tokens with masses [0.5, 0.3, 0.2]
    are at 0.25, 0.65 and 0.9. Equally likely tokens are all at the middle of their common mass: tokens with masses
    [0.5, 0.25, 0.25] are at 0.25, 0.75 and 0.75.
    """
    order = np.argsort(-exact, axis=-1)
    mass = np.take_along_axis(exact, order, -1)
    cumulative = mass.cumsum(-1)
    # The begin and the end of the common mass of equally likely tokens, for each of them. With masses [0.5, 0.25,
    # 0.25]: starts [0, 0.5, 0] become [0, 0.5, 0.5], and ends [0.5, inf, 1] become [0.5, 1, 1].
    starts = np.where(np.diff(mass, prepend=2.0) != 0, cumulative - mass, 0)
    ends = np.where(np.diff(mass, append=-1.0) != 0, cumulative, np.inf)
    start = np.maximum.accumulate(starts, -1)
    end = np.minimum.accumulate(ends[:, ::-1], -1)[:, ::-1]
    middles = np.minimum(NUM_FINE * (start + end) / 2, NUM_FINE - 1)
    parts = np.empty(exact.shape, dtype=np.int64)
    np.put_along_axis(parts, order, middles.astype(np.int64), -1)
    return parts


def masses_of_parts(masses: Floats, parts: Ints) -> Floats:
    """The mass [n, `NUM_FINE`] of every part.

    Args:
        masses: [n, V], the masses of tokens.
        parts: [n, V], the part of each token (`parts_of`).
    """
    # Each row gets its own range of numbers, so that all rows are summed at once.
    places = parts + NUM_FINE * np.arange(len(parts))[:, np.newaxis]
    sums = np.bincount(places.ravel(), masses.ravel(), minlength=NUM_FINE * len(parts))
    return np.asarray(sums.reshape(-1, NUM_FINE), dtype=np.float64)


def coarser(masses: Floats, scale: int) -> Floats:
    """Sum the masses of finest parts to the masses [..., `scale`] of coarser parts: with a scale of 2, [0.1, 0.2, 0.3,
    0.4] becomes [0.3, 0.7].
    """
    return np.asarray(masses.reshape(*masses.shape[:-1], scale, -1).sum(-1))


def odds_in_words(evidence: float) -> str:
    """The odds of bets that multiplied the capital by this power of 10, in words: `1 to 130,000`."""
    two_digits = float(f"{10**evidence:.2g}")
    return f"1 to {two_digits:,.0f}"


def p_value_in_words(value: float | None) -> str:
    """A p-value in words: `0.032`, or `< 1e-300` for 0; a dash for None."""
    if value is None:
        return DASH
    return f"{value:.2g}" if value else "< 1e-300"
