"""The tables of `latency` with all their columns: pairs, why they are as fast as they are, categories of prompts, turns
of conversations, and published figures next to ours.

The path of a column starts at a `RankedRun`: `row` is the row of its speculative arm (without a draft, of the regular
arm), and `regular` the row of its regular arm. The arguments of a `Column` are its heading, the function that makes a
cell's text from a value, and the path or the function that reads the value.
`Column(…, "conditional_acceptance_rate").at(_tested).at("row")` reads `pair.row`, passes it to `_tested`, and reads the
column from the result. If a step gives None, the cell is empty. `optional` leaves out a column without any value, and
`varies` one whose values are all equal; `once` leaves a cell empty that repeats the cell above it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from harness.commands.latency.answer import stated_speedup
from harness.commands.latency.checks import findings
from harness.commands.latency.costs import (
    StepCosts,
    costs_in_steps,
    share_of_iteration,
    share_of_predicted,
    strongest_limit,
)
from harness.commands.latency.ranking import RankedRun, certainty
from harness.config.acceptance_rules import tests_each_token
from harness.config.amounts import percent
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number, share, stated, times, with_bounds
from harness.results.drafts import Drafts, as_printed
from harness.results.prompt_times import (
    common_times,
    pairs_by_unit,
    places_by_unit,
    waits_by_unit,
)
from harness.results.published import DIFFERENCES, Published, published_for
from harness.results.rows.prompts import LatencyPromptRow
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import DASH, Interval
from harness.results.statistics.ratios import ratio_of_totals

# Columns about a row of `latency`.

# If tokens were held back, the first token arrived late.
FIRST_TOKEN = Column("first token ms", number(1), "time_to_first_token_ms", optional=True).at(
    lambda row: None if row.held_back else row
)
_ACCEPTED = Column("accepted", share, "acceptance_rate")
# Columns about a pair.
_PAIR = Column("pair", text=True, of="name.cell", once=True, varies=True)
_K = Column("K", of="name.k", optional=True)


# A target alone has no speed-up.
_SPEEDUP = Column("speed-up", stated, "verdict", reference=1).at(
    lambda pair: pair if pair.verdict.interval.is_known else None
)
_PAIRS = (
    Column("pair", text=True, of="name.pair", once=True, varies=True),
    Column("settings", text=True, of=lambda pair: " · ".join(pair.name.details), optional=True),
    _K,
    _SPEEDUP,
    Column("", of="remark", optional=True, text=True),
    # A run without a draft has the row of the regular arm alone.
    Column(
        "spec.\nms/token",
        number(),
        lambda pair: None if pair.row is pair.regular else pair.row.ms_per_token,
    ),
    Column("regular\nms/token", number(), "regular.ms_per_token"),
    _ACCEPTED.at("row"),
    Column(
        "runs",
        # `run.times` also counts repetitions that are not pooled (`pooling.merge`).
        of=lambda pair: pair.row.repeats if pair.row.repeat == "all" else pair.run.times,
        varies=True,
        meaning="number of runs, which are pooled; if they give no interval together, only the newest is shown",
    ),
)


def pairs_table(pairs: Sequence[RankedRun]) -> Table:
    """The speed-up of each pair and K, with the settings in which they differ.

    Args:
        pairs: at least one.
    """
    speedup = replace(_SPEEDUP, heading=f"speed-up\n({certainty(pairs)})")
    columns = [speedup if column is _SPEEDUP else column for column in _PAIRS]
    notes = tuple(findings([pair.run for pair in pairs], ["setting note"]))
    return Table.of("pairs", "How much faster?", pairs, columns, strong="is_first", notes=notes)


def _positions(rates: Sequence[float | None]) -> str:
    """The rates in percent: `92 87 –`."""
    return " ".join(DASH if rate is None else f"{100 * rate:.0f}" for rate in rates)


def _costs(pair: RankedRun) -> StepCosts | None:
    """The costs `draft` and `verify` of a pair; None if one is unknown."""
    return costs_in_steps(pair.regular, pair.row)


def _tested(row: LatencyRow) -> LatencyRow | None:
    """The row; None if whole blocks are verified, because no token is then tested by itself."""
    return row if tests_each_token(row.rule) else None


_REASONS = (
    _PAIR,
    replace(_K, varies=True),
    _ACCEPTED.at("row"),
    Column("of those\ntested", share, "conditional_acceptance_rate", optional=True)
    .at(_tested)
    .at("row"),
    Column("tokens per\niteration", number(), "row.tokens_per_iteration"),
    Column(
        "acceptance\nlength",
        number(),
        "row.mean_acceptance_length",
        meaning="tokens per iteration that drafted something",
    ),
    Column("drafted", number(), "row.mean_num_draft_tokens", optional=True),
    Column(
        "c",
        number(3),
        "draft",
        optional=True,
        meaning="time of a draft token, in steps of the target",
    ).at(_costs),
    Column(
        "v",
        number(),
        "verify",
        optional=True,
        meaning="time of a verification, in regular steps",
    ).at(_costs),
    Column(
        "step",
        percent,
        lambda pair: share_of_iteration(pair.run),
        optional=True,
        meaning="time of a regular step, as a share of an iteration's time",
    ),
    Column("predicted", times, "row.predicted_speedup", optional=True),
    Column(
        "of\npredicted",
        percent,
        share_of_predicted,
        optional=True,
        meaning="decode-only speed-up divided by the predicted one",
    ).at("row"),
    Column(
        "held back most",
        text=True,
        of=lambda pair: strongest_limit(pair.regular, pair.row),
        optional=True,
        meaning="what limits the speed-up most, and the speed-up without it",
    ),
    Column("by\nposition, %", _positions, "acceptance_by_position", optional=True)
    .at(_tested)
    .at("row"),
    Column(
        "of iterations\nthat drafted, %",
        _positions,
        "row.marginal_acceptance_by_position",
        optional=True,
    ),
    # Not `text=True`, which allows line breaks: an id that is broken in two cannot be copied.
    Column("run", of="row.run", varies=True),
)


def reasons_table(pairs: Sequence[RankedRun]) -> Table:
    """A table of the reasons for each pair's speed-up: tokens per iteration, costs, and the strongest limit."""
    drafting = [pair for pair in pairs if pair.row.mean_acceptance_length is not None]
    notes = []
    for pair in drafting:
        figures = ", ".join(f"{name} {value}" for name, value in as_printed(pair.row).items())
        if figures:
            name = f"{pair.name.label()}: " if len(drafting) > 1 else ""
            notes.append(f"{name}The server prints for such counts: {figures}.")
    return Table.of("reasons", "Why?", drafting, _REASONS, strong="is_first", notes=notes)


# A speed-up over fewer prompts would be mostly noise.
_FEWEST_PROMPTS = 4


@dataclass(frozen=True)
class Category:
    """The prompts of one category, or of one turn, that the speculative arm finished.

    Attributes:
        name: the category, or the number of the turn.
        num_prompts: number of different prompts; a prompt that was sent again counts once.
        speedup: over the prompts that both arms finished; None if `num_prompts` is below four.
        acceptance_rate, tokens_per_iteration: of the speculative arm; None if unknown.
        pair: name of the run in the table; empty if there is only one run.
    """

    name: str
    num_prompts: int
    speedup: Interval | None
    acceptance_rate: float | None
    tokens_per_iteration: float | None
    pair: str = ""


def divided_tables(pairs: Sequence[RankedRun]) -> list[Table]:
    """The figures of each pair at its best K, by category of prompts and by turn of conversations."""
    return [
        _divided("categories", "category", "With which prompts?", pairs),
        _divided("turns", "turn", "In which turn?", pairs),
    ]


def _divided(key: str, column: str, title: str, pairs: Sequence[RankedRun]) -> Table:
    """A table with a row for each value of a column of prompts, and each pair; empty if there is only one value."""
    parts = []
    for pair in pairs:
        if pair.is_best_of_draft:
            name = pair.name.label() if len(pairs) > 1 else ""
            for part in categories_of(pair.run, attrgetter(column)):
                parts.append(replace(part, pair=name))
    by_name = grouped(parts, attrgetter("name"))
    columns = (
        Column(column, text=True, of="name", once=True),
        Column("pair", text=True, of="pair", optional=True),
        Column("prompts", of="num_prompts"),
        Column("speed-up\n(95 % interval)", with_bounds, "speedup", optional=True),
        Column("acceptance", share, "acceptance_rate", optional=True),
        Column("tokens/iteration", number(), "tokens_per_iteration", optional=True),
    )
    # A single value would only repeat the whole.
    shown = itertools.chain(*by_name.values()) if len(by_name) > 1 else []
    about = "A speed-up needs at least four prompts, an interval at least eight prompts or laps."
    return Table.of(key, title, shown, columns, about=about)


def categories_of(
    run: Run[LatencyRow], name_of: Callable[[LatencyPromptRow], object]
) -> list[Category]:
    """Speed-up and acceptance for each category of a run's prompts.

    [] for batches, because the prompts of a batch are timed together, and for a run without a draft.

    Args:
        name_of: returns the name of a prompt's category; None for a prompt without one.
    """
    row = run.last
    if row.arm == "regular" or row.is_batched:
        return []
    named = [prompt for prompt in run.prompt_rows if name_of(prompt)]
    parts = []
    for name, prompts in grouped(named, name_of).items():
        drafted = [prompt for prompt in prompts if prompt.arm == row.arm and prompt.is_timed]
        num_prompts = len({prompt.place for prompt in drafted})
        # For each unit, the time and the number of tokens of both arms (`BothWaits`).
        waits = waits_by_unit(pairs_by_unit(prompts), is_batched=False)
        speedup = None
        if waits and num_prompts >= _FEWEST_PROMPTS:
            regular_times, speculative_times = common_times([waits])
            # The requests of a lap are in flight together, so they are one unit, which has several places. All turns of
            # a conversation, and all repetitions of a prompt, are one unit with one place.
            places = places_by_unit(prompts).values()
            unit = "lap" if any(len(together) > 1 for together in places) else "prompt"
            speedup = ratio_of_totals(regular_times, speculative_times, unit)
        rates = Drafts.total(prompt.drafts for prompt in drafted).columns()
        parts.append(
            Category(
                str(name),
                num_prompts,
                speedup,
                acceptance_rate=rates["acceptance_rate"],
                tokens_per_iteration=rates["tokens_per_iteration"],
            )
        )
    return parts


class _Counterparts(NamedTuple):
    """A published figure, the row of our own measurement of the same pair or target, and the name of this pair or
    target.
    """

    name: str
    theirs: Published
    ours: LatencyRow


def published_table(pairs: Sequence[RankedRun]) -> Table:
    """Published figures next to those that we measured, for the same pairs or targets.

    A figure about a pair is in the table once, next to the first of our runs of this pair. A figure about a target is
    in the table once for each of our devices.
    """
    counterparts: dict[Hashable, _Counterparts] = {}
    for pair in pairs:
        for figure in published_for(pair.row):
            name, ours, device = pair.name.label(), pair.run.row("speculative"), None
            if not figure.drafts:
                name, ours, device = pair.model, pair.regular, pair.row.devices
            if ours is not None:
                key = (id(figure), device)
                counterparts.setdefault(key, _Counterparts(name, figure, ours))
    sources = dict.fromkeys(item.theirs.source for item in counterparts.values())
    return Table.of(
        "published",
        "Next to published figures",
        counterparts.values(),
        _PUBLISHED,
        about="Hardware, prompts and code differ: compare speed-ups rather than times.",
        notes=[f"{name}: {DIFFERENCES[name]}." for name in sources if name in DIFFERENCES],
    )


_PUBLISHED = (
    Column("pair", text=True, of="name"),
    Column("prompts", text=True, of="theirs.prompts_text", optional=True),
    Column("published by", text=True, of="theirs.source"),
    Column("their hardware", text=True, of=lambda item: item.theirs.hardware or "not stated"),
    Column("our hardware", text=True, of="ours.devices", optional=True),
    Column("their\nms/token", "{:.3g}".format, "theirs.ms_per_token"),
    Column("our\nms/token", number(), "ours.ms_per_token", optional=True),
    Column("their\nspeed-up", of="theirs.speedup_text"),
    Column("our\nspeed-up", with_bounds, stated_speedup, optional=True).at("ours"),
    Column("their tokens\nper iteration", number(), "theirs.mean_acceptance_length", optional=True),
    # Where theirs are known.
    Column("our tokens\nper iteration", number(), "ours.tokens_per_iteration", optional=True).at(
        lambda item: item if item.theirs.mean_acceptance_length else None
    ),
)
