"""Speed-up and acceptance by category of prompts, and by turn of conversations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from harness.commands.latency.tables.ranking import RankedRun
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number, share, with_bounds
from harness.results.prompt_times import common_times, waits_of_both_arms
from harness.results.rows.prompts import LatencyPromptRow, tokens_per_iteration
from harness.results.runs import Run, grouped
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ratio_of_totals

# The speed-up of fewer prompts is noise.
_FEWEST_PROMPTS = 4


@dataclass(frozen=True)
class Category:
    """The prompts of one category, or of one turn, that the speculative arm finished.

    Attributes:
        num_prompts: different ones; a prompt that was asked again counts once.
        speedup: over those that both arms finished; None for fewer than four prompts.
        pair: its name among several.
    """

    name: str
    num_prompts: int
    speedup: Interval | None
    acceptance_rate: float | None
    tokens_per_iteration: float | None
    pair: str = ""


def divided_tables(pairs: Sequence[RankedRun]) -> list[Table]:
    """Pairs at their best K by category of prompts, and by turn."""
    return [
        _divided("categories", "category", "With which prompts?", pairs),
        _divided("turns", "turn", "In which turn?", pairs),
    ]


def _divided(key: str, column: str, title: str, pairs: Sequence[RankedRun]) -> Table:
    """A table with a row for each value that a column of prompts has, and each pair."""
    parts = []
    for pair in pairs:
        if pair.is_best_of_draft:
            name = pair.name.label() if len(pairs) > 1 else ""
            for part in parts_of(pair.run, attrgetter(column)):
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
    # A single one says nothing new.
    shown = itertools.chain(*by_name.values()) if len(by_name) > 1 else []
    about = "Speed-ups are of four prompts or more, intervals of eight."
    return Table.of(key, title, shown, columns, about=about)


def parts_of(run: Run[LatencyRow], name_of: Callable[[LatencyPromptRow], object]) -> list[Category]:
    """Speed-up and acceptance of parts of a run's prompts; [] for batches, which time all their prompts together.

    Args:
        name_of: the name of the part that a prompt belongs to; None for a prompt of none.
    """
    row = run.last
    each_is_timed = row.batch_size == 1 or row.was_served
    if row.arm == "regular" or not each_is_timed:
        return []
    named = [prompt for prompt in run.prompt_rows if name_of(prompt)]
    parts = []
    for name, prompts in grouped(named, name_of).items():
        drafted = [prompt for prompt in prompts if prompt.arm == row.arm and prompt.is_timed]
        num_prompts = len({prompt.place for prompt in drafted})
        waits = waits_of_both_arms(prompts)
        speedup = None
        if waits and num_prompts >= _FEWEST_PROMPTS:
            regular_times, speculative_times = common_times([waits])
            # Requests that were in flight together share a lap's conditions; turns and repetitions of a prompt are one.
            unit = "lap" if any(len(places) > 1 for places in waits) else "prompt"
            speedup = ratio_of_totals(regular_times, speculative_times, unit)
        num_proposed = 0.0
        num_accepted = 0
        for prompt in drafted:
            histogram = prompt.acceptance_histogram or []
            num_proposed += sum(histogram) * (prompt.mean_proposed or 0)
            num_accepted += sum(accepted * times for accepted, times in enumerate(histogram))
        part = Category(
            str(name),
            num_prompts,
            speedup,
            acceptance_rate=num_accepted / num_proposed if num_proposed else None,
            tokens_per_iteration=tokens_per_iteration(drafted),
        )
        parts.append(part)
    return parts
