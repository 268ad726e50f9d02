"""The page of `latency`, about one run or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from harness.commands.latency.answer import end, has_verdict, headline, reasons
from harness.commands.latency.checks import checked, disturbed_runs, doubts, findings, notes
from harness.commands.latency.figures import (
    FIRST_TOKEN,
    divided_tables,
    pairs_table,
    published_table,
    reasons_table,
)
from harness.commands.latency.ranking import (
    RankedRun,
    among_themselves,
    answers,
    ranked_runs,
    schedules,
    shared_details,
)
from harness.commands.latency.steps import (
    steps_after_run,
    steps_after_runs,
    steps_without_interval,
)
from harness.config.amounts import counted
from harness.measuring.rows import LatencyRow
from harness.reporting.page import Page, figures_table, heading, num_runs, title_of_many
from harness.reporting.table import Column, Line, Table, number
from harness.reporting.words import arm_name, settings_line
from harness.results.runs import Run, grouped

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot

# The length of the longest bar, in characters.
_BAR = 16


def latency_page(runs: Sequence[Run[LatencyRow]]) -> Page | None:
    """The page of one run or of many; None if nothing was measured.

    If some of several runs have a verdict, only these are in the tables, under names that tell them apart from each
    other; a single one keeps the name that tells it apart from all. The others are listed (`Page.without_verdict`).
    """
    pairs = ranked_runs(runs)
    judged = [pair for pair in pairs if pair.has_verdict or len(pairs) == 1]
    if len(judged) > 1:
        judged = among_themselves(judged)

    def plots() -> dict[str, list[Plot]]:
        from harness.commands.latency.plots import latency_plots

        return latency_plots(judged)

    if len(judged) > 1:
        page = _page_of_runs(judged)
    elif judged:
        page = _page_of_run(judged[0])
    elif pairs:
        whole = [pair for pair in pairs if not pair.is_partial]
        page = _part(whole) if whole else Page(title_of_many([pair.row for pair in pairs]))
        nothing = [Line("No run has a verdict.", "strong")]
        page = replace(page, finding=nothing)
    else:
        return None
    if len(pairs) > 1:
        statements = [said for pair in pairs for said in pair.statements]
        others = [pair.run for pair in pairs if not pair.has_verdict]
        steps = [*steps_without_interval(pairs), *page.next]
        page = replace(page, statements=statements, without_verdict=others, next=steps)
    return replace(page, plots=plots)


def _page_of_run(pair: RankedRun) -> Page:
    """The page of a single run: the verdict, both arms, the reasons, next steps, and all figures."""
    run, verdict = pair.run, pair.verdict
    title = heading(run.last, settings_line(run.rows)).split(" · ")
    return Page(
        " · ".join(dict.fromkeys([*title, *pair.name.details])),
        finding=[headline(verdict)] if has_verdict(run.rows) else [],
        doubts=doubts(run),
        tables=[
            _bars(run.rows),
            reasons_table([pair]),
            *divided_tables([pair]),
            published_table([pair] if run.status == "ok" else []),
            figures_table(run.rows, arm_name, [f"Run {run.id}.", *notes(run)]),
        ],
        why=[
            *(("Why", reason) for reason in reasons(run, verdict)),
            *(("Checked", held) for held in checked(run)),
            *(("Ended", ended) for ended in end(run.last)),
        ],
        next=steps_after_run(run.last, verdict),
        statements=[verdict] if has_verdict(run.rows) else [],
    )


def _page_of_runs(pairs: Sequence[RankedRun]) -> Page:
    """The page of many runs: a part for each series of several runs (series with a conclusion first), and a last part
    for all other runs.
    """
    by_series = grouped(pairs, attrgetter("series")).values()
    parts = [_part(group) for group in by_series if len(group) > 1]
    parts.sort(key=lambda part: not any(line.style in ("good", "bad") for line in part.finding))
    single = [group[0] for group in by_series if len(group) == 1]
    if single:
        parts.append(_part(single, "single run"))
    page = parts[0]
    if len(parts) > 1:
        page = Page(title_of_many([pair.row for pair in pairs]), parts=parts)
    doubts = [*disturbed_runs([pair.run for pair in pairs]), *page.doubts]
    why = [*page.why, *schedules(pairs)]
    return replace(page, doubts=doubts, why=why, next=steps_after_runs(pairs))


def _part(group: Sequence[RankedRun], noun: str = "run") -> Page:
    """The part of a page about one series, or about single runs: the findings, and a row for each run.

    Args:
        group: the runs, with the names that distinguish them among all runs of the page.
        noun: what the runs are called in the title.
    """
    pairs = among_themselves(group)
    rows = [pair.row for pair in pairs]
    parts_of_title = title_of_many(rows, noun).split(" · ")
    parts_of_title += shared_details(group)
    if noun != "run" and len(pairs) > 1:
        # `title_of_many` names the number only if the runs have several pairs.
        number_of_runs = counted(num_runs(rows), noun)
        parts_of_title = [part for part in parts_of_title if part != number_of_runs]
        parts_of_title.insert(0, f"{number_of_runs}, not compared with each other")
    # For each series whose runs cannot be ranked, the reason.
    not_ranked = []
    for members in grouped(group, attrgetter("series")).values():
        why_not = members[0].series.why_not
        if why_not:
            whose = ", ".join([members[0].model, *shared_details(members)])
            not_ranked.append(f"{whose}: pairs that are close are not ordered, because {why_not}.")
    against = findings([pair.run for pair in pairs], ["setting against"])
    # Each pair at its best K, and targets without a draft.
    shown = [pair for pair in pairs if pair.is_best_of_draft or pair.speedup is None]
    return Page(
        " · ".join(dict.fromkeys(parts_of_title)),
        finding=answers(pairs),
        doubts=[*against, *not_ranked],
        tables=[
            pairs_table(pairs),
            *divided_tables(pairs),
            reasons_table(pairs),
            published_table(shown),
        ],
    )


def _bars(rows: Sequence[LatencyRow]) -> Table:
    """A line for each arm, with a bar whose length is proportional to the time per token."""
    longest = max(row.ms_per_token or 0.0 for row in rows) or 1.0
    columns = (
        Column("", text=True, of=arm_name),
        Column("ms/token", number(), "ms_per_token"),
        Column("tokens/s", number(1), "tokens_per_second", optional=True),
        FIRST_TOKEN,
        # The bar is last, because a narrow terminal leaves out columns from the right.
        Column("", lambda ms: "█" * round(_BAR * ms / longest), "ms_per_token", text=True),
    )
    return Table.of("bars", "", rows, columns, look="bare")
