"""Many runs of `latency`: pairs by speed-up, the best K of each, and the sentence about the fastest."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from harness.commands.latency.rows import LatencyRow
from harness.commands.latency.tables.categories import Category, by_category
from harness.commands.latency.tables.run import figure_in_words
from harness.commands.names import Name, told_apart
from harness.commands.read_runs import Run
from harness.commands.words import in_words, labels
from harness.results.schema import NO_VERDICT
from harness.results.verdict import verdict_of
from harness.tables.table import Line, grouped, times


@dataclass(frozen=True)
class MeasuredPair:
    """A pair as one run measured it, at one K.

    Attributes:
        regular: row of the regular arm; None where the run has none.
        row: row of the speculative arm; in a run without a draft of the regular one.
        name: its name among the pairs that are shown together.
        best: whether no other K of the same pair and settings is faster, also if it was measured
            at one K only. Pairs are compared with others at their best K.
        best_of_several: whether it is the best of several K. Its row of a table then has the
            remark `best K`.
    """

    run: Run
    regular: LatencyRow | None
    row: LatencyRow
    name: Name
    best: bool = False
    best_of_several: bool = False

    @property
    def method(self) -> str:
        """The way to draft, with the labels of a pair that is not real, and with what distinguishes
        it from the same way in other runs.
        """
        return " · ".join([str(self.row.draft), *labels(self.row), *self.name.details])

    @property
    def partial(self) -> bool:
        return self.run.status not in ("ok", NO_VERDICT)

    @property
    def complete(self) -> bool:
        """Whether there is a speed-up over all prompts."""
        return self.row.speedup is not None and not self.partial

    @property
    def worth(self) -> tuple[int, float]:
        """Orders pairs: complete ones by speed-up, then partial ones by speed-up, then those
        without any.
        """
        if self.row.speedup is None:
            return 0, 0.0
        return 2 if self.complete else 1, self.row.speedup.estimate

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
        return self.best_of_several and self.row.has_interval

    @property
    def load(self) -> float:
        """Rows of a batch, requests in flight, or requests per second where a rate was set."""
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
    """Pairs by their best speed-up, targets alone last, and made-up ones after all others.

    Made up are random weights and synthetic acceptance. Runs of one pair are ordered by load and
    then by K, ascending: 30B with 7B at K=2 and 4 (2.4×), then 13B with 7B at batch size 1 and 4
    (2.1×).
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
    """Groups of pairs that differ in K, or circumstances, alone; K ascending, `auto` last."""
    groups = grouped(pairs, attrgetter("name.group")).values()
    return [sorted(group, key=attrgetter("name.k_order")) for group in groups]


def _with_best(series: Sequence[MeasuredPair]) -> list[MeasuredPair]:
    """The series with its fastest pair marked as the best, if that is complete."""
    top = max(series, key=attrgetter("worth"))
    if not top.complete:
        return list(series)
    # Of an interrupted rival, or points without an interval, nobody knows which is the best.
    rivals = [pair for pair in series if pair.complete and verdict_of(pair.row).can_tell]
    several = len({pair.name.num_draft_tokens for pair in rivals}) > 1
    several = several and verdict_of(top.row).pays and top.row.was_quiet
    best = replace(top, best=True, best_of_several=several)
    return [best if pair is top else pair for pair in series]


def _family(series: Sequence[MeasuredPair]) -> tuple[object, ...]:
    """The same value for series that differ in their load alone."""
    pair = series[0]
    return pair.row.real, pair.unit_of_load, pair.name_without_load.group


def _place(family: Sequence[Sequence[MeasuredPair]]) -> tuple[object, ...]:
    """Orders families by their fastest pair, made-up ones last."""
    top = max(itertools.chain.from_iterable(family), key=attrgetter("worth"))
    completeness, speedup = top.worth
    return not top.row.real, -completeness, -speedup, top.name.group


def num_compared(pairs: Sequence[MeasuredPair]) -> int:
    """The number of pairs with an interval: a reader picks the best of so many."""
    return sum(pair.complete and pair.row.has_interval for pair in pairs)


def fastest_pair(pairs: Sequence[MeasuredPair]) -> MeasuredPair | None:
    """The pair of the first sentence; None without a complete one.

    One on a quiet machine is preferred, and one with an interval, because a few prompts may show any
    speed-up.
    """
    bests = [pair for pair in _real_or_all(pairs) if pair.best]
    bests = [pair for pair in bests if pair.row.was_quiet] or bests
    with_interval = [pair for pair in bests if pair.row.has_interval]
    return max(with_interval or bests, key=attrgetter("worth"), default=None)


def fastest(pairs: Sequence[MeasuredPair]) -> list[Line]:
    """The sentence about the fastest pair, in bold if that has an interval."""
    best = fastest_pair(pairs)
    candidates = _real_or_all(pairs)
    if best is None:
        return _without_a_draft(candidates)
    is_fastest = best.worth == max(pair.worth for pair in candidates)
    restriction = "" if is_fastest else " with an interval"
    name = best.name.label(", ")
    # The interval that the table has, which lists the made-up pairs too.
    verdict = verdict_of(best.row, num_compared(pairs))
    figure = figure_in_words(verdict, num_compared(pairs))
    several = len(k_series(candidates)) > 1
    sentence = f"Cannot tell whether {name} pays: {figure}"
    if verdict.pays:
        beginning = f"Fastest{restriction}: " if several else ""
        sentence = f"{beginning}{name}: {figure}"
        if best.row.predicted_speedup:
            sentence += f"; theory predicts {times(best.row.predicted_speedup)}"
    elif verdict.conclusion == "no difference":
        sentence = f"{name} makes no significant difference: {figure}"
    elif verdict.conclusion == "slower" and several:
        sentence = f"No pair{restriction} gains; the best, {name}, is at {figure}"
    elif verdict.conclusion == "slower":
        sentence = f"{name} does not pay: {figure}"
    if not best.row.was_quiet:
        sentence += "; the machine was not quiet"
    return [Line(f"{sentence}.", "strong" if verdict.can_tell else "plain")]


def _real_or_all(pairs: Sequence[MeasuredPair]) -> list[MeasuredPair]:
    """The pairs that are not made up, or all if all are: next to a real one they are no finding."""
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
