"""What the figures of a row imply about an iteration: it costs tokens per iteration ÷ speed-up, in regular steps.

An iteration of K draft tokens yields 1 + K × rate tokens on average, if all K are drafted in every iteration and an
answer's first token, which comes from reading the prompt, is left out. If that makes decoding s times as fast, an
iteration takes (1 + K × rate) ÷ s times as long as a regular step. This is arithmetic on printed figures.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from harness.results.printed.figures import UNKNOWN, PrintedFigure
from harness.results.printed.headings import is_regular_arm
from harness.results.printed.reader import PrintedRow

# Noise of single runs, in which an iteration that costs a step may seem to cost less.
NOISE = 0.05
# Drafts without a fixed K: nothing follows from a rate of theirs.
_VARYING = re.compile(r"lookup|n-?gram|pld|suffix|\bauto\b|tree", re.IGNORECASE)
PRINTED = "as printed"
_SPEEDUPS = (
    ("ms/token", "regular_ms_per_token", "ms_per_token"),
    ("tokens/s per user", "user_tokens_per_second", "regular_user_tokens_per_second"),
    ("tokens/s", "tokens_per_second", "regular_tokens_per_second"),
    (PRINTED, "speedup", "itself"),
    ("latency", "regular_latency_s", "latency_s"),
)


class Cost(NamedTuple):
    """An iteration, by one reading of the acceptance.

    Attributes:
        reading: tokens that the printed rate is a share of; empty where the tokens per iteration are stated.
        steps: its time, in regular steps.
        at_most: the speed-up if all draft tokens were accepted; unknown where K is, or is a limit.
    """

    reading: str
    tokens: PrintedFigure
    steps: PrintedFigure
    at_most: PrintedFigure


@dataclass(frozen=True)
class AuditRow(PrintedRow):
    """The figures that a row states, and what they imply; `UNKNOWN` or NaN for nothing."""

    def figure(self, name: str) -> PrintedFigure:
        return self.figures.get(name, UNKNOWN)

    @property
    def is_regular(self) -> bool:
        """Whether it is a row of regular decoding alone; a `baseline` that accepts drafts is none."""
        length, rate = self.figure("tokens_per_iteration"), self.figure("acceptance_rate")
        is_called = any(map(is_regular_arm, self.arms))
        return (self.k == 0 or is_called) and not (length.low > 1 or rate.low > 0.01)

    @property
    def k(self) -> float:
        return self.figure("num_draft_tokens").low

    @property
    def load(self) -> float:
        """Requests in flight."""
        return self.figure("batch_size").low

    @property
    def name(self) -> str:
        """Its arm and its conditions, but for those that begin with a number."""
        texts = dict.fromkeys([*self.arms, *self.conditions.values()])
        return ", ".join(text for text in texts if text and not re.match(r"\W*\d", text))

    @property
    def label(self) -> str:
        """`row 7 (DSpark, code, K=7, 8 in flight)`."""
        k, load = f"K={self.k:g}" * (self.k >= 1), f"{self.load:g} in flight" * (self.load > 1)
        about = ", ".join(filter(None, [self.name, k, load]))
        return f"{self.place} ({about})" if about else self.place

    @property
    def most_tokens(self) -> float:
        """Tokens per iteration if all were accepted; NaN where K is unknown, or a limit or the depth of a tree."""
        is_limit = self.figure("topk").low > 1 or self.figure("p_min").low > 0.01
        return math.nan if is_limit or any(map(_VARYING.search, self.arms)) else self.k + 1

    @property
    def readings(self) -> dict[str, PrintedFigure]:
        """Tokens per iteration, by what the printed rate may be a share of; nothing where K is not known."""
        rate, k = self.figure("acceptance_rate"), self.most_tokens - 1
        if not (k >= 1 and rate.low <= 1):
            return {}
        yields = {"proposed": rate.times(k, plus=1)}
        if rate.high < k / (k + 1):
            yields["emitted"] = rate.under(lambda share: 1 / (1 - share))
        if rate.high < 1 < k:
            yields["tested"] = rate.under(lambda share: (1 - share ** (k + 1)) / (1 - share))
        return yields

    @property
    def yields(self) -> dict[str, PrintedFigure]:
        """Tokens per iteration: the stated ones, or those of each reading of the rate, the usual one first."""
        length = self.figures.get("tokens_per_iteration")
        return {"": length} if length else self.readings

    @property
    def costs(self) -> list[Cost]:
        """An iteration for each of its yields, where a speed-up is known."""
        costs = []
        for reading, tokens in self.yields.items():
            steps = tokens.over(self.speedup)
            is_possible = steps.high >= 1 - NOISE and tokens.middle <= self.most_tokens
            most = PrintedFigure.exactly(self.most_tokens) if is_possible else UNKNOWN
            if steps.is_known:
                costs.append(Cost(reading, tokens, steps, most.over(steps)))
        return costs

    @property
    def cost(self) -> Cost | None:
        return next(iter(self.costs), None)

    @property
    def speedups(self) -> dict[str, PrintedFigure]:
        """Each speed-up that it has, by what it is of: those of one user come first."""
        figures = {**self.figures, "itself": PrintedFigure.exactly(1)}
        return {
            what: figures[above].over(figures[below])
            for what, above, below in _SPEEDUPS
            if above in figures and below in figures
        }

    @property
    def speedup(self) -> PrintedFigure:
        return next(iter(self.speedups.values()), UNKNOWN)
