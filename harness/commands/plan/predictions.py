"""Predictions of `plan costs=… acceptance=…`: what an iteration yields over its price, wherever that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from harness.commands.plan.load import Load, UnderLoad
from harness.commands.plan.rows import PlanRow
from harness.config.errors import SettingError
from harness.config.run import RunSettings
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Table, interval, number, times
from harness.results import cost_tables
from harness.results.cost_tables import Served
from harness.results.iteration_cost import Best, IterationCost, Point
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval

# A prediction counts as right within this share of what was measured, where intervals do not judge it.
_CLOSE = 0.05
_LOAD = (
    Column("requests\nper second", "{:g}".format, "request_rate", optional=True),
    Column("in\nflight", of="batch_size", identifies_row=True, optional=True),
)
# Loads whose best K is named in a sentence.
_MOST_NAMED = 4


@dataclass(frozen=True)
class Prediction:
    """Of one draft, load and K.

    Attributes:
        best: of this draft and load.
        measured: the same as the texts' own runs measured it; None where they did not.
        load: requests in flight, or at a rate, that were asked for; then `served`, of the regular arm and of K, are how
            they would be answered, and `as_measured` how these runs answered them.
    """

    draft: str
    point: Point
    tokens: Interval
    speedup: Interval
    best: Best
    measured: float | None = None
    load: Load | None = None
    served: Sequence[Served] = ()
    as_measured: Sequence[Served | None] = ()

    def columns(self) -> dict[str, Any]:
        columns = self._of_load()
        return columns | {
            "draft": self.draft or None,
            "num_draft_tokens": self.point.width - 1,
            "batch_size": self.point.rows or None,
            "break_even_tokens": self.point.steps.estimate if self.point.steps.is_known else None,
            "iteration_ms": self.point.ms,
            "predicted_speedup": self.speedup,
            "predicted_tokens_per_iteration": self.tokens.estimate,
            "best_num_draft_tokens": self.best.k,
            "as_good_num_draft_tokens": [*self.best.alike] or None,
            "measured_speedup": self.measured,
        }

    def _of_load(self) -> dict[str, Any]:
        if self.load is None:
            return {}
        columns: dict[str, Any] = {"request_rate": self.load.rate}
        for kind, both in (("predicted", self.served), ("measured", self.as_measured)):
            for arm, served in zip(("regular_", ""), both, strict=True):
                if served is not None:
                    columns[f"{kind}_{arm}tokens_per_second"] = served.tokens_per_second
                    columns[f"{kind}_{arm}first_token_ms"] = served.first_ms
                    columns[f"{kind}_{arm}goodput_share"] = served.good
        return columns


def predictions(
    costs: cost_tables.Table,
    accepted: cost_tables.Table,
    load: Load | None = None,
    settings: RunSettings | None = None,
) -> tuple[list[Prediction], list[str]]:
    """All that costs and yields have in common, and why there is no more.

    Args:
        load: that is asked for; None for every one that was measured.
        settings: of answers under it.

    Raises:
        SettingError: they have nothing in common.
    """
    found: list[Prediction] = []
    # Each with what it is about.
    problems: list[tuple[str, SettingError]] = []
    for draft, cost in costs.costs.items():
        names = {draft, "", *(accepted.yields if not draft else ())}
        known = [name for name in accepted.yields if name in names]
        if not known:
            others = ", ".join(accepted.yields)
            error = SettingError("acceptance", f"is of {others}, and costs of {draft}")
            problems.append((error.setting, error))
        for name in known:
            yields = accepted.yields[name]
            own = draft or name
            if load is not None and settings is not None:
                try:
                    found += _under_load(own, cost, yields, accepted.served, load, settings)
                except SettingError as error:
                    problems.append((own or error.setting, error))
                continue
            for rows in cost.loads:
                try:
                    best = cost.best_k(yields, rows)
                except SettingError as error:
                    problems.append((draft or name or error.setting, error))
                    continue
                for k in cost.ks(rows):
                    if k in yields:
                        tokens = yields[k]
                        speedup = cost.speedup(tokens, k, rows)
                        measured = accepted.measured.get((name, k, rows))
                        point = cost.at(k, rows)
                        found.append(Prediction(own, point, tokens, speedup, best, measured))
    if not found:
        raise problems[0][1]
    notes = [f"{subject} {error.rule}" for subject, error in problems]
    return found, [*dict.fromkeys([*notes, *costs.notes, *accepted.notes])]


def _under_load(
    draft: str,
    cost: IterationCost,
    yields: Mapping[int, Interval],
    measured: Mapping[tuple[str, int, cost_tables.LoadKey], Served],
    load: Load,
    settings: RunSettings,
) -> list[Prediction]:
    """Predictions for each K at a load, of decoding and of requests.

    Raises:
        SettingError: the load is beyond those that have a price.
    """
    rows = load.in_flight
    key = (rows, load.rate)
    under_load = UnderLoad(cost, settings, load)
    if rows is not None:
        cost = cost.between(rows)
        best = cost.best_k(yields, rows)
        ks = cost.ks(rows)
    else:
        ks = sorted({k for one in cost.loads for k in cost.ks(one)})
    found = []
    for k in ks:
        if k not in yields:
            continue
        beside = [measured.get((draft, one, key)) for one in (0, k)]
        laps = [one.lap if one else None for one in beside]
        served = [
            under_load.served(one, tokens, lap)
            for one, tokens, lap in zip((0, k), (1.0, yields[k].estimate), laps, strict=True)
        ]
        regular, own = beside
        both = regular.ms_per_token / own.ms_per_token if regular and own else None
        if rows is not None:
            point, speedup = cost.at(k, rows), cost.speedup(yields[k], k, rows)
        else:
            point = Point(k + 1, 0, Interval())
            speedup = Interval(served[0].ms_per_token / served[1].ms_per_token)
            best = Best(k, speedup, [])
        one = Prediction(draft, point, yields[k], speedup, best, both, load, served, beside)
        found.append(one)
    if rows is None and found:
        most = max(found, key=lambda one: one.speedup.estimate).best
        found = [replace(one, best=most) for one in found]
    return found


def predictions_page(rows: Sequence[PlanRow], failed: Sequence[PlanRow] = ()) -> Page:
    """The best K at each load, and every K beside what was measured, where that is known.

    Args:
        failed: of the jobs that have no prediction, for their errors.
    """
    several = len({row.acceptance_source for row in rows}) > 1
    notes = dict.fromkeys(note for row in rows for note in (row.note or "").split("; ") if note)
    title = title_of_many(rows)
    if len({row.model for row in rows}) == 1:
        title = heading(rows[0], f"costs {rows[0].cost_source}")
        if not (rows[0].devices or rows[0].is_simulated):
            title = f"{rows[0].model} · costs {rows[0].cost_source}"
    columns = (
        Column("acceptance", of="acceptance_source", text=True, once=True, optional=True),
        Column("draft", of=lambda row: row.draft, text=True, once=True, optional=True),
        *_LOAD,
        Column("K", of="num_draft_tokens", identifies_row=True),
        Column("predicted\nspeed-up", times, "predicted_speedup.estimate"),
        Column("95 % interval", of=lambda row: interval(row.predicted_speedup), optional=True),
        Column("", of=_among_others, text=True, optional=True),
        Column("measured", times, "measured_speedup", optional=True),
        Column("tokens per\niteration", number(), "predicted_tokens_per_iteration"),
        Column("pays\nabove", number(), "break_even_tokens", optional=True),
        Column("an iteration\nms", number(), "iteration_ms.estimate", optional=True),
    )
    hidden = set() if several else {"acceptance"}
    if len({row.draft for row in rows}) == 1:
        hidden.add("draft")
    if {row.batch_size for row in rows} <= {1, None}:
        hidden.add("in flight")
    if len({(row.draft, row.num_draft_tokens) for row in rows}) == len({row.draft for row in rows}):
        # One K of each draft is the best of none.
        hidden.add("")
    shown = tuple(column for column in columns if column.name not in hidden)
    table = Table.of(
        "predictions",
        "What is predicted of decoding",
        rows,
        shown,
        strong=lambda row: row.num_draft_tokens == row.best_num_draft_tokens,
    )
    tables = [table]
    if any(row.predicted_tokens_per_second for row in rows):
        tables.insert(0, _requests(rows))
    return Page(
        title,
        [*_findings(rows), *_beside_measured(rows)],
        [
            *(f"Failed: {row.error}" for row in failed),
            *(f"{note[:1].upper()}{note[1:]}." for note in notes),
        ],
        tables,
        [("Covers", _covers(rows))],
        _next_steps(rows),
    )


class _Arm(NamedTuple):
    """A line of the table of requests: of the regular arm, or of K."""

    row: PlanRow
    arm: str

    def figure(self, name: str) -> float | None:
        value = getattr(self.row, name.format("" if self.arm != "regular" else "regular_"))
        return None if value is None else float(value)


def _requests(rows: Sequence[PlanRow]) -> Table:
    """How requests would be answered at the load that was asked for, and how they were."""
    lines = []
    regular = set()
    for row in rows:
        place = (row.acceptance_source, row.draft, row.batch_size, row.request_rate)
        if place not in regular:
            regular.add(place)
            lines.append(_Arm(row, "regular"))
        lines.append(_Arm(row, f"K={row.num_draft_tokens}"))

    def column(name: str, form: str, figure: str) -> Column:
        return Column(name, form.format, lambda line: line.figure(figure), optional=True)

    columns = (
        Column("acceptance", of="row.acceptance_source", text=True, once=True, optional=True),
        Column("draft", of="row.draft", text=True, once=True, optional=True),
        *(column.at("row") for column in _LOAD),
        Column("", of="arm", text=True),
        Column(
            "speed-up", times, lambda line: None if line.arm == "regular" else _estimate(line.row)
        ),
        column("tokens\nper second", "{:.1f}", "predicted_{}tokens_per_second"),
        column("\nmeasured", "{:.1f}", "measured_{}tokens_per_second"),
        column("first token\nms, median", "{:.1f}", "predicted_{}first_token_ms"),
        column("\nmeasured", "{:.1f}", "measured_{}first_token_ms"),
        column("within\nlimits", "{:.0%}", "predicted_{}goodput_share"),
        column("\nmeasured", "{:.0%}", "measured_{}goodput_share"),
    )
    hidden = set()
    for name, values in (
        ("draft", {row.draft for row in rows}),
        ("acceptance", {row.acceptance_source for row in rows}),
    ):
        if len(values) == 1:
            hidden.add(name)
    return Table.of(
        "requests",
        "",
        lines,
        tuple(column for column in columns if column.name not in hidden),
        strong=lambda line: line.arm == f"K={line.row.best_num_draft_tokens}",
    )


def best_in_words(rows: Sequence[PlanRow]) -> str:
    """`2.13× (1.98 to 2.30) at K=4`, of the highest prediction."""
    best = max(rows, key=_estimate)
    return f"{_speedup(best)} at K={best.num_draft_tokens}"


def _estimate(row: PlanRow) -> float:
    return row.predicted_speedup.estimate if row.predicted_speedup else 0.0


def _speedup(row: PlanRow) -> str:
    bounds = interval(row.predicted_speedup)
    return f"{times(_estimate(row))}{f' ({bounds})' if bounds else ''}"


def _among_others(row: PlanRow) -> str | None:
    if row.num_draft_tokens == row.best_num_draft_tokens:
        return "best K"
    return "as good" if row.num_draft_tokens in (row.as_good_num_draft_tokens or ()) else None


def _findings(rows: Sequence[PlanRow]) -> list[Line]:
    """For each acceptance the best draft and K, at one load or by load."""
    lines = []
    sources = grouped(rows, lambda row: str(row.acceptance_source))
    for source, members in sources.items():
        about = f"{source}: " if len(sources) > 1 else ""
        by_load = grouped(members, lambda row: row.request_rate or row.batch_size or 1)
        bests = [max(by_load[load], key=_estimate) for load in sorted(by_load)]
        drafts = {row.draft for row in members}
        if len(bests) == 1:
            lines.append(_of_one_load(bests[0], about, several=len(drafts) > 1))
            continue
        parts = []
        for (draft, k), same in groupby(bests, lambda row: (row.draft, row.num_draft_tokens)):
            rows_of_part = [*same]
            first, last = rows_of_part[0], rows_of_part[-1]
            name = f"{draft} K={k}" if len(drafts) > 1 else f"K={k}"
            loads, gains = f"{_load(first)}", _speedup(first)
            if first is not last:
                loads += f" to {_load(last)}"
                gains = f"{times(_estimate(first))} to {times(_estimate(last))}"
            at = (
                f"at {loads} requests per second"
                if first.request_rate
                else f"with {loads} in flight"
            )
            parts.append(f"{name} {at}: {gains}")
        more = f"; and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
        lines.append(Line(f"{about}predicted {'; '.join(parts[:_MOST_NAMED])}{more}", "strong"))
    return lines


def _load(row: PlanRow) -> str:
    return f"{row.request_rate or row.batch_size or 1:g}"


def _of_one_load(best: PlanRow, about: str, *, several: bool) -> Line:
    speedup = best.predicted_speedup
    assert speedup is not None
    style = "strong"
    if speedup.has_bounds and speedup.low > 1:
        style = "good"
    elif speedup.has_bounds and speedup.high < 1:
        style = "bad"
    name = f"{best.draft} K={best.num_draft_tokens}" if several else f"K={best.num_draft_tokens}"
    bounds = interval(speedup)
    more = [f"95 % interval {bounds}"] if bounds else []
    if best.as_good_num_draft_tokens:
        others = ", ".join(map(str, best.as_good_num_draft_tokens))
        more.append(f"cannot be told from it: K={others}")
    text = f"{about}{times(speedup.estimate)} predicted at {name}"
    return Line(text, style, "; ".join(more))  # type: ignore[arg-type]


def _beside_measured(rows: Sequence[PlanRow]) -> list[Line]:
    """How many predictions are what was measured."""
    known = [row for row in rows if row.measured_speedup]
    if not known:
        return []
    errors = [abs(_estimate(row) / (row.measured_speedup or 1.0) - 1) for row in known]
    close = sum(error <= _CLOSE for error in errors)
    text = (
        f"{close} of {len(known)} within {100 * _CLOSE:.0f} % of what was measured,"
        f" the farthest {100 * max(errors):.1f} % off"
    )
    return [Line(text)]


def _covers(rows: Sequence[PlanRow]) -> str:
    """What intervals cover and what is assumed."""
    covers = {
        str(row.predicted_speedup.covers)
        for row in rows
        if row.predicted_speedup and row.predicted_speedup.covers
    }
    intervals = (
        f"intervals are over {'; '.join(sorted(covers))}" if covers else "no interval is known"
    )
    requests = ""
    if any(row.predicted_tokens_per_second for row in rows):
        requests = " Requests are answered on the simulated engine's clock, at these costs."
    return (
        f"speed-ups are of decoding, without reading the prompt; {intervals}.{requests} It is assumed that an iteration"
        " costs the same with these texts, at about their lengths"
    )


def _next_steps(rows: Sequence[PlanRow]) -> list[Step]:
    best = max(rows, key=_estimate)
    largest = max(row.num_draft_tokens or 0 for row in rows if row.draft == best.draft)
    several = len({row.num_draft_tokens for row in rows if row.draft == best.draft}) > 1
    load = f" batch_size={best.batch_size}" if (best.batch_size or 1) > 1 else ""
    if best.request_rate:
        load = f" engine.rate={best.request_rate:g}"
    if several and best.num_draft_tokens == largest:
        command = f"harness latency … K={2 * largest}{load}"
        return [Step(f"K={largest} is the largest with a price", command=command)]
    command = f"harness latency … K={best.num_draft_tokens}{load}"
    return [Step("measure it", command=command)]
