"""A figure of a measurement before and after a change: what a command says of both sides, for `regress`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from harness.config.amounts import change_in_percent
from harness.reporting.names import Name, name_of
from harness.results.runs import AnyRunRow, Run
from harness.results.schema import RunRow
from harness.results.statistics.comparisons import Comparison, Direction, Noise, Verdict

ONE_RUN = "one run on each side, which says nothing about noise: repeats=5, or noise="


@dataclass(frozen=True)
class Figure:
    """A figure that is compared.

    Attributes:
        better: the direction that is good: `lower` or `higher`.
        words: the verdict if it is better, and if it is worse: `faster` and `slower`.
        timed: whether it is a time, which differs between identical runs.
        is_share: whether it is a share of answers, whose change is a difference in points; of others
            it is a ratio.
    """

    name: str
    better: Direction
    words: tuple[str, str]
    timed: bool = False
    is_share: bool = False


@dataclass(frozen=True)
class Sides(Generic[AnyRunRow]):
    """Two measurements with the same settings.

    Attributes:
        before, after: the runs of each, repetitions of one another.
        margin: a change for the worse up to this share is tolerated.
        noise: runs of one program with the same settings on the same devices, whose differences are noise.
    """

    before: Sequence[Run[AnyRunRow]]
    after: Sequence[Run[AnyRunRow]]
    margin: float
    noise: Sequence[Run[AnyRunRow]]

    @property
    def runs(self) -> Sequence[Run[AnyRunRow]]:
        return [*self.before, *self.after]

    def compared(self, figure: Figure) -> Compared:
        """The comparison of a figure, without a result yet."""
        after = self.after[-1].last
        return Compared(self.before[-1].last, after, figure, name_of(after))


@dataclass(frozen=True)
class Compared:
    """One figure of a measurement before and after the change.

    Attributes:
        before, after: a row of each, for its settings and circumstances.
        mean_before, mean_after: of the figure over units and runs; None where nothing was compared.
        name: of the measurement among the others.
        noise: of identical runs, where that was given.
        reason: why there is no verdict, where the interval does not show it.
        split: of a time, what its change consists of: what iterations yield, and what they cost.
    """

    before: RunRow
    after: RunRow
    figure: Figure
    name: Name
    verdict: Verdict = "cannot tell"
    comparison: Comparison | None = None
    mean_before: float | None = None
    mean_after: float | None = None
    noise: Noise | None = None
    reason: str = ""
    split: str = ""

    @property
    def change(self) -> str | None:
        """`+2.0%` or `+2.0 points`; None where nothing was compared."""
        return None if self.comparison is None else self._signed(self.comparison.change.estimate)

    @property
    def interval(self) -> str | None:
        """The 95 % interval of the change."""
        if self.comparison is None or not self.comparison.change.has_bounds:
            return None
        change = self.comparison.change
        return f"{self._signed(change.low)} to {self._signed(change.high)}"

    @property
    def in_words(self) -> str:
        """The verdict: `faster`, `slower`, `no worse`, `cannot tell`."""
        better, worse = self.figure.words
        return {"better": better, "worse": worse}.get(self.verdict, self.verdict)

    @property
    def needs_runs(self) -> bool:
        """Whether runs such as these, if there are enough, give a verdict."""
        return self.comparison is not None and self.reason in ("", ONE_RUN)

    @property
    def visible(self) -> float | None:
        """The smallest change that such a comparison finds in 80 % of the cases; None where it finds none, however
        large.
        """
        estimate = self.comparison.estimate if self.comparison and self.needs_runs else None
        return None if estimate is None else estimate.visible_difference

    def _signed(self, change: float) -> str:
        """A change in words: a ratio of 1.02 is `+2.0%`, a difference of 0.02 `+2.0 points`."""
        return f"{100 * change:+.1f} points" if self.figure.is_share else change_in_percent(change)
