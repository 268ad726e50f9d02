"""Rows of typed figures, and what they imply of an iteration: its cost is tokens per iteration ÷ speed-up, in
regular steps.

An iteration of K draft tokens yields 1 + K × rate tokens on average, if all K are drafted in every iteration and an
answer's first token, which comes from reading the prompt, is left out. If that makes decoding s times as fast, an
iteration takes (1 + K × rate) ÷ s times as long as a regular step. This is arithmetic on printed figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.commands.audit.figures import UNKNOWN, PrintedFigure
from harness.config.errors import SettingError

# Noise of single runs, in which an iteration that costs a step may seem to cost less.
NOISE = 0.05
# Costs that another implementation may reach.
_ROUND_STEPS = (1.5, 1.2, 1)
PRINTED = "as printed"
_SPEEDUPS = (
    ("by ms/token", "regular_ms_per_token", "ms_per_token"),
    ("by tokens/s per user", "user_tokens_per_second", "regular_user_tokens_per_second"),
    ("by tokens/s", "tokens_per_second", "regular_tokens_per_second"),
    (PRINTED, "speedup", "itself"),
    ("by latency", "regular_latency_s", "latency_s"),
)


SHORT_NAMES = {
    "baseline": "regular_tokens_per_second",
    "speed": "tokens_per_second",
    "speedup": "speedup",
    "acceptance": "acceptance_rate",
    "length": "tokens_per_iteration",
    "K": "num_draft_tokens",
}
# Speeds that are typed as 24.6ms or 41s.
_SPEEDS_BY_UNIT = {"ms": "ms_per_token", "s": "latency_s"}
# Tokens that a tool's acceptance rate is a share of. Without its name the most usual ones are assumed.
READINGS = {"llama.cpp": "proposed", "vllm": "proposed", "dflash": "emitted", "": "proposed"}


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
    """The figures of a row.

    Attributes:
        place: of the row: `row 3`.
        figures: by our names, as far as they are stated.
        tool: that printed the acceptance rate, of `READINGS`.
    """

    place: str
    figures: dict[str, PrintedFigure] = field(default_factory=dict)
    tool: str = ""

    def figure(self, name: str) -> PrintedFigure:
        return self.figures.get(name, UNKNOWN)

    @property
    def k(self) -> float:
        return self.figure("num_draft_tokens").low

    @property
    def most_tokens(self) -> float:
        """Tokens per iteration if all were accepted; NaN where K is unknown, or a limit or the depth of a tree."""
        is_limit = self.figure("topk").low > 1 or self.figure("p_min").low > 0.01
        return math.nan if is_limit else self.k + 1

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
        """Tokens per iteration: the stated ones, or those of each reading of the rate, the tool's first."""
        length = self.figures.get("tokens_per_iteration")
        if length:
            return {"": length}
        readings = self.readings
        usual = READINGS[self.tool]
        return {usual: readings.pop(usual), **readings} if usual in readings else readings

    @property
    def iterations(self) -> list[Iteration]:
        """An iteration for each of its yields; one of which nothing is known where it has none."""
        return [
            Iteration(self, reading, tokens)
            for reading, tokens in (self.yields or {"": UNKNOWN}).items()
        ]

    @property
    def other_readings(self) -> str:
        """`row 3 by other readings: of emitted 6.74 tokens, 2.58 steps`; empty where there is one reading."""
        others = [
            f"of {iteration.reading} {iteration.tokens} tokens, {iteration.steps} steps"
            for iteration in self.iterations[1:]
        ]
        return f"{self.place} by other readings: {'; '.join(others)}" if others else ""

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


def stated_rows(typed: Mapping[str, Sequence[str]], tool: str = "") -> list[PrintedRow]:
    """Rows by arguments; what is typed once holds for all rows.

    Args:
        tool: that printed them, of `READINGS`.

    Raises:
        SettingError: one is no such number, or they are of different numbers of rows.
    """
    number = max(map(len, typed.values()), default=1)
    rows = []
    for place in range(number):
        row = PrintedRow("the figure" if number == 1 else f"row {place + 1}", tool=tool)
        for short, texts in typed.items():
            if len(texts) not in (1, number):
                rule = f"must have one value, or one for each of {number} rows"
                raise SettingError(short, rule, " and ".join(texts))
            text = texts[place % len(texts)]
            name = SHORT_NAMES.get(short, short)
            unit = re.search(r"\d\s*(ms|s)\b", text)
            if unit and short in ("baseline", "speed"):
                name = name.replace("tokens_per_second", _SPEEDS_BY_UNIT[unit[1]])
            try:
                row.figures[name] = PrintedFigure.read(name, text)
            except ValueError as error:
                forms = "write 40.6, 24.6ms, 73.9%, 1.79x or +79%, and type a name again for another row"
                raise SettingError(short, f"{error}; {forms}", text[:40]) from error
        rows.append(row)
    return rows
