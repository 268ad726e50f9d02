"""The drafts of a target by what each is expected to gain at its best K: computed from probabilities, not timed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from harness.results.judging.statement import Statement
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, Interval
from harness.results.statistics.multiplicity import relative_to, widened
from harness.results.texts import best_row, expected, texts_of

_EXPECTED = "expected speed-up"
# The reason for a draft that is not compared.
_NO_COST = "the cost of an iteration is unknown"


def judged_drafts(runs: Sequence[Run[AcceptanceRow]]) -> list[list[Statement]]:
    """The drafts of each target at their best K: whether the one that is expected to gain most pays, and how the others
    compare with it on the texts that all have. Costs are taken as known; a draft without one is not ranked.
    """
    ordered = sorted(runs, key=lambda run: expected(best_row(run.rows)), reverse=True)
    by_target = grouped(ordered, lambda run: str(run.last.model))
    return [_of_target(drafts) for drafts in by_target.values()]


def _of_target(drafts: Sequence[Run[AcceptanceRow]]) -> list[Statement]:
    """The statements about each draft, of which the first is the one that the others are compared with."""
    first, *others = [best_row(run.rows) for run in drafts]
    family = len(drafts)
    # Its K was chosen among all of the run.
    number = family * len(drafts[0].rows)
    speedup = widened(first.expected_speedup or Interval(), number)
    why = "" if first.iteration_cost else _NO_COST
    statements = [
        Statement.ordered("pays", speedup, why, subject=first, family=family, figure=_EXPECTED)
    ]
    shares = {} if why else _relative_to_first(drafts)
    for row in others:
        share = shares.get(str(row.run), Interval())
        why = ""
        if not (first.iteration_cost and row.iteration_cost):
            why = _NO_COST
        elif not share.has_bounds:
            why = f"fewer than {FEWEST_FOR_INTERVAL} prompts whose texts all drafts have"
        statement = Statement.ordered(
            "compared",
            share,
            why,
            subject=row,
            reference=first,
            family=family,
            figure=_EXPECTED,
        )
        statements.append(statement)
    return statements


def _relative_to_first(runs: Sequence[Run[AcceptanceRow]]) -> dict[str, Interval]:
    """The speed-up of each draft with a known cost over that of the first, by run, on texts that all have; {} where
    there are none.
    """
    # Tokens, and steps of the target, of each text by its prompt.
    waits: dict[str, dict[Any, Any]] = {}
    for run in runs:
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
    return dict(zip(waits, relative_to(0, tokens, steps, len(runs)), strict=True))
