"""The page of `map`, about one run or many: latency's figures of every cell, the grid of their speed-ups, and a
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from harness.commands.latency.doubts import shared_doubts
from harness.commands.latency.figures import arms_table, reasons_table
from harness.commands.latency.ranking import RankedRun, ranked_runs
from harness.commands.map.rows import MapRow
from harness.config.amounts import counted
from harness.reporting.names import Name, distinct_names
from harness.reporting.page import NextStep, Page, title_of_many
from harness.reporting.table import Column, Line, Table, TableRow, style_of
from harness.reporting.words import disturbed_runs
from harness.results.judging.grid import cells_of, highest_cell, schedule_file, schedule_of
from harness.results.judging.series import Member, Sides
from harness.results.judging.statement import Relation
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot

# The words of each relation, the best first. Where K differ in it, the best counts.
_WORDS: dict[Relation, str] = {"above": "pays", "open": "cannot tell", "below": "does not pay"}
# Columns in which cells of one grid may differ.
_AXES = ("context", "batch_size")


def map_page(runs: Sequence[Run[MapRow]]) -> Page | None:
    """Where it pays, for each grid; None where nothing was measured.

    Runs that differ in nothing but their cells are one grid, of which the newest run of a cell counts.
    """
    status_by_cell = {
        cell: run.status for run in runs for cell in cells_of(run.rows) if cell.has_figures
    }
    names = distinct_names([cell.last for cell in status_by_cell])
    entries: list[RankedRun] = []
    parts: list[Page] = []
    for named in grouped(zip(names, status_by_cell, strict=True), _grid_key).values():
        # Runs come oldest first, so that the newest run of a cell stays.
        newest = {Sides.of(cell.last): cell for _, cell in named}
        # Intervals hold for all cells of this grid together.
        known = [
            entry
            for entry in ranked_runs([*newest.values()], at_once=True)
            if entry.interval.is_known or entry.run.status == NO_VERDICT
        ]
        if known:
            incomplete = {status_by_cell[entry.run] for entry in known} - {"ok", NO_VERDICT}
            entries += known
            parts.append(_page_of_grid(known, incomplete, has_file=len(runs) == 1))
    if not parts:
        return None

    def plots() -> dict[str, list[Plot]]:
        from harness.commands.latency.plots import latency_plots

        return latency_plots(entries)

    page = parts[0]
    if len(parts) > 1:
        statements = [statement for part in parts for statement in part.statements]
        title = title_of_many([entry.row for entry in entries], "cell")
        page = Page(title, statements=statements, parts=parts)
    return replace(page, plots=plots)


def _grid_key(named: tuple[Name, Run[MapRow]]) -> Sequence[str]:
    """Equal for cells of one grid."""
    name, _ = named
    return name.pair, *(text for column, text in name.settings.items() if column not in _AXES)


def _page_of_grid(entries: Sequence[RankedRun], incomplete: set[str], *, has_file: bool) -> Page:
    """Where it pays in one grid.

    Args:
        incomplete: statuses, such as `interrupted`, of runs that did not measure all of their cells.
        has_file: whether its schedule is in a file.
    """
    cells = [entry.member for entry in entries]
    runs = [entry.run for entry in entries]
    # Without any interval the finding says why: `highest_cell` is then None.
    undecided = _undecided(cells) if highest_cell(cells) else None
    disturbed = disturbed_runs(runs, "cell")
    measured = counted(len(cells), "cell")
    doubts = []
    if incomplete:
        doubts.append(f"{', '.join(sorted(incomplete))} with {measured} of the grid measured.")
    if undecided:
        doubts.append(undecided)
    if disturbed:
        doubts.append(f"{disturbed}.")
    doubts += shared_doubts(runs)
    largest = max(cell.sides.size for cell in cells)
    steps = []
    if not incomplete and any(cell.verdict.pays and cell.sides.size == largest for cell in cells):
        sizes = f"{largest},{2 * largest},{4 * largest}"
        steps.append(NextStep(f"beyond {largest}", f"'batch_sizes=[{sizes}]'"))
    contexts = grouped(cells, attrgetter("sides.context")).values()
    return Page(
        title_of_many([entry.row for entry in entries]),
        [_finding(with_context) for with_context in contexts],
        doubts,
        [_grid(cells), reasons_table(entries), arms_table(entries)],
        [
            *([] if incomplete else _schedules(cells, has_file=has_file)),
            *_prompt_speeds(cells),
        ],
        steps,
        [statement for cell in cells for statement in cell.statements],
    )


def _load(cells: Sequence[Member]) -> str:
    """The name of the load: `batch size`, or `concurrency` for the requests in flight of a server."""
    return "concurrency" if cells[0].run.last.is_elsewhere else "batch size"


def _finding(cells: Sequence[Member]) -> Line:
    """`pays at batch size 1, 4; not at 16`, and the highest speed-up.

    Args:
        cells: with one context.
    """
    context = cells[0].sides.context
    prefix = f"context of {context} tokens: " if context else ""
    up_to = highest_in_words(cells)
    if not up_to:
        return Line(f"{prefix}cannot tell", "strong", _undecided(cells) or "")
    sizes: dict[Relation, list[str]] = {}
    for size, at_size in grouped(cells, attrgetter("sides.size")).items():
        relations = {cell.verdict.relation for cell in at_size}
        best = next(relation for relation in _WORDS if relation in relations)
        sizes.setdefault(best, []).append(str(size))
    # The sentence begins with where it pays, else where it does not.
    order: Sequence[Relation] = ("above", "below", "open")
    first = next(relation for relation in order if relation in sizes)
    text = f"{prefix}{_WORDS[first]} at {_load(cells)} {', '.join(sizes[first])}"
    if first == "above" and "below" in sizes:
        text += f"; not at {', '.join(sizes['below'])}"
    style = next(style_of(cell.verdict) for cell in cells if cell.verdict.relation == first)
    return Line(text, style, up_to)


def highest_in_words(cells: Sequence[Member]) -> str:
    """`up to 2.44× (2.39 to 2.49): K=5, batch size 1, by intervals for 9 cells at once`; empty without intervals."""
    cell = highest_cell(cells)
    if cell is None:
        return ""
    _, size, k = cell.sides
    with_k = f"K={k}, " if k else ""
    text = f"up to {cell.verdict.interval:×}: {with_k}{_load(cells)} {size}"
    family = cell.verdict.family
    return f"{text}, by intervals for {family} cells at once" if family > 1 else text


def _undecided(cells: Sequence[Member]) -> str | None:
    """How many cells cannot tell, and how many for the first reason; None if each has an interval."""
    reasons = [cell.verdict.why for cell in cells if not cell.verdict.is_judged]
    if not reasons:
        return None
    num_open = sum(not cell.verdict.is_conclusion for cell in cells)
    number = f"{num_open} of {len(cells)} measured cells cannot tell whether it pays"
    num_alike = reasons.count(reasons[0])
    share = f", {num_alike} of them for this reason" if num_alike < num_open else ""
    return f"{number}{share}: {reasons[0]}."


def _schedules(cells: Sequence[Member], *, has_file: bool) -> Iterator[tuple[str, str]]:
    """`by batch size: K=5 at 1 to 15, K=0 at 16 (schedule_vllm.json)`, for each context."""
    for context, with_context in grouped(cells, attrgetter("sides.context")).items():
        prefix = f"context of {context} tokens, " if context else ""
        schedule, why_none = schedule_of(with_context)
        if not schedule:
            yield "Use", f"{prefix}no schedule: {why_none}"
            continue
        ranges = []
        for first, last, k in schedule:
            sizes = " to ".join(dict.fromkeys([str(first), str(last)]))
            ranges.append(f"K={k} at {sizes}")
        file = f" ({schedule_file(context)})" if has_file else ""
        yield "Use", f"{prefix}by {_load(cells)}: {', '.join(ranges)}{file}"


def _prompt_speeds(cells: Sequence[Member]) -> Iterator[tuple[str, str]]:
    """How fast prompts are read: `4,267 tokens/s of 512 tokens`, by the regular arm's first token at batch size 1."""
    speeds: dict[int, str] = {}
    for cell in cells:
        regular, context = cell.run.rows[0], cell.sides.context
        first_ms = regular.time_to_first_token_ms
        if context and first_ms and cell.sides.size == 1 and not regular.cached_tokens:
            speeds[context] = f"{1000 * context / first_ms:,.0f} tokens/s of {context} tokens"
    if speeds:
        yield "Read", f"{', '.join(speeds.values())} (prompts, regular arm)"


def _grid(cells: Sequence[Member]) -> Table:
    """A row for each context and batch size, a column for each K."""
    all_k = sorted({cell.sides.k for cell in cells})
    rows = []
    ordered = sorted(cells, key=attrgetter("sides"))
    for sides, in_row in grouped(ordered, attrgetter("sides.context", "sides.size")).items():
        by_k = {cell.sides.k: cell for cell in in_row}
        rows.append(TableRow((*sides, *map(by_k.get, all_k))))
    columns = (
        Column("context", once=True, varies=True, identifies_row=True),
        Column(_load(cells), identifies_row=True),
        *(Column(f"K={k}" if k else "its own K", _cell) for k in all_k),
    )
    title = f"Speed-up with 95 % intervals, by {_load(cells)} and K"
    # All columns are kept: without room they are printed below each other.
    return Table("map", title, columns, tuple(rows), look="plain")


def _cell(cell: Member) -> str:
    """`2.50× (2.40 to 2.60)`, or `1.04× cannot tell` where no interval may be stated."""
    return f"{cell.verdict.interval:×}" + ("" if cell.verdict.is_judged else " cannot tell")
