"""Tables that compare many runs of `latency`, one row per pair and K, or per arm.

Their items are of the class `RankedRun`: `row.draft_ms` reads the row of the speculative arm,
`regular.target_step_ms` that of the regular one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.commands.latency.tables.costs import (
    auto_gave_up,
    held_back,
    share_of_predicted,
)
from harness.commands.latency.tables.doubts import caveats
from harness.commands.latency.tables.ranked import RankedRun
from harness.commands.latency.tables.ranking import luck_notes
from harness.commands.latency.tables.run import (
    ACCEPTED,
    ARM,
    SPEEDUP,
    identical_texts,
)
from harness.config.amounts import percent
from harness.measuring.prices import StepCosts, costs_in_steps
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number, share, times
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import UNKNOWN
from harness.results.verdict import verdict_of

_MOST_NOTES = 20
PAIR = Column("pair", text=True, of="name.cell", once=True)
K = Column("K", of="k", identifies_row=True, optional=True)


REGULAR_MS = Column("regular\nms/token", number(), "regular.ms_per_token")
# A run without a draft has the row of the regular arm alone.
SPECULATIVE_MS = Column(
    "spec.\nms/token",
    number(),
    lambda pair: None if pair.row is pair.regular else pair.row.ms_per_token,
)


def _remark(pair: RankedRun) -> str | None:
    """What distinguishes a pair in a table: `best K`, or why its figures say little."""
    if pair.is_partial:
        return f"{pair.run.status}\n{pair.row.num_prompts or 0} prompts"
    if pair.row.status == NO_VERDICT:
        return "no verdict"
    if not pair.row.was_quiet:
        return "not quiet"
    return "best K" if pair.best_k else None


PAIRS = (
    Column("pair", text=True, of="name.pair", once=True),
    Column("settings", text=True, of=lambda pair: " · ".join(pair.name.details), optional=True),
    K,
    SPEEDUP.at("row"),
    Column("", of=_remark, optional=True, text=True),
    SPECULATIVE_MS,
    REGULAR_MS,
    ACCEPTED.at("row"),
    Column(
        "all at\nonce",
        of=lambda pair: (
            verdict_of(pair.row, pair.num_compared).speedup.bounds()
            if pair.num_compared > 1
            else None
        ),
        optional=True,
        meaning="95 % intervals that hold together for all pairs of a target",
    ),
    Column(
        "goodput",
        times,
        "row.goodput_ratio.estimate",
        optional=True,
        meaning="ratio of both arms' requests per second within engine.slo",
    ),
    Column(
        "runs",
        of="run.times",
        varies=True,
        meaning="how often this was measured; the newest is shown",
    ),
)


def pairs_table(pairs: Sequence[RankedRun], further_notes: Sequence[str] = ()) -> Table:
    """Speed-up of each pair and K, with the settings in which they differ."""
    reasons = []
    for pair in pairs:
        reason = pair.verdict.reason
        if pair.row.status == NO_VERDICT:
            reasons.append(f"{pair.name.label(', ')}: no verdict: {reason}.")
        elif reason:
            reasons.append(f"{reason[:1].upper()}{reason[1:]}.")
    about_rows = caveats(pair.run for pair in pairs)
    notes = list(dict.fromkeys([*reasons, *further_notes, *luck_notes(pairs), *about_rows]))
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES} more notes are left out."]
    return Table.of(
        "pairs",
        "How much faster?",
        pairs,
        PAIRS,
        strong="best_k",
        faint="is_partial",
        notes=tuple(notes),
    )


def reasons_table(pairs: Sequence[RankedRun]) -> Table:
    """Why a pair is as fast as it is: tokens per iteration, costs, and what limits it."""
    drafting = [pair for pair in pairs if pair.row.mean_acceptance_length is not None]

    def costs(pair: RankedRun) -> StepCosts | None:
        return None if auto_gave_up(pair.row) else costs_in_steps(pair.regular, pair.row)

    def marginal_alone(row: LatencyRow) -> Sequence[float | None] | None:
        # Only of a server whose counters give acceptance over all iterations, and nothing finer.
        return row.marginal_acceptance_by_position if row.acceptance_by_position is None else None

    def limit(pair: RankedRun) -> str | None:
        return held_back(pair.regular, pair.row) if pair.best else None

    columns = (
        PAIR,
        K,
        ACCEPTED.at("row"),
        Column("of those\ntested", share, "row.conditional_acceptance_rate", optional=True),
        Column("tokens per\niteration", number(), "row.tokens_per_iteration"),
        Column(
            "c",
            number(3),
            "draft",
            optional=True,
            meaning="time of a draft token, in steps of the target",
        ).at(costs),
        Column(
            "v",
            number(),
            "verify",
            optional=True,
            meaning="time of a verification, in the same",
        ).at(costs),
        Column("predicted", times, "row.predicted_speedup", optional=True),
        Column("of\npredicted", percent, share_of_predicted, optional=True).at("row"),
        Column(
            "held back most",
            text=True,
            of=limit,
            optional=True,
            meaning="what limits the speed-up most, and the speed-up without it",
        ),
        Column("by\nposition, %", _positions, "row.acceptance_by_position", optional=True),
        Column("of all\niterations, %", _positions, marginal_alone, optional=True).at("row"),
    )
    return Table.of(
        "reasons",
        "Why?",
        drafting,
        columns,
        strong="best_k",
        faint="is_partial",
    )


def _positions(rates: Sequence[float | None]) -> str:
    """`92 87 –`, in percent."""
    return " ".join(UNKNOWN if rate is None else f"{100 * rate:.0f}" for rate in rates)


class _Arm(NamedTuple):
    """An arm of a run, whose row `arm` is."""

    pair: RankedRun
    arm: LatencyRow


def arms_table(pairs: Sequence[RankedRun]) -> Table:
    """Figures of each arm."""
    arms = [_Arm(pair, row) for pair in pairs for row in pair.run.rows]
    columns = (
        PAIR.at("pair"),
        Column(
            "K",
            of=lambda item: item.pair.k if item.arm is item.pair.row else None,
            identifies_row=True,
            optional=True,
        ),
        *(column.at("arm") for column in ARM),
        Column(
            "greedy texts\nidentical",
            of=lambda item: identical_texts(item.arm, item.pair.run.prompt_rows),
            optional=True,
        ),
    )
    return Table.of(
        "all_arms", "Times of each arm", arms, columns, faint="pair.is_partial", in_full=True
    )
