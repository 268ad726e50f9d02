"""Do drawn tokens follow the distribution that they should? Bets on them (`bets`), valid at any time.

The tokens after a text are sorted from the likeliest down, and each lies where the middle of its mass does: with masses
0.5, 0.3 and 0.2 at 0.25, 0.65 and 0.9. If each token is drawn from the exact distribution after the text before it, one
comes from the first half, or from any other part of [0, 1], as often as the masses of the tokens there say, in any text
and with any sampling setting.

Bettors share a capital of 1. Some bet on the part that a token is from: which of 2, 4, 8, 10 or 16, which tenth for its
sampling setting, which quarter after that of the token before. Some bet on the token itself where many texts go on
after the same one. Some bet that all tokens are drawn colder or hotter than they should be, which shows in the rarest,
and some that tokens come which cannot be drawn at all. Wrong temperatures, residuals, truncations and caches move
tokens in one of these ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from harness.results.statistics.arrays import Flags, Floats, Ints
from harness.results.statistics.bets import (
    LEARNERS,
    SHARES_OUTSIDE,
    bets_on_outcomes,
    bets_on_parts,
    bets_on_support,
    evidence,
    learner_on_parts,
    power_on_parts,
)
from harness.results.statistics.interval import DASH

Finding = Literal["lossless", "lossy", "undecided"]

# A power of 10: with more than this against it a distribution is not said to be followed, though it may be.
NOTABLE_EVIDENCE = 3.0
# With less than this chance of seeing the stated shift, finding nothing proves nothing.
REQUIRED_POWER = 0.99
# The exact distribution may be twice as far from the arm's as two ways of computing it are apart: the loop's forward
# passes have shapes that differ from both. In float32 this is nothing.
_ROUNDING_ALLOWANCE = 2.0
# Bets that a share of all tokens is drawn from other probabilities, these to a power and normalised: evenly at 0,
# hotter than they should be below 1, colder above. The shares, by exponent.
_TILTS = {0.0: (0.02, 0.3), 0.5: (0.1, 1.0), 0.85: (1.0,), 1.2: (1.0,), 2.5: (0.1, 1.0)}
_NUM_TILTS = sum(map(len, _TILTS.values()))
# Numbers of parts between which a shift is found, whatever its form; and as many parts as make up any of these.
SCALES = (2, 4, 8, 10, 16)
NUM_FINE = math.lcm(*SCALES)
# Scales; tenths by setting, quarters after quarters, and texts; tilts; the support.
NUM_BETTORS = len(SCALES) + 3 * len(LEARNERS) + _NUM_TILTS + len(SHARES_OUTSIDE)
# The least share of tokens outside the support that is tolerated.
_LEAST_OUTSIDE = 1e-4
# Never bet everything: zero capital cannot recover.
_LEAST_LEFT = -30.0
# The numbers of draws that `needed` tries are 3 % apart.
_NUMBERS = np.geomspace(10, 4_000_000, 437)


# How far two routes to the distributions of tokens are apart, which differ by rounding alone, on average: the masses of
# parts, by `SCALES`; what bettors on tilted distributions win; single tokens, in total variation.
NO_ROUNDING = np.zeros(sum(SCALES) + _NUM_TILTS + 1)


def rounding_between(exact: Floats, again: Floats) -> Floats:
    """Rounding, as in `NO_ROUNDING`, between distributions [n, V] by two routes."""
    moved = again - exact
    fine = masses_of_parts(moved, parts_of(exact)).mean(0)
    apart = [np.abs(coarser(fine, scale)) for scale in SCALES]
    for exponent, shares in _TILTS.items():
        won = np.exp(tilted(exact, exact, exponent))
        apart.append(np.array(shares) * abs((moved * won).sum(-1).mean()))
    return np.concatenate([*apart, [np.abs(moved).sum(-1).mean() / 2]])


@dataclass(frozen=True, eq=False)
class DrawnText:
    """A text of n tokens that was drawn.

    Attributes:
        prompt: the tokens before it.
        setting: the name of its sampling setting.
        is_at_place: whether it is one of many after the same prompt, which bettors tell from the others.
        widths: [n], the masses of the tokens; of equally likely ones together.
        is_impossible: [n], of tokens without mass, which rounding does not explain.
        parts: [n], that the tokens are from, of `NUM_FINE`.
        part_masses: [n, `NUM_FINE`], of all parts.
        ranks: [n], how many tokens are likelier.
        tilts: [n, t], the logarithms of what bettors on tilted distributions win with each token.
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
    tilts: Floats

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
    ) -> Self:
        """A text by the exact distributions [n, V] before its tokens.

        Args:
            explained: the places of tokens without mass that rounding explains.
        """
        rows = range(len(tokens))
        drawn = exact[rows, tokens][:, np.newaxis]
        parts = parts_of(exact)
        tilts = []
        for exponent, shares in _TILTS.items():
            won = np.expm1(tilted(drawn, exact, exponent)[:, 0])
            tilts += [np.log1p(share * won) for share in shares]
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
            tilts=np.stack(tilts, axis=-1),
        )


def tilted(masses: Floats, exact: Floats, exponent: float) -> Floats:
    """Logarithms [n, m] of what a bettor on the distributions [n, V] to this power, normalised, wins with tokens.

    Args:
        masses: [n, m], of these tokens by the distributions; a token without mass wins nothing.
    """
    # 0 to the power of 0 is 1, and no token's.
    powers = np.power(exact, exponent, out=np.zeros_like(exact), where=exact > 0)
    sums = powers.sum(-1, keepdims=True)
    logs = np.log(masses, out=np.zeros_like(masses), where=masses > 0)
    won = np.maximum((exponent - 1) * logs - np.log(sums), _LEAST_LEFT)
    return np.asarray(np.where(masses > 0, won, 0.0))


@dataclass(frozen=True, kw_only=True)
class TokenResult:
    """Whether drawn tokens follow the exact distribution.

    Attributes:
        num_draws: tokens.
        num_impossible: those of probability 0 that rounding does not explain.
        num_explained: those of probability 0 that it explains.
        evidence: the most that bets on them had won, as a power of 10; at least 0.
        num_draws_until: tokens until that was enough; None where it never was.
        p_value: the chance that so much is ever won by luck, at most; None without a token.
        power: the chance, at least, to see the stated shift between parts, any of `SCALES`.
        visible_shift: the smallest such shift that is seen with `REQUIRED_POWER`; None where none is.
        rounding: the largest one that rounding explains, by how far two routes to the same distributions are apart.
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
    """The tests of one run.

    Attributes:
        level: the chance that an honest arm is called lossy, at most.
        shift: the change of tokens' distribution that must be found, as total variation between parts, any of `SCALES`.
    """

    level: float
    shift: float

    @property
    def _log_wanted(self) -> float:
        """The logarithm of what bettors must win for an arm to be called lossy."""
        return -math.log(self.level)

    def check(self, texts: Sequence[DrawnText], roundings: Sequence[Floats]) -> TokenResult:
        """Test texts, in the order in which they were answered, each with its rounding."""
        if not texts:
            return self._result(np.zeros((1, 0)))
        lengths = [len(text.tokens) for text in texts]
        tolerated = _ROUNDING_ALLOWANCE * np.repeat(np.array(roundings), lengths, axis=0)
        *part_moves, tilt_moves, total = np.split(
            tolerated, np.cumsum([*SCALES, _NUM_TILTS]), axis=-1
        )
        total = total[:, 0]
        moves = dict(zip(SCALES, part_moves, strict=True))
        fine_masses = np.concatenate([text.part_masses for text in texts])
        masses = {scale: coarser(fine_masses, scale) for scale in SCALES}
        fine = np.concatenate([text.parts for text in texts])
        parts = {scale: fine * scale // NUM_FINE for scale in SCALES}
        widths = np.concatenate([text.widths for text in texts])
        tilts = np.concatenate([text.tilts for text in texts])
        ranks = [rank for text in texts for rank in text.ranks]
        contexts = []
        settings = []
        for text in texts:
            for index in range(len(text.tokens)):
                contexts.append((text.prompt, text.setting, text.tokens[:index]))
                settings.append((text.setting, text.is_at_place, index == 0))
        places = np.concatenate([np.arange(length) for length in lengths])
        is_first = places == 0
        # Each token is in one pair.
        is_second = places % 2 == 1
        quarters_before = np.where(is_second, np.roll(parts[4], 1), -1).tolist()
        in_pairs = bets_on_parts(parts[4], masses[4], quarters_before, LEARNERS, moves[4])
        # The first token of a text is the target's own.
        is_decided = ~is_first
        on_parts = []
        for scale in SCALES:
            learner = learner_on_parts(scale, self.shift)
            on_parts.append(
                bets_on_parts(parts[scale], masses[scale], is_first, [learner], moves[scale])
            )
        is_impossible = np.concatenate([text.is_impossible for text in texts])
        # At the one place a single tie at the edge of a truncation would count in every text.
        at_place = np.repeat([text.is_at_place for text in texts], lengths)
        on_support = bets_on_support(is_impossible, np.maximum(total, _LEAST_OUTSIDE))
        bettors = [
            np.where(is_decided, np.concatenate(on_parts), 0.0),
            bets_on_parts(parts[10], masses[10], settings, LEARNERS, moves[10]),
            np.where(is_second, in_pairs, 0.0),
            bets_on_outcomes(ranks, widths, contexts, LEARNERS, total),
            (tilts - np.log1p(tilt_moves)).T,
            np.where(at_place, 0.0, on_support),
        ]
        num_decided = int(is_decided.sum())
        off = float(moves[SCALES[-1]][is_decided].sum(-1).mean()) / 2 if num_decided else 0.0
        shifts = np.arange(1, 501) / 1000
        visible = shifts[self.power(num_decided, off, shifts) >= REQUIRED_POWER]
        return self._result(
            np.concatenate(bettors),
            float(self.power(num_decided, off)),
            off,
            float(visible[0]) if len(visible) else None,
            int(is_impossible.sum()),
            int((widths == 0).sum() - is_impossible.sum()),
        )

    def power(
        self, num_draws: Floats | int, rounding: float, shift: Floats | None = None
    ) -> Floats:
        """The chance, at least, to see a shift in so many tokens that speculation decides; without one, the test's own.

        That is by the bettor on the finest parts alone: those on coarser ones find shifts between theirs sooner.
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
        """The fewest tokens that speculation decides, nearly, which are enough; None where no number is."""
        enough = _NUMBERS[self.power(_NUMBERS, rounding) >= REQUIRED_POWER]
        return math.ceil(enough[0]) if len(enough) else None

    def _result(
        self,
        bettors: Floats,
        power: float = 0.0,
        rounding: float = 0.0,
        visible: float | None = None,
        num_impossible: int = 0,
        num_explained: int = 0,
    ) -> TokenResult:
        """The result of bettors [b, n]."""
        num_draws = bettors.shape[-1]
        won = np.maximum.accumulate(np.append(0.0, evidence(bettors)))
        num_until = int(np.searchsorted(won, self._log_wanted))
        is_found = num_until < len(won)
        won_in_all = float(won[-1]) / math.log(10)
        shows_nothing = power >= REQUIRED_POWER and won_in_all < NOTABLE_EVIDENCE
        verdict: Finding = "lossless" if shows_nothing else "undecided"
        return TokenResult(
            verdict="lossy" if is_found else verdict,
            num_draws=num_draws,
            num_impossible=num_impossible,
            num_explained=num_explained,
            evidence=won_in_all,
            num_draws_until=num_until if is_found else None,
            p_value=math.exp(-won[-1]) if num_draws else None,
            power=power,
            visible_shift=visible,
            rounding=rounding,
        )


def parts_of(exact: Floats) -> Ints:
    """The part of `NUM_FINE` in which each token [n, V] lies, by the middle of its mass among the likelier ones'.

    Equally likely tokens lie in the middle of all their mass. With [0.5, 0.3, 0.2] these are 0.25, 0.65 and 0.9.
    """
    order = np.argsort(-exact, axis=-1)
    mass = np.take_along_axis(exact, order, -1)
    end = mass.cumsum(-1)
    first = np.where(np.diff(mass, prepend=2.0) != 0, end - mass, 0)
    last = np.where(np.diff(mass, append=-1.0) != 0, end, np.inf)
    start = np.maximum.accumulate(first, -1)
    end = np.minimum.accumulate(last[:, ::-1], -1)[:, ::-1]
    middles = np.minimum(NUM_FINE * (start + end) / 2, NUM_FINE - 1)
    parts = np.empty(exact.shape, dtype=np.int64)
    np.put_along_axis(parts, order, middles.astype(np.int64), -1)
    return parts


def masses_of_parts(masses: Floats, parts: Ints) -> Floats:
    """The masses [n, `NUM_FINE`] in each part, of tokens [n, V]."""
    places = parts + NUM_FINE * np.arange(len(parts))[:, np.newaxis]
    sums = np.bincount(places.ravel(), masses.ravel(), minlength=NUM_FINE * len(parts))
    return np.asarray(sums.reshape(-1, NUM_FINE), dtype=np.float64)


def coarser(masses: Floats, scale: int) -> Floats:
    """Masses [..., `scale`] of so many parts, by those of the fine ones."""
    return np.asarray(masses.reshape(*masses.shape[:-1], scale, -1).sum(-1))


def odds_in_words(evidence: float) -> str:
    """`1 to 130,000`, of bets that won this power of 10."""
    two_digits = float(f"{10**evidence:.2g}")
    return f"1 to {two_digits:,.0f}"


def p_value_in_words(value: float | None) -> str:
    """`0.032`, or `< 1e-300`."""
    if value is None:
        return DASH
    return f"{value:.2g}" if value else "< 1e-300"
