"""Many runs of `latency`: pairs by speed-up, the best K of each, and the sentence about the fastest."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from harness.report.categories import Category, by_category
from harness.report.latency import finding, speedup_in_words
from harness.report.names import Name, told_apart
from harness.report.runs import Run
from harness.report.table import Line, grouped, times
from harness.report.words import in_words
from harness.results.schema import LatencyRow


@dataclass(frozen=True)
class MeasuredPair:
    """A pair as one run measured it.

    Attributes:
        regular: row of the regular arm; None where the run has none.
        row: of the speculative arm; in a run without a draft the regular one.
        best: whether no other K of the same pair and settings is faster, of one K or several.
        best_of_several: whether it is the best of several K; its row says `best K`.
    """

    run: Run
    regular: LatencyRow | None
    row: LatencyRow
    name: Name
    best: bool = False
    best_of_several: bool = False

    @property
    def method(self) -> str:
        """The way to draft, with what distinguishes it from the same way in other runs."""
        return " · ".join([str(self.row.draft), *self.name.details])

    @property
    def partial(self) -> bool:
        return self.run.status != "ok"

    @property
    def complete(self) -> bool:
        """Whether there is a speed-up over all prompts."""
        return self.row.speedup is not None and not self.partial

    @property
    def worth(self) -> tuple[int, float]:
        """Orders pairs by speed-up: partial ones below complete ones, those without any last."""
        if self.row.speedup is None:
            return -1, 0.0
        return int(self.complete), self.row.speedup

    @functools.cached_property
    def categories(self) -> list[Category]:
        """Speed-up by category of prompts at the best K; empty where there is only one category."""
        if not self.best:
            return []
        categories = by_category(self.run.prompts, self.row)
        return categories if len(categories) > 1 else []

    @property
    def stands_out(self) -> bool:
        """Whether its row is bold: the best of several K, but no trial of a few prompts."""
        return self.best_of_several and self.row.speedup_low is not None

    @property
    def load(self) -> float:
        """Rows of a batch or requests in flight; requests per second where a rate was set."""
        return self.row.request_rate or self.row.batch_size or 1

    @property
    def unit_of_load(self) -> str:
        if self.row.request_rate:
            return "requests per second"
        return "rows of a batch, or requests in flight"

    @property
    def name_without_load(self) -> Name:
        """The same name for pairs that differ in their load alone."""
        load = in_words(self.row, "batch_size")
        settings = [setting for setting in self.name.settings if setting != load]
        return replace(self.name, settings=settings)


def latency_pairs(runs: Sequence[Run]) -> list[MeasuredPair]:
    """Pairs by their best speed-up, targets alone last; random weights and synthetic acceptance after all others.

    Runs of one pair are ordered by load and then by K, ascending.
    """
    shown = [run for run in runs if run.status != "incomplete"]
    names = told_apart([run.last for run in shown])
    pairs = [
        MeasuredPair(run, regular=run.row("regular"), row=run.last, name=name)
        for run, name in zip(shown, names, strict=True)
    ]
    all_series = [_with_best(series) for series in k_series(pairs)]
    families = grouped(all_series, _family).values()
    ordered = []
    for family in sorted(families, key=_place):
        for series in sorted(family, key=lambda series: series[0].load):
            ordered += series
    return ordered


def k_series(pairs: Iterable[MeasuredPair]) -> list[list[MeasuredPair]]:
    """Groups of pairs that differ in K alone; K ascending, `auto` last."""
    groups = grouped(pairs, attrgetter("name.group")).values()
    return [sorted(group, key=attrgetter("name.k_order")) for group in groups]


def _with_best(series: Sequence[MeasuredPair]) -> list[MeasuredPair]:
    """A series in which the fastest complete pair is marked as the best."""
    top = max(series, key=attrgetter("worth"))
    several = len({pair.name.num_draft_tokens for pair in series}) > 1
    marked = []
    for pair in series:
        best = pair is top and top.complete
        marked.append(replace(pair, best=best, best_of_several=best and several))
    return marked


def _family(series: Sequence[MeasuredPair]) -> tuple[object, ...]:
    """The same value for series that differ in their load alone."""
    pair = series[0]
    return pair.row.real, pair.unit_of_load, pair.name_without_load.group


def _place(family: Sequence[Sequence[MeasuredPair]]) -> tuple[object, ...]:
    """Orders families by their fastest pair."""
    pairs = [pair for series in family for pair in series]
    top = max(pairs, key=attrgetter("worth"))
    completeness, speedup = top.worth
    return not top.row.real, -completeness, -speedup, top.name.group


def num_compared(pairs: Sequence[MeasuredPair]) -> int:
    """How many pairs have intervals, from which a reader picks the best."""
    return sum(pair.complete and pair.row.speedup_low is not None for pair in pairs)


def fastest_pair(pairs: Sequence[MeasuredPair]) -> MeasuredPair | None:
    """The pair of the first sentence; None without a complete one.

    Those with an interval come first, because a few prompts may show any speed-up.
    """
    bests = [pair for pair in _shown_first(pairs) if pair.best]
    bests.sort(key=attrgetter("worth"), reverse=True)
    with_interval = [pair for pair in bests if pair.row.speedup_low is not None]
    return next(iter(with_interval or bests), None)


def fastest(pairs: Sequence[MeasuredPair]) -> list[Line]:
    """The sentence about the fastest pair, in bold if that has an interval."""
    best = fastest_pair(pairs)
    pairs = _shown_first(pairs)
    if best is None:
        return _without_a_draft(pairs)
    is_fastest = best.worth == max(pair.worth for pair in pairs if pair.best)
    restriction = "" if is_fastest else " with an interval"
    name = best.name.label(", ")
    speedup = speedup_in_words(best.row, num_compared(pairs))
    several = len(k_series(pairs)) > 1
    if several and (best.row.speedup or 0) < 1:
        sentence = f"No pair{restriction} gains; the best, {name}, is at {speedup}"
    elif no_gain := finding(best.row):
        sentence = f"{name} {no_gain}: {speedup}"
    else:
        beginning = f"Fastest{restriction}: " if several else ""
        sentence = f"{beginning}{name}: {speedup}"
        if best.row.predicted_speedup:
            sentence += f"; theory predicts {times(best.row.predicted_speedup)}"
    has_interval = best.row.speedup_low is not None
    return [Line(f"{sentence}.", "strong" if has_interval else "plain")]


def _shown_first(pairs: Sequence[MeasuredPair]) -> list[MeasuredPair]:
    """Without random weights and synthetic acceptance, which are no finding next to a real one."""
    return [pair for pair in pairs if pair.row.real] or list(pairs)


def _without_a_draft(pairs: Sequence[MeasuredPair]) -> list[Line]:
    times_per_token = [
        f"{pair.name.label(', ')}: {pair.row.ms_per_token:.2f} ms/token"
        for pair in pairs
        if pair.row.ms_per_token and not pair.row.draft and not pair.partial
    ]
    if not times_per_token:
        return []
    return [Line(f"Without a draft: {'; '.join(times_per_token)}.", "strong")]
