"""What published figures say about the cost of an iteration: tokens per iteration ÷ speed-up, in regular steps.

An iteration of K draft tokens yields 1 + K × rate tokens on average, if all K are drafted in every iteration and an
answer's first token, which comes from reading the prompt, is left out. If that makes decoding s times as fast, an
iteration takes (1 + K × rate) ÷ s times as long as a regular step. This is arithmetic on printed figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.results.claims.stated import Printed, Stated

# Speeds of both arms, the more of them stand for one request the better.
_SPEEDS = (
    ("user_tokens_per_second", "regular_user_tokens_per_second"),
    ("regular_ms_per_token", "ms_per_token"),
    ("tokens_per_second", "regular_tokens_per_second"),
    ("regular_latency_s", "latency_s"),
)


class Span(NamedTuple):
    """All values that printed figures leave possible."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        if self.high - self.low < 0.04 * self.middle:
            return f"{self.middle:.2f}"
        return f"{self.low:.2f} to {self.high:.2f}"


class Explained(NamedTuple):
    """A row whose figures hold the cost of an iteration.

    Attributes:
        tokens: per iteration.
        speedup: over regular decoding.
        by: how the tokens per iteration were found: `stated`, `drafted`, or `K` where all K are assumed to be drafted.
        rate: accepted ÷ proposed; NaN where it does not follow.
    """

    row: Stated
    tokens: Span
    speedup: Span
    by: str
    rate: float

    @property
    def cost(self) -> Span:
        """Of an iteration, in regular steps."""
        return Span(self.tokens.low / self.speedup.high, self.tokens.high / self.speedup.low)

    def at_rate(self, rate: float) -> float:
        """The speed-up if this share of draft tokens were accepted, at the same cost."""
        return (1 + self.row.k * rate) / self.cost.middle

    def at_cost(self, steps: float) -> float:
        """The speed-up if an iteration took so many regular steps, at the same acceptance."""
        return self.tokens.middle / steps


def explained(row: Stated) -> Explained | None:
    """The cost of an iteration by a row; None where its figures leave it open."""
    speedup = speedup_of(row)
    tokens = tokens_of(row)
    if row.is_regular or speedup is None or tokens is None or row.differing_arms:
        return None
    span, by = tokens
    rate = row.numbers.get("acceptance_rate")
    share = (rate.low + rate.high) / 2 if rate else (span.middle - 1) / row.k if row.k else math.nan
    return Explained(row, span, speedup, by, share)


def speedup_of(row: Stated) -> Span | None:
    """The ratio of both arms' speeds where they are stated, and else the printed one."""
    for over, under in _SPEEDS:
        if over in row.numbers and under in row.numbers:
            above, below = row.numbers[over], row.numbers[under]
            ratio = Span(above.low / below.high, above.high / below.low)
            printed = row.numbers.get("speedup")
            # Of two that agree, the one with more digits.
            if printed and printed.high >= ratio.low and ratio.high >= printed.low:
                return Span(max(printed.low, ratio.low), min(printed.high, ratio.high))
            return ratio
    if "speedup" in row.numbers:
        return Span(row.numbers["speedup"].low, row.numbers["speedup"].high)
    return None


def tokens_of(row: Stated) -> tuple[Span, str] | None:
    """Tokens per iteration, and how they were found."""
    stated = row.numbers.get("tokens_per_iteration")
    rate = row.numbers.get("acceptance_rate")
    drafted = row.numbers.get("mean_num_draft_tokens")
    by_rate: tuple[Span, str] | None = None
    of_tested = row.numbers.get("conditional_acceptance_rate")
    share = Span(rate.low, min(rate.high, 1)) if rate and 0 <= rate.low <= 1 else None
    if share is not None and drafted is not None:
        by_rate = Span(1 + drafted.low * share.low, 1 + drafted.high * share.high), "drafted"
    elif row.k >= 1 and not row.has_varying_k:
        if share is not None:
            by_rate = Span(1 + row.k * share.low, 1 + row.k * share.high), "K"
        elif of_tested is not None and 0 <= of_tested.low <= 1:
            k, ends = int(row.k), (of_tested.low, min(of_tested.high, 1))
            by_rate = Span(*(sum_at("geometric", k, end) for end in ends)), "K"
    if stated is None:
        return by_rate
    # Some lengths are of accepted draft tokens, without the target's own.
    accepted = Span(by_rate[0].low - 1, by_rate[0].high - 1) if by_rate else Span(0, 0)
    agrees = stated.high >= 0.99 * accepted.low and 1.01 * accepted.high >= stated.low
    own = 1 if stated.high < 1 or agrees else 0
    return Span(
        stated.low + own, stated.high + own
    ), "stated, without the target's own token" if own else "stated"


def fitting_k(row: Stated) -> tuple[str, int] | None:
    """By which sum, and for which K, the stated tokens per iteration follow from the stated rate.

    `geometric` is 1 + p + p² + … + p^K, `proposed` 1 + K p.
    """
    tokens = row.numbers.get("tokens_per_iteration")
    rate = row.numbers.get("acceptance_rate")
    if tokens is None or rate is None or math.isnan(row.k) or row.has_varying_k:
        return None
    at_k = int(row.k)
    for k in sorted(range(max(1, at_k - 3), at_k + 4), key=lambda k: abs(k - at_k)):
        for name in ("geometric", "proposed"):
            low, high = (sum_at(name, k, share) for share in (rate.low, rate.high))
            if tokens.high >= low and high >= tokens.low:
                return name, k
    return None


def sum_at(name: str, k: int, rate: float) -> float:
    """Tokens per iteration by one of the sums of `fitting_k`."""
    if name == "proposed":
        return 1 + k * rate
    return k + 1 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)


def contradicting(rows: Sequence[Stated]) -> dict[str, str]:
    """Rows whose tokens per iteration are those of another K, where the others' follow from their own, by place."""
    fits = {row.place: fit for row in rows if (fit := fitting_k(row)) is not None}
    reasons = {}
    for row in rows:
        if row.place not in fits or fits[row.place][1] == row.k:
            continue
        name, k = fits[row.place]
        others = [other for other in rows if other.place != row.place and other.place in fits]
        if sum(fits[other.place] == (name, other.k) for other in others) < 2:
            continue
        rate: Printed = row.numbers["acceptance_rate"]
        meant = sum_at(name, int(row.k), (rate.low + rate.high) / 2)
        speedup = speedup_of(row)
        cost = f", and an iteration costs {meant / speedup.middle:.2f} steps" if speedup else ""
        reasons[row.place] = (
            f"is what K={k} gives at {rate.text} accepted, as the other rows' follow from their own K;"
            f" K={row.k:g} gives {meant:.2f}{cost}"
        )
    return reasons
