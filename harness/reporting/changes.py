"""A figure of a measurement before and after a change, as `regress` compares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from harness.config.amounts import change_in_percent
from harness.reporting.names import Name, name_of
from harness.results.judging.change import Figure, judged_change
from harness.results.judging.statement import Statement
from harness.results.runs import AnyRunRow, Run
from harness.results.schema import RunRow
from harness.results.statistics.comparisons import NOT_COMPARED, Comparison, Noise

ONE_RUN = "one run on each side, which says nothing about noise: repeats=5, or noise="


@dataclass(frozen=True)
class BeforeAndAfter(Generic[AnyRunRow]):
    """Two measurements with the same settings.

    Attributes:
        before, after: the runs of each, repetitions of one another.
        margin: a change for the worse that is shown to be smaller than this share counts as no worse.
        noise: repeated runs of one program on these devices, whose differences are noise.
    """

    before: Sequence[Run[AnyRunRow]]
    after: Sequence[Run[AnyRunRow]]
    margin: float
    noise: Sequence[Run[AnyRunRow]]

    @property
    def runs(self) -> Sequence[Run[AnyRunRow]]:
        return [*self.before, *self.after]

    def compared(
        self, figure: Figure, comparison: Comparison = NOT_COMPARED, why: str = ""
    ) -> Compared:
        """A figure on both sides.

        Args:
            why: the reason why nothing can be concluded; empty if there is none.
        """
        before, after = self.before[-1].last, self.after[-1].last
        statement = judged_change(
            figure, comparison, self.margin, why, subject=after, reference=before
        )
        return Compared(before, after, figure, name_of(after), statement, comparison)


@dataclass(frozen=True)
class Compared:
    """One figure of a measurement before and after the change.

    Attributes:
        before, after: one row of each side, for its settings and circumstances.
        name: distinguishes this measurement from others.
        mean_before, mean_after: means of the figure over units and runs; None if nothing was compared. Commands that
            know them add them.
        noise: how far identical runs differ, from those of `BeforeAndAfter`; None if that is not known.
    """

    before: RunRow
    after: RunRow
    figure: Figure
    name: Name
    statement: Statement
    comparison: Comparison
    mean_before: float | None = None
    mean_after: float | None = None
    noise: Noise | None = None

    @property
    def verdict(self) -> str:
        """In general words: `better`, `worse`, `no worse` or `cannot tell`."""
        return self.statement.words

    @property
    def change(self) -> str | None:
        """`+2.0%` or `+2.0 points`; None where nothing was compared."""
        ratio = self.statement.interval
        return self._signed(ratio.estimate) if ratio.is_known else None

    @property
    def interval(self) -> str | None:
        """The 95 % interval of the change."""
        ratio = self.statement.interval
        if not ratio.has_bounds:
            return None
        return f"{self._signed(ratio.low)} to {self._signed(ratio.high)}"

    @property
    def in_words(self) -> str:
        """The verdict in the figure's own words: `faster`, `slower`, `no worse`, `cannot tell`."""
        better, worse = self.figure.words
        return {"better": better, "worse": worse}.get(self.verdict, self.verdict)

    @property
    def needs_runs(self) -> bool:
        """Whether noise alone limits the comparison, and no missing figure: more runs make it narrower."""
        return self.statement.interval.is_known and self.statement.why in ("", ONE_RUN)

    @property
    def smallest_detectable(self) -> float | None:
        """The smallest change that such a comparison detects with 80 % power; None if it detects none."""
        estimate = self.comparison.estimate if self.needs_runs else None
        return None if estimate is None else estimate.visible_difference

    @property
    def as_reason(self) -> str:
        """`30.0 → 29.9 ms per iteration, no worse: 1.00 (0.99 to 1.01)`; empty where a figure is unknown."""
        if self.mean_before is None or self.mean_after is None or self.interval is None:
            return ""
        # Times to one digit, other figures to two.
        form = ".1f" if self.figure.timed else ".2f"
        effect = "" if self.verdict in ("better", "worse") else f"{self.verdict}: "
        figure = f"{self.figure.name}, {effect}{self.statement.interval:.2f}"
        return f"{self.mean_before:{form}} → {self.mean_after:{form}} {figure}"

    def _signed(self, ratio: float) -> str:
        """A ratio or a difference of shares as a change: 1.02 is `+2.0%`, a difference of 0.02 `+2.0 points`."""
        return f"{100 * ratio:+.1f} points" if self.figure.is_share else change_in_percent(ratio)
