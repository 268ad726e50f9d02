"""The search for the first version that is worse: which one is measured next, and when the answer is known.

Nothing is started here: what measures a version is given, so that planted runs are searched as real ones are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass
class Version:
    """A version, and what is known of it.

    Attributes:
        name: that fills in the command.
        label: how it is shown.
        runs: of each start.
        logs: the logarithm of each run's figure over that of the search's first run.
        skipped: why it was not measured, or cannot be compared.
        chance: that it is the first one that is worse.
    """

    name: str
    label: str
    runs: list[Run] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    skipped: str = ""
    chance: float = 0.0

    @property
    def num_starts(self) -> int:
        return len(self.runs)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a search.

    Attributes:
        versions: all of them, in order.
        first_worse: None where no version is known to be.
        possible: the versions of which one is the first worse one, with a chance of `SURE`; those that were skipped
            before one of them are among them. [] where the ends do not differ.
        compared: every figure, of all starts before the likeliest version and from it on.
        changed: the one among them that was searched by.
    """

    versions: Sequence[Version]
    first_worse: Version | None
    possible: Sequence[Version]
    compared: Sequence[Compared]
    changed: Compared

    @property
    def runs(self) -> list[Run]:
        return [run for version in self.versions for run in version.runs]

    def ratio(self, version: Version) -> float | None:
        """The figure over that of the first version, both as geometric means over starts; None without runs."""
        if not version.runs:
            return None
        return math.exp(fmean(version.logs) - fmean(self.versions[0].logs))


@dataclass(frozen=True)
class Search:
    """A search over versions in order, of which the first is good and the last is worse.

    Attributes:
        versions: two at least.
        figure: the name of the figure that became worse, as `changes` has it: `ms per token`.
        margin: a change for the worse up to this share is none.
        most_starts: after which it gives up.
        measure: measures a version once more: its run, or why there is none.
        changes: see `Command.changes`.
    """

    versions: Sequence[Version]
    figure: str
    margin: float
    most_starts: int
    measure: Callable[[Version], Run | str]
    changes: Callable[[Sides], Sequence[Compared]]

    def find(self) -> Outcome:
        """Measure until the answer is known, or the most starts are used up.

        Raises:
            RunError: the first or the last version cannot be measured, or not compared.
        """
        ends = (self.versions[0], self.versions[-1])
        for version in ends:
            self._start(version)
        while not self._is_beyond_margin():
            fewest = min(ends, key=lambda version: version.num_starts)
            if fewest.num_starts == _MOST_AT_ENDS:
                return self._outcome(len(self._usable) - 1, [])
            self._start(fewest)
        while True:
            usable = self._usable
            chances = chances_of_first_worse([version.logs for version in usable])
            likeliest = max(range(len(usable)), key=chances.__getitem__)
            is_sure = chances[likeliest] >= SURE
            seldom = min(
                usable[likeliest - 1], usable[likeliest], key=lambda version: version.num_starts
            )
            is_repeated = seldom.num_starts >= _FEWEST_OF_NAMED
            if is_sure and is_repeated and self._is_significant(likeliest):
                return self._outcome(likeliest, [likeliest], is_found=True)
            if sum(version.num_starts for version in self.versions) >= self.most_starts:
                return self._outcome(likeliest, smallest_range(chances))
            # A likely one is named when its noise is known well enough.
            is_next = is_sure or (chances[likeliest] > 0.5 and not is_repeated)
            counts = [version.num_starts for version in usable]
            self._start(seldom if is_next else usable[next_version(chances, counts)])

    @property
    def _usable(self) -> list[Version]:
        return [version for version in self.versions if not version.skipped]

    def _start(self, version: Version) -> None:
        """Measure a version once more; one that cannot be measured or compared is skipped."""
        run = self.measure(version)
        reason = run if isinstance(run, str) else self._keep(version, run)
        if reason and version in (self.versions[0], self.versions[-1]):
            text = f"{version.name} is an end of the search, and cannot be measured: {reason}"
            raise RunError(text)
        version.skipped = reason

    def _keep(self, version: Version, run: Run) -> str:
        """Add a run to its version; why it cannot be compared, or ""."""
        log = 0.0
        if first := self.versions[0].runs[:1]:
            changed = self._of_figure(self._compared(first, [run]))
            if changed.comparison is None:
                return changed.reason or f"has no {self.figure}"
            log = math.log(changed.comparison.change.estimate)
        version.runs.append(run)
        version.logs.append(log)
        return ""

    def _compared(self, before: Sequence[Run], after: Sequence[Run]) -> Sequence[Compared]:
        return self.changes(Sides(before, after, self.margin, noise=()))

    def _across(self, index: int) -> Sequence[Compared]:
        """All starts of the usable versions before an index against all from it on."""
        before, after = self._usable[:index], self._usable[index:]
        return self._compared(
            [run for version in before for run in version.runs],
            [run for version in after for run in version.runs],
        )

    def _of_figure(self, compared: Sequence[Compared]) -> Compared:
        """The comparison of the figure that is searched by."""
        by_name = {item.figure.name: item for item in compared}
        if self.figure in by_name:
            return by_name[self.figure]
        # Runs that did other work have one figure, with the reason.
        reason = compared[0].reason if compared[0].comparison is None else ""
        return replace(compared[0], comparison=None, reason=reason)

    def _is_beyond_margin(self) -> bool:
        """Whether the last version is worse than the first one by more than the margin, as far as one can see."""
        changed = self._of_figure(self._across(len(self._usable) - 1))
        if changed.comparison is None or not changed.comparison.change.has_bounds:
            # Further starts have no more prompts.
            raise RunError(changed.reason)
        ratio = changed.comparison.change.estimate
        return (ratio if changed.figure.better == "lower" else 1 / ratio) > 1 + self.margin

    def _is_significant(self, index: int) -> bool:
        """Whether the versions from an index on are worse at 5 %, however many there were to choose from
        (Bonferroni).
        """
        changed = self._of_figure(self._across(index))
        if changed.comparison is None:
            return False
        change = changed.comparison.change
        # False where there are no bounds.
        is_worse = change.low > 1 if changed.figure.better == "lower" else change.high < 1
        num_changes = len(self._usable) - 1
        return is_worse and changed.comparison.p_value * num_changes < _LEVEL

    def _outcome(
        self, likeliest: int, possible: Sequence[int], *, is_found: bool = False
    ) -> Outcome:
        usable = self._usable
        named: Sequence[Version] = []
        if possible:
            chances = chances_of_first_worse([version.logs for version in usable])
            for version, chance in zip(usable, chances, strict=True):
                version.chance = chance
            before = self.versions.index(usable[possible[0] - 1])
            last = self.versions.index(usable[possible[-1]])
            named = self.versions[before + 1 : last + 1]
        compared = self._across(likeliest)
        first_worse = usable[likeliest] if is_found else None
        return Outcome(self.versions, first_worse, named, compared, self._of_figure(compared))
