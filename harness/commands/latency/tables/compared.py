"""Tables that compare many runs of `latency`, one row per pair and K, or per arm.

Their items are of the class `RankedRun`: `row.draft_ms` reads the row of the speculative arm,
`regular.target_step_ms` that of the regular one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.commands.latency.tables.categories import by_category
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
    OF_A_PART,
    SPEEDUP,
    identical_texts,
)
from harness.config.amounts import percent
from harness.measuring.prices import StepCosts, costs_in_steps
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number, share, times
from harness.reporting.words import FIRST_SETTINGS, cell_of
from harness.results.runs import grouped
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import UNKNOWN
from harness.results.verdict import verdict_of

# Settings that get a column where pairs differ in them; further ones are in the last column.
_MOST_SETTINGS = 3
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


def _differing_settings(pairs: Sequence[RankedRun]) -> list[str]:
    """The settings in which pairs differ, the usual ones first."""
    different = dict.fromkeys(column for pair in pairs for column in pair.name.settings)
    usual = [column for column in FIRST_SETTINGS if column in different]
    return list(dict.fromkeys([*usual, *different]))


def _setting_column(setting: str) -> Column:
    """The column of a setting."""
    if setting == "server_command":
        # The words in which the commands differ: whole ones have no room.
        return Column("command", of=lambda pair: pair.name.settings.get(setting), text=True)
    heading = setting.removeprefix("settings.").removeprefix("vary.").replace("_", " ")
    return Column(heading, of=lambda pair: cell_of(pair.row, setting), text=True)


def _remark(pair: RankedRun) -> str | None:
    """What distinguishes a pair in a table: `best K`, or why its figures say little."""
    if pair.is_partial:
        return f"{pair.run.status}\n{pair.row.num_prompts or 0} prompts"
    if pair.row.status == NO_VERDICT:
        return "no verdict"
    if not pair.is_quiet and not pair.none_quiet:
        return "not quiet"
    return "best K" if pair.best_k else None


def pairs_table(pairs: Sequence[RankedRun], further_notes: Sequence[str] = ()) -> Table:
    """Speed-up of each pair and K, with a column for each setting in which they differ."""
    ordered = _differing_settings(pairs)
    repeated = any(pair.run.times > 1 for pair in pairs)
    together = any(pair.num_compared > 1 for pair in pairs)

    def further(pair: RankedRun) -> str:
        words = [pair.name.settings.get(column, "") for column in ordered[_MOST_SETTINGS:]]
        return " · ".join(filter(None, [*words, *pair.name.circumstances]))

    columns = (
        Column("pair", text=True, of="name.pair", once=True),
        *map(_setting_column, ordered[:_MOST_SETTINGS]),
        Column("further", text=True, of=further, optional=True),
        K,
        SPEEDUP.at("row"),
        Column("", of=_remark, optional=True, text=True),
        SPECULATIVE_MS,
        REGULAR_MS,
        ACCEPTED.at("row"),
        Column(
            "all at\nonce",
            of=lambda pair: (
                verdict_of(pair.row, pair.num_compared).speedup.bounds() if together else None
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
            of=lambda pair: pair.run.times if repeated else None,
            optional=True,
            meaning="how often this was measured; the newest is shown",
        ),
    )
    notes: list[str] = []
    for pair in pairs:
        reason = pair.verdict.reason
        speedup = pair.verdict.speedup
        if pair.row.status == NO_VERDICT:
            notes.append(f"{pair.name.label(', ')}: no verdict: {reason}.")
        elif speedup.is_known and not speedup.has_bounds:
            notes.append(f"{reason[:1].upper()}{reason[1:]}.")
    about_rows = caveats([pair.row for pair in pairs])
    notes = list(dict.fromkeys([*notes, *further_notes, *luck_notes(pairs), *about_rows]))
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES} more notes are left out."]
    return Table.of(
        "pairs",
        "How much faster?",
        pairs,
        columns,
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


def categories_table(pairs: Sequence[RankedRun]) -> Table:
    """Pairs at their best K by category of prompts."""
    divided = [
        (pair.name.label(), part)
        for pair in pairs
        if pair.best
        for part in by_category(pair.run.prompt_rows, pair.row)
    ]
    by_name = grouped(divided, lambda item: item[1].name)
    columns = (
        Column("category", text=True, of=lambda item: item[1].name, once=True),
        Column("pair", text=True, of=lambda item: item[0]),
        *(column.at(lambda item: item[1]) for column in OF_A_PART),
    )
    # One category alone says nothing new.
    parts = [item for items in by_name.values() for item in items] if len(by_name) > 1 else []
    about = "Speed-ups are of four prompts or more, intervals of eight."
    # Without one, few readers want the rest: it opens on a click.
    is_thin = all(part.speedup is None for _, part in parts)
    return Table.of(
        "categories", "With which prompts?", parts, columns, about=about, in_full=is_thin
    )


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
