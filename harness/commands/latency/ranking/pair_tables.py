"""Tables that compare many runs of `latency`, one row per pair and K, or per arm.

A column reads its value from a `MeasuredPair`: `SPEEDUP.at("row")` from the row of its speculative
arm, `regular.ms_per_token` from that of its regular arm (see `Column`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.commands.latency.ranking.methods import methods_tables
from harness.commands.latency.ranking.pairs import MeasuredPair, k_series, num_compared
from harness.commands.latency.ranking.rivals import best_k_line
from harness.commands.latency.ranking.tree_tables import trees_tables
from harness.commands.latency.rows import LatencyRow
from harness.commands.latency.tables.categories import Category
from harness.commands.latency.tables.caveats import caveats
from harness.commands.latency.tables.costs import (
    held_back_in_words,
    rest_ms,
    share_of_predicted,
    tokens_per_iteration,
)
from harness.commands.latency.tables.run import (
    ACCEPTED,
    ARM,
    BOUNDS,
    SPEEDUP,
    identical_texts,
    latency_document,
    speedup_bounds,
)
from harness.commands.words import common_settings
from harness.results.schema import NO_VERDICT
from harness.results.verdict import verdict_of
from harness.tables.table import (
    UNKNOWN,
    Column,
    Document,
    Table,
    interval,
    number,
    percent,
    times,
)

PAIR = Column("pair", text=True, of="name.cell", once=True)
K = Column("K", of="name.num_draft_tokens", identifies_row=True, optional=True)


def latency_tables(pairs: Sequence[MeasuredPair]) -> Document:
    """A single run in detail, or several compared."""
    if len(pairs) == 1 and not pairs[0].partial:
        return latency_document(pairs[0].run.rows, pairs[0].run.prompts)
    return [
        pairs_table(pairs),
        _categories(pairs),
        _reasons(pairs),
        _arms(pairs),
        *methods_tables(pairs),
        *trees_tables(pairs),
    ]


def pairs_table(pairs: Sequence[MeasuredPair]) -> Table:
    """Speed-up of each pair and K."""
    num_pairs = num_compared(pairs)

    def at_once(pair: MeasuredPair) -> str | None:
        return speedup_bounds(pair.row, num_pairs) if num_pairs > 1 else None

    repeated = any(pair.run.times > 1 for pair in pairs)
    columns = (
        PAIR,
        K,
        Column("regular\nms/token", number(), "regular.ms_per_token"),
        Column("spec.\nms/token", number(), _speculative_ms),
        SPEEDUP.at("row"),
        BOUNDS.at("row"),
        Column("all at\nonce", of=at_once, optional=True),
        Column("predicted", times, "row.predicted_speedup", optional=True),
        ACCEPTED.at("row"),
        Column("goodput", times, "row.goodput_ratio.estimate", optional=True),
        Column("", of=_remark, optional=True),
        Column("runs", of=lambda pair: pair.run.times if repeated else None, optional=True),
    )
    notes = []
    if num_pairs > 1:
        notes.append(f"All at once: 95 % intervals that hold for all {num_pairs} together.")
    if any(pair.row.goodput_ratio for pair in pairs):
        notes.append("Goodput: the ratio of both arms' requests a second within engine.slo.")
    if repeated:
        notes.append("runs: how often this was measured; the newest is shown.")
    return Table.of(
        "pairs",
        "Speed-up",
        pairs,
        columns,
        strong="stands_out",
        faint="partial",
        about=common_settings([pair.row for pair in pairs]),
        notes=(*notes, *filter(None, map(best_k_line, k_series(pairs))), *_limits(pairs)),
    )


def _speculative_ms(pair: MeasuredPair) -> float | None:
    """The speculative arm's time; a run without a draft has the row of the regular one alone."""
    return None if pair.row is pair.regular else pair.row.ms_per_token


def _limits(pairs: Sequence[MeasuredPair]) -> list[str]:
    """Sentences: why some pairs have no interval or no verdict, and what limits the figures."""
    without_interval = []
    without_verdict = []
    for pair in pairs:
        verdict = verdict_of(pair.row)
        if pair.row.status == NO_VERDICT:
            without_verdict.append(f"{pair.name.label(', ')}: no verdict: {verdict.reason}.")
        elif pair.row.speedup is not None and not verdict.speedup.has_bounds:
            without_interval.append(f"{verdict.reason[:1].upper()}{verdict.reason[1:]}.")
    warnings = caveats(pair.row for pair in pairs)
    return [*dict.fromkeys(without_interval), *without_verdict, *warnings]


def _remark(pair: MeasuredPair) -> str | None:
    """`interrupted` with the number of prompts, `no verdict`, `not quiet` or `best K`."""
    if pair.partial:
        return f"{pair.run.status}\n{pair.row.num_prompts or 0} prompts"
    if pair.row.status == NO_VERDICT:
        return "no verdict"
    if not pair.row.was_quiet:
        return "not quiet"
    return "best K" if pair.best_of_several else None


def _categories(pairs: Sequence[MeasuredPair]) -> Table:
    """Pairs by category: speed-up with interval, and tokens per iteration."""
    with_categories = [pair for pair in pairs if pair.categories]
    # By category, the numbers of prompts that the pairs have of it: one, where they had the same
    # prompts.
    numbers: dict[str, set[int]] = {}
    for pair in with_categories:
        for category in pair.categories:
            numbers.setdefault(category.name, set()).add(category.num_prompts)
    columns = [Column("pair", text=True, of=lambda pair: pair.name.label())]
    columns += [_category_column(*item) for item in numbers.items()]
    return Table.of(
        "categories",
        "Pairs by category of prompts",
        with_categories,
        columns,
        about="Speed-up, its 95 % interval, and tokens per iteration; the number of prompts in brackets.",
    )


def _category_column(name: str, numbers_of_prompts: set[int]) -> Column:
    """A column for one category.

    The number of its prompts is in the heading, or in the cells if pairs differ in it.
    """
    differ = len(numbers_of_prompts) > 1
    heading = name if differ else f"{name} ({min(numbers_of_prompts)})"

    def category_of(pair: MeasuredPair) -> Category | None:
        return next((category for category in pair.categories if category.name == name), None)

    def cell(category: Category) -> str:
        speedup = times(category.speedup.estimate)
        if differ:
            speedup += f" ({category.num_prompts})"
        bounds = interval(category.speedup)
        tokens = category.tokens_per_iteration
        return "\n".join(filter(None, [speedup, bounds, f"{tokens:.2f} tokens" if tokens else ""]))

    return Column(heading, cell, category_of)


def _reasons(pairs: Sequence[MeasuredPair]) -> Table:
    """Why a pair is as fast as it is: acceptance, costs, and what limits it."""
    drafting = [pair for pair in pairs if pair.row.mean_acceptance_length is not None]
    columns = (
        PAIR,
        K,
        ACCEPTED.at("row"),
        Column("of those\ntested", percent, "row.conditional_acceptance_rate", optional=True),
        Column("tokens per\niteration", number(), tokens_per_iteration).at("row"),
        Column("drafting\nms", number(), "row.draft_ms", optional=True),
        Column("verifying\nms", number(), "row.verify_ms", optional=True),
        Column("rest\nms", number(), rest_ms, optional=True).at("row"),
        Column("target\nstep ms", number(), "regular.target_step_ms", optional=True),
        Column("of\npredicted", "{:.0%}".format, share_of_predicted, optional=True).at("row"),
        Column("by\nposition, %", _positions, "row.acceptance_by_position", optional=True),
        Column("of all\niterations, %", _positions, _marginal_alone, optional=True).at("row"),
    )
    about = "Where an iteration's time goes, and how many tokens it yields."
    if any(pair.row.predicted_speedup for pair in drafting):
        about += " Of predicted: measured over predicted speed-up."
    notes = []
    for pair in pairs:
        loses = pair.row.speedup is not None and pair.row.speedup.estimate < 1
        if pair.best and loses and (reason := held_back_in_words(pair.regular, pair.row)):
            notes.append(f"{pair.name.label()}: {reason}.")
    return Table.of(
        "reasons",
        "The reason",
        drafting,
        columns,
        strong="stands_out",
        faint="partial",
        about=about,
        notes=tuple(notes),
    )


def _marginal_alone(row: LatencyRow) -> Sequence[float | None] | None:
    """Acceptance by position where a server's counters tell no more than that of all iterations."""
    return row.marginal_acceptance_by_position if row.acceptance_by_position is None else None


def _positions(rates: Sequence[float | None]) -> str:
    """`92 87 –`, in percent."""
    return " ".join(UNKNOWN if rate is None else f"{100 * rate:.0f}" for rate in rates)


class _Arm(NamedTuple):
    """One arm of a run."""

    pair: MeasuredPair
    row: LatencyRow

    @property
    def num_draft_tokens(self) -> int | str | None:
        return self.pair.name.num_draft_tokens if self.row is self.pair.row else None


def _arms(pairs: Sequence[MeasuredPair]) -> Table:
    """Figures of each arm."""
    arms = [_Arm(pair, row) for pair in pairs for row in pair.run.rows]
    columns = (
        PAIR.at("pair"),
        Column("K", of="num_draft_tokens", identifies_row=True, optional=True),
        *(column.at("row") for column in ARM),
        Column("median\nms/token", number(), "row.ms_per_token_median"),
        Column("greedy texts\nidentical", of=_identical, optional=True),
    )
    return Table.of(
        "all_arms", "Times of each arm", arms, columns, faint="pair.partial", in_full=True
    )


def _identical(arm: _Arm) -> str | None:
    return identical_texts(arm.row, arm.pair.run.prompts)
