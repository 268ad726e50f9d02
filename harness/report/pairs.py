"""Many runs of `latency`: pairs by speed-up, the best K of each, what drafts best, and the tables that compare them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
from scipy.interpolate import make_interp_spline

from harness.config.amounts import amount
from harness.menu.records import METHODS
from harness.report import latency
from harness.report.categories import Category, by_category
from harness.report.caveats import caveats
from harness.report.costs import (
    costs_in_steps,
    gave_up,
    held_back,
    rest_ms,
    share_of_predicted,
    tokens_per_iteration,
)
from harness.report.runs import Run
from harness.report.table import (
    Column,
    Document,
    Line,
    Table,
    grouped,
    interval,
    number,
    percent,
    times,
)
from harness.report.words import Name, common_settings, in_words, told_apart
from harness.results.published import FIGURES, Published, published_for
from harness.results.schema import LatencyRow
from harness.results.work import why_no_verdict


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

    @functools.cached_property
    def categories(self) -> list[Category]:
        """Speed-up by category of prompts at the best K; empty where there is only one category."""
        found = by_category(self.run.prompts, self.row) if self.best else []
        return found if len(found) > 1 else []

    @property
    def marked(self) -> bool:
        """Whether its row stands out: no small trial's does."""
        return self.chosen and self.row.speedup_low is not None

    @property
    def load(self) -> float:
        """Rows of a batch or requests in flight; requests per second where these were set."""
        return self.row.request_rate or self.row.batch_size or 1

    @property
    def unit_of_load(self) -> str:
        """What `load` counts."""
        if self.row.request_rate:
            return "requests per second"
        return "rows of a batch, or requests in flight"

    @property
    def name_without_load(self) -> Name:
        """The same for pairs that differ in their load alone."""
        load = in_words(self.row, "batch_size")
        return replace(self.name, settings=[text for text in self.name.settings if text != load])

    @property
    def worth(self) -> tuple[int, float]:
        """Orders pairs by speed-up: a measured one before a partial one before none."""
        if self.row.speedup is None:
            return -1, 0.0
        return (0 if self.partial else 1), self.row.speedup


def latency_pairs(runs: Sequence[Run]) -> list[Pair]:
    """Pairs by their best speed-up, targets alone last; real ones before all others.

    Within a pair by load and then by K, ascending.
    """
    shown = [run for run in runs if run.status != "incomplete"]
    names = told_apart([run.last for run in shown])
    pairs = [
        Pair(run, run.row("regular"), run.last, name)
        for run, name in zip(shown, names, strict=True)
    ]
    ordered = []
    for family in grouped(groups(pairs), _family).values():
        tops = [max(group, key=attrgetter("worth")) for group in family]
        first = max(tops, key=attrgetter("worth"))
        complete, speedup = first.worth
        place = not first.row.real, -complete, -speedup, first.name.group
        for group, top in sorted(zip(family, tops, strict=True), key=lambda item: item[1].load):
            several = len({pair.name.num_draft_tokens for pair in group}) > 1
            for pair in group:
                best = pair is top and top.worth[0] == 1
                ordered.append((place, replace(pair, best=best, chosen=best and several)))
    return [pair for _, pair in sorted(ordered, key=lambda item: item[0])]


def _family(group: Sequence[Pair]) -> tuple[object, ...]:
    """The same for pairs that differ in K and in their load alone."""
    pair = group[0]
    return pair.row.real, pair.unit_of_load, pair.name_without_load.group


def groups(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs that differ in K alone, in their order; K ascending."""
    return [
        sorted(group, key=attrgetter("name.place"))
        for group in grouped(pairs, attrgetter("name.group")).values()
    ]


def latency_tables(pairs: Sequence[Pair]) -> Document:
    """A single run in detail, or several compared."""
    if len(pairs) == 1 and not pairs[0].partial:
        return latency.latency_document(pairs[0].run.rows, pairs[0].run.prompts)
    return [
        pairs_table(pairs),
        _categories(pairs),
        _reasons(pairs),
        _arms(pairs),
        *methods_tables(pairs),
    ]


def pairs_table(pairs: Sequence[Pair]) -> Table:
    """Speed-up of each pair and K."""
    repeated = any(pair.run.times > 1 for pair in pairs)
    columns = (
        *_PAIR,
        Column("regular\nms/token", number(), "regular.ms_per_token"),
        Column(
            "spec.\nms/token",
            number(),
            lambda pair: None if pair.row is pair.regular else pair.row.ms_per_token,
        ),
        latency.SPEEDUP.at("row"),
        latency.BOUNDS.at("row"),
        Column("predicted", times, "row.predicted_speedup"),
        latency.ACCEPTED.at("row"),
        Column("", of=_remark, optional=True),
        Column("runs", of=lambda pair: pair.run.times if repeated else None, optional=True),
    )
    rows = [pair.row for pair in pairs]
    notes = ["runs: how often this was measured; the newest is shown."] if repeated else []
    without = [
        latency.no_interval(row)
        for row in rows
        if row.speedup is not None and row.speedup_low is None
    ]
    notes += [f"{reason.capitalize()}." for reason in dict.fromkeys(without)]
    for pair in pairs:
        if (reason := why_no_verdict(pair.run.rows)) is not None:
            notes.append(f"{pair.name.label(', ')}: no verdict: {reason}.")
    notes += caveats(rows)
    return Table.of(
        "pairs",
        "Speed-up",
        pairs,
        columns,
        **_MARKED,
        about=common_settings(rows),
        notes=tuple(notes),
    )


def fastest(pairs: Sequence[Pair]) -> list[Line]:
    """The sentence about the fastest pair, if there is one: of those with an interval, in bold, where there are any."""
    # Random weights, or a coin in place of the rule, are no finding where there is a real one.
    pairs = [pair for pair in pairs if pair.row.real] or list(pairs)
    bests = [pair for pair in pairs if pair.best]
    bests.sort(key=attrgetter("worth"), reverse=True)
    best = next(
        (pair for pair in bests if pair.row.speedup_low is not None), next(iter(bests), None)
    )
    if best is None:
        measured = [
            pair
            for pair in pairs
            if pair.row.ms_per_token and not pair.row.draft and not pair.partial
        ]
        alone = [
            f"{pair.name.label(', ')}: {pair.row.ms_per_token:.2f} ms/token" for pair in measured
        ]
        return [Line(f"Without a draft: {'; '.join(alone)}.", "strong")] if alone else []
    row, name, several = best.row, best.name.label(", "), len(groups(pairs)) > 1
    # A few prompts may show any speed-up.
    among = "" if best is bests[0] else " with an interval"
    said = f"{f'Fastest{among}: ' if several else ''}{name}: {latency.speedup_in_words(row)}"
    if row.predicted_speedup:
        said += f"; theory predicts {times(row.predicted_speedup)}"
    if several and (row.speedup or 0) < 1:
        said = f"No pair{among} gains; the best, {name}, is at {latency.speedup_in_words(row)}"
    elif found := latency.finding(row):
        said = f"{name} {found}: {latency.speedup_in_words(row)}"
    return [Line(f"{said}.", "plain" if row.speedup_low is None else "strong")]


def published_tables(pairs: Sequence[Pair]) -> list[Table]:
    """Published figures next to ours, for the pairs that others measured; and every published figure we know of."""
    found: dict[tuple[int, str | None], _Next] = {}
    alone = [pair for pair in pairs if pair.row.speedup is None and not pair.partial]
    for pair in (*(pair for pair in pairs if pair.best), *alone):
        for figure in published_for(pair.row):
            name, ours = (
                (pair.name.label(), pair.row)
                if figure.drafts
                else (str(pair.row.model), pair.regular)
            )
            key = FIGURES.index(figure), None if figure.drafts else pair.row.devices
            if ours is not None:
                found.setdefault(key, _Next(name, figure, ours))
    columns = (
        Column("pair", text=True, of="name"),
        Column("published by", text=True, of="theirs.source"),
        Column("their hardware", text=True, of=lambda found: found.theirs.hardware or "not stated"),
        Column("our hardware", text=True, of="ours.devices", optional=True),
        Column(
            "their\nms/token", lambda ms: f"{ms:.{0 if ms >= 10 else 2}f}", "theirs.ms_per_token"
        ),
        Column("our\nms/token", number(), "ours.ms_per_token", optional=True),
        Column("their\nspeed-up", of="theirs.speedup_text"),
        Column("our\nspeed-up", times, "ours.speedup", optional=True),
        replace(latency.BOUNDS.at("ours"), optional=True),
    )
    about = "Other hardware, prompts and code: compare speed-ups rather than times."
    next_to_ours = Table.of(
        "published", "Next to published figures", found.values(), columns, about=about
    )
    correct = Column("correct products %, regular / speculative", of="theirs.accuracy_text")
    every = [_Next(figure.named, figure, None) for figure in FIGURES]
    return [
        next_to_ours,
        Table.of(
            "all_published", "All published figures", every, (*columns, correct), in_full=True
        ),
    ]


def predicted_curve(group: Sequence[Pair]) -> list[tuple[int, float]]:
    """Speed-up that theory predicts for each K up to a little past the largest measured: (K, speed-up).

    (1 − α^{K+1}) / ((1 − α)(K c + v)) of Leviathan et al. 2023 with what the runs measured: α and c are means over the
    runs; the cost v of verifying K + 1 tokens, in target steps, is interpolated linearly between the measured ones and
    1 at K = 0. Empty where no run has these figures.
    """
    known = [
        (pair.name.num_draft_tokens, pair.row.conditional_acceptance_rate, *costs)
        for pair in group
        if isinstance(pair.name.num_draft_tokens, int)
        and pair.row.conditional_acceptance_rate is not None
        if (costs := costs_in_steps(pair.regular, pair.row))
    ]
    if not known:
        return []
    _, alpha, draft, _ = np.mean(known, axis=0)
    alpha = min(alpha, 1 - 1e-9)
    measured, verify = zip(
        *sorted(({0: 1.0} | {k: verify for k, _, _, verify in known}).items()), strict=True
    )
    k = np.arange(1, max(measured[-1] + 2, 8) + 1)
    speedups = (
        (1 - alpha ** (k + 1))
        / (1 - alpha)
        / (k * draft + make_interp_spline(measured, verify, k=1)(k))
    )
    return list(zip(k.tolist(), speedups.tolist(), strict=True))


def methods_tables(pairs: Sequence[Pair]) -> list[Table]:
    """What drafts best: one table per target and conditions with several methods, each method at its best K."""
    drafting = [pair for pair in pairs if pair.best and pair.row.draft]
    found = grouped(
        drafting, lambda pair: tuple(getattr(pair.row, name) for name in _ALIKE)
    ).values()
    several = [group for group in found if len({pair.row.draft for pair in group}) > 1]
    return [_methods(place, group, len(several) > 1) for place, group in enumerate(several)]


def _methods(place: int, group: Sequence[Pair], one_of_several: bool) -> Table:
    """Methods by speed-up, with what each costs and what holds it back."""
    row = group[0].row
    about = (
        "Each at its best K. Iterations that proposed nothing count as well; c is the cost of a draft token and"
        " v that of a verification, in steps of the target; memory is the draft's own weights. Without what holds it"
        " back most, a method would be as fast as in brackets: with a free draft, a verification in one step, or all"
        " tokens accepted."
    )
    columns = (
        Column(
            "method",
            text=True,
            of=lambda pair: " · ".join([pair.row.draft, *pair.name.settings, *pair.name.further]),
        ),
        *_PAIR[1:],
        latency.SPEEDUP.at("row"),
        latency.BOUNDS.at("row"),
        Column("tokens per\niteration", number(), lambda pair: tokens_per_iteration(pair.row)),
        Column("c", lambda costs: f"{costs[0]:.3f}", _costs),
        Column("v", lambda costs: f"{costs[1]:.2f}", _costs),
        Column("memory", of=_memory),
        Column(
            "held back most",
            text=True,
            of=lambda pair: held_back(pair.regular, pair.row, brief=True),
        ),
    )
    title = f"What drafts best for {row.model}" + (
        f", batches of {row.batch_size}" if one_of_several else ""
    )
    by_speedup = sorted(group, key=attrgetter("worth"), reverse=True)
    return Table.of(f"methods{place or ''}", title, by_speedup, columns, about=about)


def _costs(pair: Pair) -> tuple[float, float] | None:
    return None if gave_up(pair.row) else costs_in_steps(pair.regular, pair.row)


def _held_back(pair: Pair) -> str | None:
    return held_back(pair.regular, pair.row)


def _memory(pair: Pair) -> str | None:
    sizes = pair.row.draft_weight_bytes
    method = METHODS.all().get(pair.row.draft_method or "")
    if method is not None and method.memory is not None:
        return method.memory
    return amount(sum(sizes.values())) if sizes else None


class _Next(NamedTuple):
    """A published figure next to ours, where we have one."""

    name: str
    theirs: Published
    ours: LatencyRow | None


# Methods compare under the same conditions only.
_ALIKE = "model quantization dtype devices temperature top_k top_p batch_size max_new_tokens prompts weights".split()
_PAIR = (
    Column("pair", text=True, of="name.cell", once=True),
    Column("K", of="name.num_draft_tokens", names=True),
)
_MARKED = {"strong": "marked", "faint": "partial"}


def _remark(pair: Pair) -> str | None:
    if pair.partial:
        return f"{pair.run.status}\n{pair.row.num_prompts or 0} prompts"
    if why_no_verdict(pair.run.rows) is not None:
        return "no verdict"
    return "best K" if pair.chosen else None


def _categories(pairs: Sequence[Pair]) -> Table:
    """Pairs by category: speed-up with interval, and tokens per iteration."""
    found = [pair for pair in pairs if pair.categories]
    counts: dict[str, set[int]] = {}
    for category in (category for pair in found for category in pair.categories):
        counts.setdefault(category.name, set()).add(category.num_prompts)

    def column(name: str) -> Column:
        of = {
            id(pair): category
            for pair in found
            for category in pair.categories
            if category.name == name
        }
        # Runs over different numbers of prompts say theirs in the cells.
        counted = len(counts[name]) > 1
        heading = name if counted else f"{name} ({min(counts[name])})"
        return Column(
            heading, lambda category: _category(category, counted), lambda pair: of.get(id(pair))
        )

    columns = (Column("pair", text=True, of=lambda pair: pair.name.label()), *map(column, counts))
    about = (
        "Speed-up, its 95 % interval, and tokens per iteration; in brackets the number of prompts."
    )
    return Table.of("categories", "Pairs by category of prompts", found, columns, about=about)


def _category(found: Category, counted: bool) -> str:
    length = found.mean_acceptance_length and f"{found.mean_acceptance_length:.2f} tokens"
    speedup = times(found.speedup.estimate) + (f" ({found.num_prompts})" if counted else "")
    parts = speedup, interval(found.speedup.low, found.speedup.high), length
    return "\n".join(part for part in parts if part)


def _reasons(pairs: Sequence[Pair]) -> Table:
    """Why a pair is as fast as it is: acceptance, costs, and what holds it back."""
    reasoned = [pair for pair in pairs if pair.row.mean_acceptance_length is not None]
    columns = (
        *_PAIR,
        latency.ACCEPTED.at("row"),
        Column("of those\ntested", percent, "row.conditional_acceptance_rate"),
        Column("tokens per\niteration", number(), lambda pair: tokens_per_iteration(pair.row)),
        Column("drafting\nms", number(), "row.draft_ms"),
        Column("verifying\nms", number(), "row.verify_ms"),
        Column("rest\nms", number(), lambda pair: rest_ms(pair.row)),
        Column("target\nstep ms", number(), "regular.target_step_ms"),
        Column("of\npredicted", "{:.0%}".format, lambda pair: share_of_predicted(pair.row)),
        Column("by\nposition, %", _positions, "row.acceptance_by_position"),
    )
    times_and_yield = "Where an iteration's time goes, and how many tokens it yields."
    about = f"{times_and_yield} Of predicted: measured over predicted speed-up."
    losing = [
        (pair.name.label(), _held_back(pair))
        for pair in pairs
        if pair.best and (pair.row.speedup or 1) < 1
    ]
    notes = tuple(f"{name}: {why}." for name, why in losing if why)
    return Table.of("reasons", "The reason", reasoned, columns, **_MARKED, about=about, notes=notes)


def _positions(rates: Sequence[float | None]) -> str:
    return " ".join("–" if rate is None else f"{100 * rate:.0f}" for rate in rates)


def _arms(pairs: Sequence[Pair]) -> Table:
    """Every arm's own figures."""
    arms = [(pair, row) for pair in pairs for row in pair.run.rows]
    of_rows = (
        *latency.ARM,
        Column("median\nms/token", number(), "ms_per_token_median"),
        Column("greedy texts\nidentical", of=_identical, optional=True),
    )
    columns = (
        _PAIR[0].at(itemgetter(0)),
        Column(
            "K",
            of=lambda arm: arm[0].name.num_draft_tokens if arm[1] is arm[0].row else None,
            names=True,
        ),
        *(column.at(itemgetter(1)) for column in of_rows),
    )
    return Table.of(
        "all_arms",
        "Times of each arm",
        arms,
        columns,
        faint=lambda arm: arm[0].partial,
        in_full=True,
    )


def _identical(row: LatencyRow) -> str | None:
    return (
        None if row.identical_prompts is None else f"{row.identical_prompts} of {row.num_prompts}"
    )
