"""The cost of an iteration by a row's figures: tokens per iteration ÷ speed-up, in regular steps.

An iteration of K draft tokens yields 1 + K × rate tokens on average, if all K are drafted in every iteration and an
answer's first token, which comes from reading the prompt, is left out. If that makes decoding s times as fast, an
iteration takes (1 + K × rate) ÷ s times as long as a regular step. This is arithmetic on printed figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.commands.audit.figures import UNKNOWN, Figure, Row

# Noise of single runs, in which an iteration that costs a step may seem to cost less.
NOISE = 0.05
# How far the speed-ups of one row may be apart before no cost follows from them.
_APART = 1.25
# Rows in which a speed-up is what its acceptance gives, to the last digit, before it counts as computed.
_FEWEST_COMPUTED = 3
_EXACT = 0.02
_SPEEDUPS = (
    ("ms/token", "regular_ms_per_token", "ms_per_token"),
    ("tokens/s per user", "user_tokens_per_second", "regular_user_tokens_per_second"),
    ("as printed", "speedup", "itself"),
    ("tokens/s", "tokens_per_second", "regular_tokens_per_second"),
    ("latency", "regular_latency_s", "latency_s"),
)


class Explained(NamedTuple):
    """What a row says of an iteration.

    Attributes:
        tokens: per iteration.
        is_stated: whether they are printed, and not computed from the acceptance.
        speedup: over regular decoding.
        steps: the cost of an iteration, in regular steps.
    """

    row: Row
    tokens: Figure
    is_stated: bool
    speedup: Figure
    steps: Figure

    @property
    def rate(self) -> float:
        """Accepted ÷ drafted; NaN where it does not follow."""
        stated = self.row.figures.get("acceptance_rate")
        if stated and not self.row.is_tree:
            return stated.middle
        return (self.tokens.middle - 1) / self.row.k if self.row.proposes_k else math.nan

    @property
    def most_tokens(self) -> float:
        """Tokens per iteration if all draft tokens were accepted; NaN where that is not known."""
        return self.row.k + 1 if self.row.proposes_k or self.row.is_tree else math.nan

    @property
    def is_possible(self) -> bool:
        return self.steps.high >= 1 - NOISE

    @property
    def speedup_at_most(self) -> float:
        """The speed-up if all draft tokens were accepted; NaN where that is not known."""
        return self.at_rate(1) if self.is_possible else math.nan

    def at_rate(self, rate: float) -> float:
        """The speed-up if this share of draft tokens were accepted, at the same cost."""
        return (1 + (self.most_tokens - 1) * rate) / self.steps.middle


def explained(row: Row) -> Explained:
    """What a row says of an iteration, as far as it follows."""
    rate = row.figures.get("acceptance_rate")
    drafted = row.figures.get("mean_num_draft_tokens")
    if drafted is None and row.proposes_k:
        drafted = Figure(row.k, row.k)
    tokens = UNKNOWN
    if rate and rate.low <= 1 and drafted:
        tokens = Figure(1 + drafted.low * rate.low, 1 + drafted.high * min(rate.high, 1))
    stated = row.figures.get("tokens_per_iteration")
    if stated is not None:
        # Some lengths are of accepted draft tokens, without the target's own.
        agrees = stated.high >= 0.99 * (tokens.low - 1) and 1.01 * (tokens.high - 1) >= stated.low
        tokens = stated.plus(1 if stated.high < 1 or agrees else 0)
    # That of one user; of those that agree with it, the values that all leave possible.
    speedup, *others = speedups(row).values() or [UNKNOWN]
    for other in others:
        if speedup.overlaps(other):
            speedup = Figure(max(speedup.low, other.low), min(speedup.high, other.high))
    steps = UNKNOWN if is_apart(row) else tokens.over(speedup)
    return Explained(row, tokens, stated is not None, speedup, steps)


def speedups(row: Row) -> dict[str, Figure]:
    """Each speed-up that a row has, by what it is of: those of one user come first."""
    figures = {**row.figures, "itself": Figure(1, 1)}
    return {
        what: figures[above].over(figures[below])
        for what, above, below in _SPEEDUPS
        if above in figures and below in figures
    }


def is_apart(row: Row) -> bool:
    """Whether the gain of a user and that of the server are too far apart: then requests queue."""
    gains = [gain.middle for what, gain in speedups(row).items() if what != "latency"]
    return row.load != 1 and bool(gains) and max(gains) > _APART * min(gains)


def computed_speedups(tables: Sequence[Sequence[Row]]) -> set[str]:
    """Places of rows whose speed-up is what the acceptance gives, to the last digit, in all rows of their table."""
    places: set[str] = set()
    for rows in tables:
        with_both = {}
        for row in rows:
            speedup, tokens = row.figures.get("speedup"), explained(row).tokens
            if speedup and tokens.is_known:
                # Small ones, and few digits, may be alike by chance.
                widths = [figure.high - figure.low for figure in (speedup, tokens)]
                is_exact = max(widths) < _EXACT * (min(speedup.middle, tokens.middle) - 1)
                with_both[row.place] = is_exact and speedup.overlaps(tokens)
        if all(with_both.values()):
            places |= with_both.keys()
    return places if len(places) >= _FEWEST_COMPUTED else set()
