"""The figures of a printed row, and what they imply of an iteration: its cost is tokens per iteration ÷ speed-up, in
regular steps.

An iteration of K draft tokens yields 1 + K × rate tokens on average, if all K are drafted in every iteration and an
answer's first token, which comes from reading the prompt, is left out. If that makes decoding s times as fast, an
iteration takes (1 + K × rate) ÷ s times as long as a regular step. This is arithmetic on printed figures.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.results.judging.acceptance import LITTLE
from harness.results.printed.cells import Cells
from harness.results.printed.figures import UNKNOWN, PrintedFigure
from harness.results.printed.headings import is_regular_arm

# Noise of single runs, in which an iteration that costs a step may seem to cost less.
NOISE = 0.05
# Costs that another implementation may reach.
_ROUND_STEPS = (1.5, 1.2, 1)
# Drafts without a fixed K: nothing follows from a rate of theirs.
_VARYING = re.compile(r"lookup|n-?gram|pld|suffix|\bauto\b|tree", re.IGNORECASE)
PRINTED = "as printed"
_SPEEDUPS = (
    ("by ms/token", "regular_ms_per_token", "ms_per_token"),
    ("by tokens/s per user", "user_tokens_per_second", "regular_user_tokens_per_second"),
    ("by tokens/s", "tokens_per_second", "regular_tokens_per_second"),
    (PRINTED, "speedup", "itself"),
    ("by latency", "regular_latency_s", "latency_s"),
)


class Iteration(NamedTuple):
    """An iteration of a row, by one reading of its acceptance; figures that do not follow are `UNKNOWN`.

    Attributes:
        reading: tokens that the printed rate is a share of; empty where the tokens per iteration are stated.
    """

    row: PrintedRow
    reading: str
    tokens: PrintedFigure

    @property
    def steps(self) -> PrintedFigure:
        """Its time, in regular steps."""
        return self.tokens.over(self.row.speedup)

    @property
    def at_most(self) -> PrintedFigure:
        """The speed-up if all draft tokens were accepted; unknown where the figures are impossible together."""
        most = self.row.most_tokens
        is_possible = self.steps.high >= 1 - NOISE and self.tokens.middle <= most
        return PrintedFigure.exactly(most).over(self.steps) if is_possible else UNKNOWN

    @property
    def held_back_by(self) -> str:
        """Its cost or its acceptance, by which gains more: accepting all, or the next of the round costs below its own.
        Or why it is neither.
        """
        if self.steps.high < 1 - NOISE:
            return "less than one step"
        if self.tokens.high <= 1 + NOISE:
            return "almost nothing is accepted"
        if self.steps.middle <= 1 + NOISE:
            return "almost free, or computed"
        if self.at_most.middle < 1:
            return "cost, even with all accepted"
        if not self.at_most.is_known:
            return ""
        fewer_steps = next((steps for steps in _ROUND_STEPS if steps < 0.9 * self.steps.middle), 1)
        by_steps = self.tokens.middle / fewer_steps
        return "cost" if by_steps > self.at_most.middle else "acceptance"


@dataclass(frozen=True)
class PrintedRow:
    """The contents of a row.

    Attributes:
        place: of the row in its text: `row 3`.
        figures: by our names, as far as they are stated.
        arms: cells that name its arm.
        conditions: cells that rows must share to be compared, by heading.
        cells: as printed, by heading.
    """

    place: str
    figures: dict[str, PrintedFigure] = field(default_factory=dict)
    arms: list[str] = field(default_factory=list)
    conditions: dict[str, str] = field(default_factory=dict)
    cells: Cells = field(default_factory=dict, repr=False)

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
    def name(self) -> str:
        """Its arm and its conditions, but for those that begin with a number; its place where it has none."""
        texts = dict.fromkeys([*self.arms, *self.conditions.values()])
        named = [text for text in texts if text and not re.match(r"\W*\d", text)]
        return ", ".join(named) or self.place

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
        yields = {"proposed": rate.transformed(lambda share: 1 + k * share)}
        # Of nothing accepted all readings are the same.
        if 0 < rate.high < k / (k + 1):
            yields["emitted"] = rate.transformed(lambda share: 1 / (1 - share))
        if 0 < rate.high < 1 < k:
            yields["tested"] = rate.transformed(lambda share: (1 - share ** (k + 1)) / (1 - share))
        return yields

    @property
    def yields(self) -> dict[str, PrintedFigure]:
        """Tokens per iteration: the stated ones, or those of each reading of the rate, the usual one first."""
        length = self.figures.get("tokens_per_iteration")
        return {"": length} if length else self.readings

    @property
    def iterations(self) -> list[Iteration]:
        """An iteration for each of its yields; one of which nothing is known where it has none."""
        return [
            Iteration(self, reading, tokens)
            for reading, tokens in (self.yields or {"": UNKNOWN}).items()
        ]

    @property
    def is_read(self) -> bool:
        """Whether it states an acceptance or a speed-up."""
        names = self.figures.keys() & {"tokens_per_iteration", "acceptance_rate"}
        return bool(names or self.speedups)

    @property
    def accepts_little(self) -> bool:
        length, rate = self.figure("tokens_per_iteration"), self.figure("acceptance_rate")
        return rate.high < LITTLE or length.high <= 1 + NOISE

    @property
    def speedups(self) -> dict[str, PrintedFigure]:
        """Each speed-up that it has, by what it is of; the first one counts."""
        figures = {**self.figures, "itself": PrintedFigure.exactly(1)}
        return {
            what: figures[above].over(figures[below])
            for what, above, below in _SPEEDUPS
            if above in figures and below in figures
        }

    @property
    def speedup(self) -> PrintedFigure:
        return next(iter(self.speedups.values()), UNKNOWN)
