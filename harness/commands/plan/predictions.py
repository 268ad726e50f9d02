"""Predictions of `plan costs=… acceptance=…`: what an iteration yields over its price, wherever that is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from harness.commands.plan.rows import PlanRow
from harness.config.errors import SettingError
from harness.config.synthetic import at_length, length_in_answers
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Table, number, times, with_bounds
from harness.results import cost_tables
from harness.results.iteration_cost import Best, Point
from harness.results.runs import grouped
from harness.results.statistics.interval import Interval

# A prediction counts as right within this share of what was measured, where intervals do not judge it.
_CLOSE = 0.05
# Loads whose best K is named in a sentence.
_MOST_NAMED = 4


@dataclass(frozen=True)
class Prediction:
    """Of one draft, load and K.

    Attributes:
        best: of this draft and load.
        measured: the same as the texts' own runs measured it; None where they did not.
        length: tokens of an answer; None where neither costs nor settings say it.
    """

    draft: str
    point: Point
    tokens: Interval
    speedup: Interval
    best: Best
    measured: float | None = None
    length: float | None = None

    def columns(self) -> dict[str, Any]:
        return {
            "draft": self.draft or None,
            "num_draft_tokens": self.point.width - 1,
            "batch_size": self.point.rows,
            "break_even_tokens": self.point.steps.estimate if self.point.steps.is_known else None,
            "iteration_ms": self.point.ms,
            "predicted_speedup": self.speedup,
            "predicted_tokens_per_iteration": self.tokens.estimate,
            "best_num_draft_tokens": self.best.k,
            "as_good_num_draft_tokens": [*self.best.alike] or None,
            "measured_speedup": self.measured,
            "max_new_tokens": self.length and round(self.length),
        }


def predictions(
    costs: cost_tables.Table,
    accepted: cost_tables.Table,
    load: int | None = None,
    length: float | None = None,
) -> tuple[list[Prediction], list[str]]:
    """All that costs and yields have in common, and why there is no more.

    Args:
        load: rows in flight that are asked for; None for all that were measured.
        length: tokens of the answers that are asked for; None for those that costs were measured with.

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
            error = SettingError("acceptance", f"has nothing of {draft}, only of {others}")
            problems.append((error.setting, error))
        for name in known:
            yields = accepted.yields[name]
            own = draft or name
            for rows in cost.loads if load is None else (load,):
                at_lengths = {
                    k: (length or cost.answer_length(k, rows)) for k in cost.ks(rows) if k in yields
                }
                tokens_by_k = {
                    k: _at_length(accepted, name, k, of_answers)
                    for k, of_answers in at_lengths.items()
                }
                try:
                    best = cost.best_k(tokens_by_k or yields, rows)
                except SettingError as error:
                    problems.append((draft or name or error.setting, error))
                    continue
                for k, tokens in tokens_by_k.items():
                    prediction = Prediction(
                        own,
                        cost.at(k, rows),
                        tokens,
                        cost.speedup(tokens, k, rows),
                        best,
                        accepted.measured.get((name, k, rows)),
                        at_lengths[k],
                    )
                    found.append(prediction)
    if not found:
        raise problems[0][1]
    notes = [f"{subject} {error.rule}" for subject, error in problems]
    return found, [*dict.fromkeys([*notes, *costs.notes, *accepted.notes])]


def _at_length(accepted: cost_tables.Table, name: str, k: int, length: float | None) -> Interval:
    """Tokens per iteration at K of answers of a length, where that of the yields is known, too."""
    tokens = accepted.yields[name][k]
    if length is None:
        return tokens
    if accepted.rates:
        return Interval(length_in_answers(accepted.rates, k, length))
    measured = accepted.lengths.get(name, math.nan)
    if math.isnan(measured) or round(measured) == round(length):
        return tokens
    return tokens.scaled(at_length(tokens.estimate, k, measured, length) / tokens.estimate)


def predictions_page(rows: Sequence[PlanRow], failed: Sequence[PlanRow] = ()) -> Page:
    """The best K at each load, and every K beside what was measured, where that is known.

    Args:
        failed: of the jobs that have no prediction, for their errors.
    """
    notes = dict.fromkeys(note for row in rows for note in (row.note or "").split("; ") if note)
    title = title_of_many(rows)
    if len({row.model for row in rows}) == 1:
        title = heading(rows[0], f"costs {rows[0].cost_source}")
        if not (rows[0].devices or rows[0].is_simulated):
            title = f"{rows[0].model} · costs {rows[0].cost_source}"
    # One K of each draft is the best of none.
    has_rivals = len({(row.draft, row.num_draft_tokens) for row in rows}) > len(
        {row.draft for row in rows}
    )
    columns = (
        Column("acceptance", of="acceptance_source", text=True, once=True, varies=True),
        Column("draft", of=lambda row: row.draft, text=True, once=True, varies=True),
        Column("in\nflight", of="batch_size", identifies_row=True, varies=True),
        Column("K", of="num_draft_tokens", identifies_row=True),
        Column("predicted speed-up\n(95 % interval)", with_bounds, "predicted_speedup"),
        Column(
            "", of=lambda row: _among_others(row) if has_rivals else None, text=True, optional=True
        ),
        Column("measured", times, "measured_speedup", optional=True),
        Column("tokens per\niteration", number(), "predicted_tokens_per_iteration"),
        Column("pays\nabove", number(), "break_even_tokens", optional=True),
        Column("an iteration\nms", number(), "iteration_ms.estimate", optional=True),
    )
    table = Table.of(
        "predictions",
        "What is predicted of decoding",
        rows,
        columns,
        strong=lambda row: row.num_draft_tokens == row.best_num_draft_tokens,
    )
    return Page(
        title,
        [*_findings(rows), *_beside_measured(rows)],
        [
            *(f"Failed: {row.error}" for row in failed),
            *(f"{note[:1].upper()}{note[1:]}." for note in notes),
        ],
        [table],
        [("Covers", _covers(rows))],
        _next_steps(rows),
    )


def best_in_words(rows: Sequence[PlanRow]) -> str:
    """`2.13× (1.98 to 2.30) at K=4`, of the highest prediction."""
    best = max(rows, key=_estimate)
    return f"{_speedup(best)} at K={best.num_draft_tokens}"


def _estimate(row: PlanRow) -> float:
    return row.predicted_speedup.estimate if row.predicted_speedup else 0.0


def _speedup(row: PlanRow) -> str:
    return f"{row.predicted_speedup or Interval():×}"


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
        by_load = grouped(members, lambda row: row.batch_size or 1)
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
            loads, gains = f"{first.batch_size or 1}", _speedup(first)
            if first is not last:
                loads += f" to {last.batch_size or 1}"
                gains = f"{times(_estimate(first))} to {times(_estimate(last))}"
            parts.append(f"{name} with {loads} in flight: {gains}")
        more = f"; and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
        lines.append(Line(f"{about}predicted {'; '.join(parts[:_MOST_NAMED])}{more}", "strong"))
    return lines


def _of_one_load(best: PlanRow, about: str, *, several: bool) -> Line:
    speedup = best.predicted_speedup
    assert speedup is not None
    style = "strong"
    if speedup.has_bounds and speedup.low > 1:
        style = "good"
    elif speedup.has_bounds and speedup.high < 1:
        style = "bad"
    name = f"{best.draft} K={best.num_draft_tokens}" if several else f"K={best.num_draft_tokens}"
    bounds = speedup.bounds()
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
    lengths = sorted({row.max_new_tokens for row in rows if row.max_new_tokens})
    answers = (
        f" of answers of {' to '.join(map(str, lengths[:1] + lengths[1:][-1:]))} tokens"
        if lengths
        else ""
    )
    return (
        f"speed-ups are of decoding{answers}, without reading the prompt; {intervals}. It is assumed that an iteration"
        " costs the same with these texts"
    )


def _next_steps(rows: Sequence[PlanRow]) -> list[Step]:
    best = max(rows, key=_estimate)
    largest = max(row.num_draft_tokens or 0 for row in rows if row.draft == best.draft)
    several = len({row.num_draft_tokens for row in rows if row.draft == best.draft}) > 1
    load = f" batch_size={best.batch_size}" if (best.batch_size or 1) > 1 else ""
    if several and best.num_draft_tokens == largest:
        command = f"harness latency … K={2 * largest}{load}"
        return [Step(f"K={largest} is the largest with a price", command=command)]
    command = f"harness latency … K={best.num_draft_tokens}{load}"
    return [Step("measure it", command=command)]
