"""The search for the first version that is worse: which one is measured next, and when the answer is known.

Nothing is started here: what measures a version is given, so that planted runs are searched as real ones are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.config.errors import RunError
from harness.reporting.changes import Compared, Sides
from harness.results.runs import Run
from harness.results.statistics.first_worse import (
    SURE,
    chances_of_first_worse,
    next_version,
    smallest_range,
)

# Starts of each end, where the first ones do not differ by the margin.
_MOST_AT_ENDS = 3
# Starts of the version that is named, and of the one before it: one start may have been disturbed.
_FEWEST_OF_NAMED = 2
_LEVEL = 0.05

# Measures a version once more: its run, or why there is none. The number counts its starts, from 1.
Measure = Callable[[str, int], Run | str]
Changes = Callable[[Sides], Sequence[Compared]]


@dataclass(frozen=True)
class Measured:
    """A version, and what was found out about it.

    Attributes:
        runs: of each start.
        ratio: its figure over that of the first version, both as geometric means over starts; None without runs.
        chance: that it is the first one that is worse.
        skipped: why it was not measured, or cannot be compared.
    """

    version: str
    runs: Sequence[Run]
    ratio: float | None
    chance: float
    skipped: str


@dataclass(frozen=True)
class Outcome:
    """What a search has found.

    Attributes:
        versions: all of them, in order.
        first_worse: None where no version is known to be.
        possible: the versions of which one is the first worse one, with a chance of `SURE`; those that were skipped
            before one of them are among them. [] where the ends do not differ.
        compared: every figure, of all starts before the likeliest version and from it on.
        changed: the one among them that was searched by.
    """

    versions: Sequence[Measured]
    first_worse: str | None
    possible: Sequence[str]
    compared: Sequence[Compared]
    changed: Compared

    @property
    def num_starts(self) -> int:
        return sum(len(one.runs) for one in self.versions)


class Search:
    """A search over versions in order, of which the first is good and the last is worse.

    Args:
        versions: two at least, each once.
        figure: the name of the figure that became worse, as `changes` has it: `ms per token`.
        margin: a change for the worse up to this share is none.
        most_starts: after which it gives up.
        measure: see `Measure`.
        changes: see `Command.changes`.
    """

    def __init__(
        self,
        versions: Sequence[str],
        figure: str,
        margin: float,
        most_starts: int,
        measure: Measure,
        changes: Changes,
    ) -> None:
        self._figure = figure
        self._margin = margin
        self._most_starts = most_starts
        self._measure = measure
        self._changes = changes
        self._versions = versions
        self._runs: dict[str, list[Run]] = {version: [] for version in versions}
        self._skipped: dict[str, str] = {}
        # The logarithm of each run's figure over that of the first run, by the run's id.
        self._logs: dict[str, float] = {}

    def find(self) -> Outcome:
        """Measure until the answer is known, or the most starts are used up.

        Raises:
            RunError: the first or the last version cannot be measured, or not compared.
        """
        ends = (self._versions[0], self._versions[-1])
        for version in ends:
            self._start(version)
        while not self._is_beyond_margin():
            fewest = min(ends, key=self._count)
            if self._count(fewest) == _MOST_AT_ENDS:
                return self._outcome(len(self._usable) - 1, [])
            self._start(fewest)
        while True:
            usable = self._usable
            chances = self._chances()
            likeliest = max(range(len(usable)), key=chances.__getitem__)
            is_sure = chances[likeliest] >= SURE
            seldom = min(likeliest - 1, likeliest, key=lambda near: self._count(usable[near]))
            is_repeated = self._count(usable[seldom]) >= _FEWEST_OF_NAMED
            if is_sure and is_repeated and self._is_significant(likeliest):
                return self._outcome(likeliest, [likeliest], is_found=True)
            if sum(map(len, self._runs.values())) >= self._most_starts:
                return self._outcome(likeliest, smallest_range(chances))
            is_next = is_sure or (chances[likeliest] > 0.5 and not is_repeated)
            # A likely one is named when its noise is known well enough.
            place = seldom if is_next else next_version(chances, [*map(self._count, usable)])
            self._start(usable[place])

    @property
    def _usable(self) -> list[str]:
        return [version for version in self._versions if version not in self._skipped]

    def _count(self, version: str) -> int:
        return len(self._runs[version])

    def _start(self, version: str) -> None:
        """Measure a version once more; one that cannot be is skipped."""
        run = self._measure(version, self._count(version) + 1)
        reason = run if isinstance(run, str) else self._why_not_comparable(run)
        if not reason:
            assert isinstance(run, Run)
            self._runs[version].append(run)
            return
        if version in (self._versions[0], self._versions[-1]):
            raise RunError(f"{version} is an end of the search, and cannot be measured: {reason}")
        self._skipped[version] = reason

    def _why_not_comparable(self, run: Run) -> str:
        """Why a run has no figure to compare; "" where it has one, which is kept."""
        first = next(iter(self._runs[self._versions[0]]), None)
        if first is None:
            self._logs[run.id] = 0.0
            return ""
        changed = self._compared([first], [run])
        if changed.comparison is None:
            return changed.reason or f"has no {self._figure}"
        self._logs[run.id] = math.log(changed.comparison.change.estimate)
        return ""

    def _compared(self, before: Sequence[Run], after: Sequence[Run]) -> Compared:
        return self._of_figure(self._all_compared(before, after))

    def _all_compared(self, before: Sequence[Run], after: Sequence[Run]) -> Sequence[Compared]:
        return self._changes(Sides(before, after, self._margin, noise=()))

    def _of_figure(self, compared: Sequence[Compared]) -> Compared:
        """The comparison of the figure that is searched by."""
        by_name = {one.figure.name: one for one in compared}
        if self._figure not in by_name:
            known = ", ".join(by_name)
            raise RunError(f"the runs have no {self._figure}, but {known}")
        return by_name[self._figure]

    def _across(self, place: int) -> Sequence[Compared]:
        """All starts of the versions before a place against all from it on."""
        usable = self._usable
        before, after = (
            [run for version in side for run in self._runs[version]]
            for side in (usable[:place], usable[place:])
        )
        return self._all_compared(before, after)

    def _is_beyond_margin(self) -> bool:
        """Whether the last version is worse than the first one by more than the margin, as far as one can see."""
        changed = self._of_figure(self._across(len(self._usable) - 1))
        assert changed.comparison is not None
        ratio = changed.comparison.change.estimate
        if changed.figure.better == "higher":
            ratio = 1 / ratio
        return ratio > 1 + self._margin

    def _chances(self) -> list[float]:
        values = [[self._logs[run.id] for run in self._runs[version]] for version in self._usable]
        return chances_of_first_worse(values)

    def _is_significant(self, place: int) -> bool:
        """Whether the versions from a place on are worse at 5 %, however many places there were to choose from
        (Bonferroni).
        """
        changed = self._of_figure(self._across(place))
        if changed.comparison is None:
            return False
        change = changed.comparison.change
        # False where there are no bounds.
        is_worse = change.low > 1 if changed.figure.better == "lower" else change.high < 1
        num_places = len(self._usable) - 1
        return is_worse and changed.comparison.p_value * num_places < _LEVEL

    def _outcome(
        self, likeliest: int, possible: Sequence[int], *, is_found: bool = False
    ) -> Outcome:
        usable = self._usable
        chances = dict(zip(usable, self._chances(), strict=True))
        means = {
            version: fmean(self._logs[run.id] for run in runs)
            for version, runs in self._runs.items()
            if runs
        }
        good = means[self._versions[0]]
        versions = []
        for version in self._versions:
            runs = self._runs[version]
            ratio = math.exp(means[version] - good) if runs else None
            chance = chances.get(version, 0.0) if possible else 0.0
            skipped = self._skipped.get(version, "")
            versions.append(Measured(version, runs, ratio, chance, skipped))
        compared = self._across(likeliest)
        named: list[str] = []
        if possible:
            before = self._versions.index(usable[possible[0] - 1])
            last = self._versions.index(usable[possible[-1]])
            named = [*self._versions[before + 1 : last + 1]]
        found = usable[likeliest] if is_found else None
        return Outcome(versions, found, named, compared, self._of_figure(compared))


def disturbed(outcome: Outcome) -> list[Run]:
    """The runs whose times drift or other programs have changed."""
    runs = [run for one in outcome.versions for run in one.runs]
    return [run for run in runs if not run.last.was_quiet]
