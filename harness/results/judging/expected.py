"""Speed-ups that are computed and not timed: the best K of a draft, the best draft of a target, the best prediction
at a load; and whether an engine accepts what its weights say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from harness.config.errors import SettingError
from harness.results.files import rows_in
from harness.results.judging.statement import Relation, Statement, standing
from harness.results.price.value import IterationCost, ratio
from harness.results.rows.acceptance import AcceptancePartRow, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.statistics.multiplicity import relative_to
from harness.results.verdict import judge

_EXPECTED = "expected speed-up"
_PREDICTED = "predicted speed-up"

AnyRow = TypeVar("AnyRow", AcceptanceTextRow, AcceptancePartRow)


class Best(NamedTuple):
    """The K with the highest predicted speed-up, and those that are indistinguishable from it."""

    k: int
    speedup: Interval
    alike: Sequence[int]


def health_of(
    served: float | None, weights: Interval, *, is_counted: bool, is_likely: bool
) -> Relation:
    """Whether an engine accepted what the weights of its models do.

    Args:
        served: its tokens per iteration; None where nothing shows them.
        weights: those of its weights, on the same texts.
        is_counted: whether it reported its iterations.
        is_likely: whether its texts are as likely as the model's own.
    """
    if not is_likely:
        return "other texts"
    if served is not None and not weights.excludes(served):
        return "as its weights say"
    if served is None or not is_counted:
        return "cannot tell"
    return "accepts less" if served < weights.estimate else "accepts more"


def judged_health(row: Any) -> Statement:
    """The statement about what an engine accepts, with the tokens per iteration of its weights."""
    why = "the engine does not report what it accepted" if row.health == "cannot tell" else ""
    weights = row.weights_tokens_per_iteration or Interval()
    return Statement(row.health, weights, why, row, figure="tokens per iteration")


def rows_of(run: Run[AcceptanceRow], kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of a run in another of its files; [] where that is gone."""
    directory = run.directory or Path(str(run.last.directory))
    rows = rows_in(directory / f"{kind.kind}.csv", kind)
    return [row for row in rows if row.run == run.id]


def texts_of(run: Run[AcceptanceRow], k: int) -> list[AcceptanceTextRow]:
    """The texts of a run, without those of a damaged file that lack iterations at this K."""
    texts = rows_of(run, AcceptanceTextRow)
    return [text for text in texts if len(text.iterations_by_num_draft_tokens or ()) >= k]


def best_row(rows: Sequence[AcceptanceRow]) -> AcceptanceRow:
    """The row of the K with the highest expected speed-up; without costs of the one that was served, or the largest."""
    return max(
        rows,
        key=lambda row: (_expected(row)[0], row.health is not None, row.num_draft_tokens or 0),
    )


def _expected(row: AcceptanceRow) -> tuple[float, float]:
    """What a draft is expected to gain: by tokens where costs are unknown."""
    figures = (row.expected_speedup, row.tokens_per_iteration)
    speedup, tokens = (0.0 if figure is None else figure.estimate for figure in figures)
    return speedup, tokens


def judged_drafts(runs: Sequence[Run[AcceptanceRow]]) -> list[list[Statement]]:
    """The drafts of each target at their best K: the best one first, and how the others compare with it on the texts
    that all have. Costs are taken as known; a draft without one is not ranked.
    """
    ordered = sorted(runs, key=lambda run: _expected(best_row(run.rows)), reverse=True)
    by_target = grouped(ordered, lambda run: str(run.last.model))
    return [_of_target(drafts) for drafts in by_target.values()]


def _of_target(drafts: Sequence[Run[AcceptanceRow]]) -> list[Statement]:
    """The statements about each draft, of which the first is the best."""
    best, *others = [best_row(run.rows) for run in drafts]
    speedup, why = best.expected_speedup or Interval(), ""
    if not best.iteration_cost:
        why = "the cost of an iteration is unknown"
    statements = [
        Statement("not ranked" if why else "best", speedup, why, best, None, len(drafts), _EXPECTED)
    ]
    shares = {} if why else _relative_to_first(drafts)
    for row in others:
        share = shares.get(str(row.run), Interval())
        relation = standing(share)
        if share.covers is None or share.covers.num_units < FEWEST_FOR_INTERVAL:
            relation, why = "not ranked", why or "no cost, or too few texts in common"
        statements.append(Statement(relation, share, why, row, best, len(shares), _EXPECTED))
    return statements


def _relative_to_first(drafts: Sequence[Run[AcceptanceRow]]) -> dict[str, Interval]:
    """The speed-up of each draft with a known cost over that of the first, by run, on texts that all have; {} where
    there are none.
    """
    # Tokens, and steps of the target, of each text by its prompt.
    waits: dict[str, dict[Any, Any]] = {}
    for run in drafts:
        row = best_row(run.rows)
        k = int(row.num_draft_tokens or 1)
        if row.iteration_cost:
            waits[run.id] = {
                (text.prompt_index, str(text.token_ids)): (
                    text.num_tokens,
                    text.iterations(k) * row.iteration_cost,
                )
                for text in texts_of(run, k)
            }
    prompts = grouped(set.intersection(*map(set, waits.values())), itemgetter(0)).values()
    if not prompts:
        return {}
    totals = [
        [np.sum([waits_of_run[text] for text in texts], axis=0) for texts in prompts]
        for waits_of_run in waits.values()
    ]
    # [num_runs, num_prompts, tokens or steps]
    tokens, steps = np.moveaxis(np.array(totals), -1, 0)
    return dict(zip(waits, relative_to(0, tokens, steps), strict=True))


def best_of(predictions: Mapping[int, Interval]) -> int:
    """The K for which most is predicted."""
    return max(predictions, key=lambda k: predictions[k].estimate)


def best_k(cost: IterationCost, yields: Mapping[int, Interval], rows: int = 1) -> Best:
    """The best of the K that have both a price and a yield.

    K is indistinguishable from it where the difference may be 0, with the bounds of cost and yield taken as
    independent, but for a regular step that they share: yields of the same texts are not, so that more K are named
    than need be.

    Raises:
        SettingError: no K has both.
    """
    common = [k for k in cost.ks(rows) if k in yields]
    # One without a price says why.
    speedups = {k: cost.speedup(yields[k], k, rows) for k in common or yields}
    if not common:
        raise SettingError("acceptance", "has no K")
    best = best_of(speedups)
    speeds = speedups
    if cost.one_step:
        speeds = {k: ratio(yields[k], cost.at(k, rows).ms) for k in common}
    alike = []
    for k in common:
        share = ratio(speeds[k], speeds[best])
        if k != best and share.has_bounds and not share.excludes(1):
            alike.append(k)
    return Best(best, speedups[best], alike)


def highest(rows: Sequence[Any]) -> Any:
    """The row with the highest prediction."""
    return max(rows, key=lambda row: (row.predicted_speedup or Interval(0.0)).estimate)


def judged_predictions(rows: Sequence[Any]) -> list[Statement]:
    """For each load whether the highest prediction pays, and how each other one compares with it.

    K of one draft share a regular step, which moves none against another: those that cannot be told from the best one
    are in its row.
    """
    sources = attrgetter("cost_source", "acceptance_source", "batch_size")
    statements = []
    for alike in grouped(rows, sources).values():
        best = highest(alike)
        speedup = best.predicted_speedup or Interval()
        pays = replace(judge(speedup), subject=best, figure=_PREDICTED)
        statements.append(pays)
        if len(alike) > 1:
            statements.append(replace(pays, relation="best", why=""))
        for row in alike:
            if row is best:
                continue
            share = ratio(row.predicted_speedup or Interval(), speedup)
            relation, why = standing(share), ""
            if not share.has_bounds:
                relation, why = "not ranked", "no interval"
            elif row.draft == best.draft:
                is_alike = row.num_draft_tokens in (best.as_good_num_draft_tokens or ())
                relation = "as good" if is_alike else "gains less"
                share = Interval(share.estimate)
            statements.append(Statement(relation, share, why, row, best, 1, _PREDICTED))
    return statements
