"""Predictions of `plan costs=… acceptance=…`: what an iteration yields over its price, wherever that is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from harness.commands.plan.rows import PlanRow
from harness.commands.plan.tables import doubts_of_notes
from harness.config.acceptance_math import change_with_length, length_in_answers
from harness.config.amounts import percent
from harness.config.errors import SettingError
from harness.reporting.page import NextStep, Page, heading, title_of_many
from harness.reporting.table import Column, Line, Table, number, style_of, times, with_bounds
from harness.reporting.words import latency_again
from harness.results.judging.choice import best_of
from harness.results.judging.predictions import highest_prediction, judged_predictions
from harness.results.judging.statement import Statement
from harness.results.price.table import PriceTable
from harness.results.price.value import NUM_SWEEPS, OTHER_TEXTS, IterationCost, ratio
from harness.results.statistics.interval import Interval

# Regular steps of two texts differ by a larger share if something about their lengths does.
_UNLIKE_STEPS = 0.1
# A speed-up was measured with the yield that is predicted with if they differ by less than this share.
_SAME_YIELD = 0.01
# A prediction counts as close within this share of what was measured.
_CLOSE = 0.05


def predictions(
    costs: PriceTable,
    accepted: PriceTable,
    load: int | None,
    length: float | None,
    *,
    other_texts: bool,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Predictions for every draft, load and K that has both a cost and a yield, as columns of a row, and why others
    have none.

    Args:
        load: rows in flight that are asked for; None for all that were measured.
        length: tokens of the answers that are asked for; None for those that costs were measured with.
        other_texts: whether these are not the texts that costs were measured with.

    Raises:
        SettingError: they have nothing in common.
    """
    if not any(cost.loads for cost in costs.costs.values()):
        rule = "has no time of an iteration with a draft: ms, or ms_per_token and acceptance_length"
        raise SettingError("costs", rule)
    if not any(accepted.yields.values()):
        raise SettingError("acceptance", "has no tokens per iteration of any K")
    predicted: list[dict[str, Any]] = []
    # Each with what it is about.
    problems: list[tuple[str, SettingError]] = []
    doubts: list[str] = []
    for draft, cost in costs.costs.items():
        # Yields without a name are of any draft, and costs without one are of any.
        shared = [name for name in accepted.yields if not draft or name in (draft, "")]
        if not shared:
            others = ", ".join(accepted.yields)
            rule = f"has nothing of {draft}, only of {others}"
            problems.append(("acceptance", SettingError("acceptance", rule)))
        for name, rows in itertools.product(shared, cost.loads if load is None else (load,)):
            yields = {**accepted.yields[name], **accepted.yields_at.get((name, rows), {})}
            lengths: dict[int, float | None] = dict.fromkeys(cost.ks(rows))
            if accepted.rates or name in accepted.lengths:
                lengths = {k: length or cost.point(k, rows).answer_length for k in lengths}
            tokens = {
                k: _at_length(accepted, name, yields[k], k, lengths[k])
                for k in lengths
                if k in yields
            }
            try:
                # With none in common the price of any says why.
                priced = tokens or yields
                speedups = {k: cost.speedup(figure, k, rows) for k, figure in priced.items()}
                if not speedups:
                    raise SettingError("acceptance", "has no K")
            except SettingError as error:
                problems.append((draft or name or error.setting, error))
                continue
            best = best_of(speedups)
            speeds = speedups
            if cost.one_step:
                speeds = {k: ratio(tokens[k], cost.at(k, rows).ms) for k in speedups}
            doubts += _of_regular_steps(cost, accepted.costs.get(name), rows)
            for k, tokens_of_k in tokens.items():
                point = cost.at(k, rows)
                answer_length = lengths[k]
                speedup = speedups[k]
                # Answers of another length are faster or slower by that alone.
                is_measured = abs(ratio(tokens_of_k, yields[k]).estimate - 1) < _SAME_YIELD
                measured = accepted.measured.get((name, k, rows)) if is_measured else None
                columns = {
                    "draft": draft or name or None,
                    "num_draft_tokens": k,
                    "batch_size": rows,
                    "break_even_tokens": point.steps.estimate if point.steps.is_known else None,
                    "iteration_ms": point.ms,
                    "predicted_speedup": ratio(speedup, OTHER_TEXTS) if other_texts else speedup,
                    "predicted_tokens_per_iteration": tokens_of_k.estimate,
                    "best_num_draft_tokens": best,
                    "relative_to_best": ratio(speeds[k], speeds[best]) if k != best else None,
                    "measured_speedup": measured,
                    "max_new_tokens": answer_length and round(answer_length),
                }
                predicted.append(columns)
    if not predicted:
        raise problems[0][1]
    notes = [f"{subject} {error.rule}" for subject, error in problems]
    return predicted, [*dict.fromkeys([*notes, *doubts, *costs.notes, *accepted.notes])]


def _of_regular_steps(cost: IterationCost, other: IterationCost | None, rows: int) -> Iterator[str]:
    """The doubt that texts of one sweep have unlike regular steps, and so unlike costs."""
    files = [each.source.partition("@")[0] for each in (cost, other) if each is not None]
    if other is None or files[0] != files[1]:
        return
    change = ratio(other.point(0, rows).ms, cost.point(0, rows).ms).estimate - 1
    if abs(change) > _UNLIKE_STEPS:
        longer = "longer" if change > 0 else "less"
        yield (
            f"with {rows} in flight a regular step takes {percent(abs(change))} {longer} with these texts than with"
            " those of the costs: prompts or answers are of other lengths, and predictions are farther off"
        )


def _at_length(
    accepted: PriceTable, name: str, tokens: Interval, k: int, length: float | None
) -> Interval:
    """Tokens per iteration at K of answers of a length, or as they were read where it is None."""
    if length is None:
        return tokens
    if accepted.rates:
        return Interval(length_in_answers(accepted.rates, k, length))
    measured = accepted.lengths[name]
    if round(measured) == round(length):
        return tokens
    return tokens.scaled(change_with_length(tokens.estimate, k, measured, length))


def predictions_page(rows: Sequence[PlanRow], failed: Sequence[PlanRow]) -> Page:
    """The best K at each load, and every K beside what was measured, where that is known.

    Args:
        failed: of the jobs that have no prediction, for their errors.
    """
    title = title_of_many([*{row.run: row for row in rows}.values()])
    if len({(row.model, row.cost_source) for row in rows}) == 1:
        title = heading(rows[0], f"costs {rows[0].cost_source}")
        if not (rows[0].devices or rows[0].is_simulated):
            title = f"{rows[0].model} · costs {rows[0].cost_source}"
    doubts = [f"Failed: {row.error}" for row in failed]
    doubts += doubts_of_notes(rows)
    judged = judged_predictions(rows)
    table = Table.of(
        "predictions",
        "What is predicted of decoding",
        rows,
        _COLUMNS,
        strong=lambda row: row.num_draft_tokens == row.best_num_draft_tokens,
    )
    findings = [*_findings(rows, judged), *_beside_measured(rows)]
    covers, steps = [("Covers", _covers(rows))], [_next_step(rows)]
    statements = [statement for of_load in judged for statement in of_load]
    return Page(title, findings, doubts, [table], covers, steps, statements)


def best_in_words(rows: Sequence[PlanRow]) -> str:
    """`2.13× (1.98 to 2.30) at K=4`, of the highest prediction."""
    best = highest_prediction(rows)
    return f"{_speedup(best):×} at K={best.num_draft_tokens}"


def _speedup(row: PlanRow) -> Interval:
    return row.predicted_speedup or Interval(0.0)


_COLUMNS = (
    Column("costs", of="cost_source", text=True, once=True, varies=True),
    Column("acceptance", of="acceptance_source", text=True, once=True, varies=True),
    Column("draft", of="draft", text=True, once=True, varies=True),
    Column("in\nflight", of="batch_size", identifies_row=True, varies=True),
    Column("K", of="num_draft_tokens", identifies_row=True),
    Column("predicted speed-up\n(95 % interval)", with_bounds, "predicted_speedup"),
    Column("measured", times, "measured_speedup", optional=True),
    Column("tokens per\niteration", number(), "predicted_tokens_per_iteration"),
    Column("pays\nabove", number(), "break_even_tokens", optional=True),
    Column("an iteration\nms", number(), "iteration_ms.estimate", optional=True),
)


def _findings(rows: Sequence[PlanRow], judged: Sequence[Sequence[Statement]]) -> Iterator[Line]:
    """For each costs, acceptance and load the highest prediction."""
    num_sources, num_drafts, num_loads = (
        len(set(map(attrgetter(*names), rows)))
        for names in (("cost_source", "acceptance_source"), ("draft",), ("batch_size",))
    )
    for statement, *standings in judged:
        best = statement.subject
        about = f"{best.cost_source} with {best.acceptance_source}: " if num_sources > 1 else ""
        name = f"{best.draft} " if num_drafts > 1 else ""
        load = ""
        if num_loads > 1 or (best.batch_size or 1) > 1:
            load = f" with {best.batch_size or 1} in flight"
        details = []
        if bounds := statement.interval.bounds():
            at_once = f" for {statement.family} at once" if statement.family > 1 else ""
            details.append(f"95 % interval {bounds}{at_once}")
        alike = []
        for standing in standings:
            row = standing.subject
            other_draft = "" if row.draft == best.draft else f"{row.draft} "
            if standing.is_judged_open:
                alike.append(f"{other_draft}K={row.num_draft_tokens}")
        if alike:
            details.append(f"cannot be told apart: {', '.join(alike)}")
        elif statement.pays and {standing.relation for standing in standings} == {"below"}:
            details.append(f"shown to be the best of {statement.family}")
        gain = f"{times(statement.interval.estimate)} predicted"
        text = f"{about}{gain} at {name}K={best.num_draft_tokens}{load}"
        yield Line(text, style_of(statement), "; ".join(details))


def _beside_measured(rows: Sequence[PlanRow]) -> Iterator[Line]:
    """How many predictions come close to what was measured."""
    measured = [(row, row.measured_speedup) for row in rows if row.measured_speedup]
    errors = [abs(_speedup(row).estimate / speedup - 1) for row, speedup in measured]
    if errors:
        close = sum(error <= _CLOSE for error in errors)
        share = f"{close} of {len(errors)} within {percent(_CLOSE)} of what was measured"
        yield Line(f"{share}, the farthest {percent(max(errors), 1)} off")


def _covers(rows: Sequence[PlanRow]) -> str:
    """Sentences about what intervals cover and what is assumed."""
    covers = sorted({str(_speedup(row).covers) for row in rows if _speedup(row).covers})
    intervals = f"; intervals are over {'; '.join(covers)}" if covers else ""
    lengths = [row.max_new_tokens for row in rows if row.max_new_tokens]
    answers = ""
    if lengths:
        least_and_most = dict.fromkeys((min(lengths), max(lengths)))
        answers = f" of answers of {' to '.join(map(str, least_and_most))} tokens"
    about = f"speed-ups are of decoding{answers}, without reading the prompt{intervals}"
    if all(row.cost_source == row.acceptance_source for row in rows):
        return about
    joint = ", and" if intervals else "; intervals are"
    return (
        f"{about}{joint} over what an iteration costs with other texts: 19 of 20 predictions on {NUM_SWEEPS} public"
        f" sweeps were within a factor of {OTHER_TEXTS.high:.2f}"
    )


def _next_step(rows: Sequence[PlanRow]) -> NextStep:
    best = highest_prediction(rows)
    # Beyond what was measured the block of a head may end.
    k = f"K={best.num_draft_tokens}"
    text = f"measure {k}"
    changes = f"{k} batch_size={best.batch_size}" if (best.batch_size or 1) > 1 else k
    if best.cost_command is not None:
        if best.engine == "server" and "{K}" not in best.cost_command:
            text += ", which the server's command names"
            changes = changes.removeprefix(k)
        return NextStep(text, command=latency_again(best.cost_command, changes))
    if best.engine is None:
        command = f"harness latency {changes} -- YOUR_SERVER_COMMAND"
        return NextStep(f"{text}, for {{K}} in the command", command=command)
    gone = f"{best.cost_source} does not say how it was measured: type its command with {changes}"
    return NextStep(text, command=gone)
