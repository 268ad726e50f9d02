"""Many runs of `latency`: pairs by speed-up, the best K of each, and the tables that compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from harness.config.amounts import amount
from harness.report import latency
from harness.report.runs import Run
from harness.report.table import Column, Line, Style, Table, TableRow, interval, number, percent, times
from harness.report.words import Name, arm_name, common_settings, told_apart
from harness.results.published import FIGURES, Published, published_for
from harness.results.schema import LatencyPromptRow, LatencyRow

# Rows of the prompts files by run.
Prompts = Mapping[str | None, Sequence[LatencyPromptRow]]


@dataclass(frozen=True)
class Pair:
    """The speculative arm of a run, with the regular one; in a run without a draft the regular arm is both.

    Attributes:
        regular: None where the run has no such row.
        best: whether no other K of the same pair and settings is faster.
        chosen: whether it is the best of several K.
    """

    run: Run
    regular: LatencyRow | None
    row: LatencyRow
    name: Name
    best: bool = False
    chosen: bool = False

    @property
    def partial(self) -> bool:
        return self.run.status != "ok"

    @property
    def marked(self) -> bool:
        """Whether its row stands out: no small trial's does."""
        return self.chosen and self.row.speedup_low is not None

    @property
    def worth(self) -> tuple[int, float]:
        """Orders pairs by speed-up: a measured one before a partial one before none."""
        if self.row.speedup is None:
            return -1, 0.0
        return (0 if self.partial else 1), self.row.speedup


def latency_pairs(runs: Sequence[Run]) -> list[Pair]:
    """Pairs by their best speed-up, K ascending within a pair, targets alone last; real ones before all others."""
    shown = [run for run in runs if run.status != "incomplete"]
    names = told_apart([run.last for run in shown])
    pairs = [Pair(run, run.row("regular"), run.last, name) for run, name in zip(shown, names, strict=True)]
    ordered = []
    for group in groups(pairs):
        top = max(group, key=attrgetter("worth"))
        several = len({pair.name.num_draft_tokens for pair in group}) > 1
        complete, speedup = top.worth
        for pair in group:
            best = pair is top and complete == 1
            place = (not top.row.real, -complete, -speedup, top.name.group)
            ordered.append((place, replace(pair, best=best, chosen=best and several)))
    return [pair for _, pair in sorted(ordered, key=lambda item: item[0])]


def groups(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs that differ in K alone, in their order; K ascending."""
    found: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        found.setdefault(pair.name.group, []).append(pair)
    return [sorted(group, key=lambda pair: pair.name.place) for group in found.values()]


def latency_tables(pairs: Sequence[Pair], prompts: Prompts) -> list[Table | None]:
    """The tables that compare runs, as far as there is something to compare."""
    return [pairs_table(pairs), _categories(pairs, prompts), _reasons(pairs), _arms(pairs)] if pairs else []


def pairs_table(pairs: Sequence[Pair]) -> Table:
    """Speed-up of each pair and K."""
    repeated = any(pair.run.times > 1 for pair in pairs)
    columns = (
        *_PAIR,
        Column("regular\nms/token", number(), "regular.ms_per_token"),
        Column("spec.\nms/token", number(), lambda pair: None if pair.row is pair.regular else pair.row.ms_per_token),
        Column("speed-up", times, "row.speedup"),
        Column("95 %\ninterval", of=lambda pair: latency.speedup_bounds(pair.row)),
        Column("predicted", times, "row.predicted_speedup"),
        Column("accepted", percent, "row.acceptance_rate"),
        Column("", of=_remark, optional=True),
        Column("runs", of=lambda pair: pair.run.times if repeated else None, optional=True),
    )
    rows = [pair.row for pair in pairs]
    notes = ["runs: how often this was measured; the newest is shown."] if repeated else []
    if any(row.speedup is not None and row.speedup_low is None for row in rows):
        notes.append(f"{latency.NO_INTERVAL[0].upper()}{latency.NO_INTERVAL[1:]}.")
    notes += latency.caveats(rows)
    return Table.of("pairs", "Speed-up", pairs, columns, **_MARKED, about=common_settings(rows), notes=tuple(notes))


def fastest(pairs: Sequence[Pair]) -> Line | None:
    """The sentence about the fastest pair; in bold if its speed-up has an interval."""
    # Random weights, or a coin in place of the rule, are no finding where there is a real one.
    pairs = [pair for pair in pairs if pair.row.real] or list(pairs)
    best = next((pair for pair in pairs if pair.best), None)
    if best is None:
        measured = [pair for pair in pairs if pair.row.ms_per_token and not pair.row.draft and not pair.partial]
        alone = [f"{pair.name.label(', ')}: {pair.row.ms_per_token:.2f} ms/token" for pair in measured]
        return Line(f"Without a draft: {'; '.join(alone)}.", "strong") if alone else None
    row, name, several = best.row, best.name.label(", "), len(groups(pairs)) > 1
    speedup = latency.speedup_in_words(row)
    style: Style = "plain" if row.speedup_low is None else "strong"
    if several and (row.speedup or 0) < 1:
        return Line(f"No pair gains; the best, {name}, is at {speedup}.", style)
    if found := latency.finding(row):
        return Line(f"{name} {found}: {speedup}.", style)
    theory = f"; theory predicts {times(row.predicted_speedup)}" if row.predicted_speedup else ""
    return Line(f"{'Fastest: ' if several else ''}{name}: {speedup}{theory}.", style)


def published_table(pairs: Sequence[Pair]) -> Table | None:
    """Published figures next to ours, for the pairs that others measured."""
    found: dict[tuple[int, str | None], _Next] = {}
    alone = [pair for pair in pairs if pair.row.speedup is None and not pair.partial]
    for pair in (*(pair for pair in pairs if pair.best), *alone):
        for figure in published_for(pair.row):
            name, ours = (pair.name.label(), pair.row) if figure.drafts else (str(pair.row.model), pair.regular)
            key = FIGURES.index(figure), None if figure.drafts else pair.row.devices
            if ours is not None:
                found.setdefault(key, _Next(name, figure, ours))
    columns = (
        Column("pair", text=True, of="name"),
        Column("published by", text=True, of="theirs.source"),
        Column("their hardware", text=True, of=lambda found: found.theirs.hardware or "not stated"),
        Column("our hardware", text=True, of="ours.devices"),
        Column("their\nms/token", _published_ms, "theirs.ms_per_token"),
        Column("our\nms/token", number(), "ours.ms_per_token"),
        Column("their\nspeed-up", of="theirs.speedup_text"),
        Column("our\nspeed-up", times, "ours.speedup"),
        Column("95 %\ninterval", of=lambda found: latency.speedup_bounds(found.ours)),
    )
    about = "Other hardware, prompts and code: compare speed-ups rather than times."
    table = Table.of("published", "Next to published figures", found.values(), columns, about=about)
    return table if found else None


def all_published_table() -> Table:
    """Every published figure that we know of."""
    columns = (
        Column("pair", text=True, of="named"),
        Column("published by", text=True, of="source"),
        Column("hardware", text=True, of="hardware"),
        Column("ms/token", _published_ms, "ms_per_token"),
        Column("speed-up", of="speedup_text"),
        Column("correct products %, regular / speculative", of="accuracy_text"),
    )
    return Table.of("all_published", "All published figures", FIGURES, columns, in_full=True)


def predicted_curve(group: Sequence[Pair]) -> list[tuple[int, float]]:
    """Speed-up that theory predicts for each K up to a little past the largest measured: (K, speed-up).

    (1 − α^{K+1}) / ((1 − α)(K c + v)) of Leviathan et al. 2023 with what the runs measured: α and c are means over the
    runs; the cost v of verifying K + 1 tokens, in target steps, is interpolated linearly between the measured ones and
    1 at K = 0. Empty where no run has these figures.
    """
    known = [
        (pair.name.num_draft_tokens, alpha, *costs)
        for pair in group
        if isinstance(pair.name.num_draft_tokens, int)
        and (costs := latency.costs_in_steps(pair.regular, pair.row))
        and (alpha := pair.row.conditional_acceptance_rate) is not None
    ]
    if not known:
        return []
    alpha = min(sum(alpha for _, alpha, _, _ in known) / len(known), 1 - 1e-9)
    draft = sum(draft for _, _, draft, _ in known) / len(known)
    verify = {0: 1.0} | {k: verify for k, _, _, verify in known}
    return [
        (k, (1 - alpha ** (k + 1)) / (1 - alpha) / (k * draft + _between(verify, k)))
        for k in range(1, max(max(verify) + 2, 8) + 1)
    ]


def _between(points: Mapping[int, float], x: int) -> float:
    """The polyline through the points at x; past the last point its last piece goes on."""
    places = sorted(points)
    right = max(1, next((index for index, place in enumerate(places) if place >= x), len(places) - 1))
    a, b = places[right - 1], places[right]
    return points[a] + (points[b] - points[a]) * (x - a) / (b - a)


@dataclass(frozen=True)
class _Next:
    """A published figure next to ours."""

    name: str
    theirs: Published
    ours: LatencyRow


_PAIR = (Column("pair", text=True, of="name.cell", once=True), Column("K", of="name.num_draft_tokens"))


_MARKED = {"strong": "marked", "faint": "partial"}


def _remark(pair: Pair) -> str | None:
    if pair.partial:
        return f"{pair.run.status}\n{pair.row.num_prompts or 0} prompts"
    return "best K" if pair.chosen else None


def _categories(pairs: Sequence[Pair], prompts: Prompts) -> Table | None:
    """Pairs by category: speed-up with interval, and tokens per iteration."""
    cells: dict[str, dict[str, str]] = {}
    counts: dict[str, int] = {}
    for pair in pairs:
        found = latency.by_category(prompts.get(pair.row.run, ()), pair.row) if pair.best else []
        for category in found if len(found) > 1 else ():
            bounds = interval(category.speedup.low, category.speedup.high)
            length = category.mean_acceptance_length
            texts = (times(category.speedup.estimate), bounds, length and f"{length:.2f} tokens")
            cells.setdefault(pair.name.label(), {})[category.name] = "\n".join(text for text in texts if text)
            counts[category.name] = max(category.num_prompts, counts.get(category.name, 0))
    rows = (TableRow((name, *(of_pair.get(category) for category in counts))) for name, of_pair in cells.items())
    columns = (Column("pair", text=True), *(Column(f"{category} ({count})") for category, count in counts.items()))
    about = "Speed-up, its 95 % interval, and tokens per iteration; in brackets the number of prompts."
    return Table("categories", "Pairs by category of prompts", columns, tuple(rows), about) if cells else None


def _reasons(pairs: Sequence[Pair]) -> Table | None:
    """Why a pair is as fast as it is: acceptance, costs, and what holds it back."""
    reasoned = [pair for pair in pairs if pair.row.mean_acceptance_length is not None]
    columns = (
        *_PAIR,
        Column("accepted", percent, "row.acceptance_rate"),
        Column("of those\ntested", percent, "row.conditional_acceptance_rate"),
        Column("tokens per\niteration", number(), "row.mean_acceptance_length"),
        Column("drafting\nms", number(), "row.draft_ms"),
        Column("verifying\nms", number(), "row.verify_ms"),
        Column("rest\nms", number(), lambda pair: latency.rest_ms(pair.row)),
        Column("target\nstep ms", number(), "regular.target_step_ms"),
        Column("of\npredicted", "{:.0%}".format, lambda pair: latency.share_of_predicted(pair.row)),
        Column("by\nposition, %", _positions, "row.acceptance_by_position"),
    )
    times_and_yield = "Where an iteration's time goes, and how many tokens it yields."
    about = f"{times_and_yield} Of predicted: measured over predicted speed-up."
    brakes = [(pair.name.label(), latency.brake(pair.regular, pair.row)) for pair in pairs if pair.best]
    notes = tuple(f"{name}: {why}." for name, why in brakes if why)
    table = Table.of("reasons", "The reason", reasoned, columns, **_MARKED, about=about, notes=notes)
    return table if reasoned else None


def _arms(pairs: Sequence[Pair]) -> Table:
    """Every arm's own figures."""
    arms = [(pair, row) for pair in pairs for row in pair.run.rows]
    columns = (
        Column("pair", text=True, of=lambda arm: arm[0].name.cell, once=True),
        Column("arm", text=True, of=lambda arm: arm_name(arm[1])),
        Column("K", of=lambda arm: arm[0].name.num_draft_tokens if arm[1] is arm[0].row else None),
        Column("ms/token", number(), lambda arm: arm[1].ms_per_token),
        Column("std", number(), lambda arm: arm[1].ms_per_token_std),
        Column("median", number(), lambda arm: arm[1].ms_per_token_median),
        Column("tokens/s", number(1), lambda arm: arm[1].tokens_per_second),
        Column("first\ntoken ms", number(1), lambda arm: arm[1].time_to_first_token_ms),
        Column("peak\nmemory", amount, lambda arm: arm[1].peak_memory_bytes, optional=True),
        Column("greedy texts\nidentical", of=lambda arm: _identical(arm[1]), optional=True),
    )
    return Table.of("all_arms", "Times of each arm", arms, columns, faint=lambda arm: arm[0].partial, in_full=True)


def _positions(rates: Sequence[float | None]) -> str:
    return " ".join("–" if rate is None else f"{100 * rate:.0f}" for rate in rates)


def _identical(row: LatencyRow) -> str | None:
    return None if row.identical_prompts is None else f"{row.identical_prompts} of {row.num_prompts}"


def _published_ms(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"
