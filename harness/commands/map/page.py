"""The page of `map`, about one run or many: speed-ups by batch size, context and K, and a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from harness.commands.latency.tables.doubts import shared_doubts
from harness.commands.map.grid import load_of, named_grids, shared_row
from harness.commands.map.rows import MapRow
from harness.config.amounts import counted
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Style, Table, TableRow
from harness.reporting.words import disturbed_runs, settings_line
from harness.results.judging.grid import Point, highest, schedule_of
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot

PAYS = "pays"
DOES_NOT_PAY = "does not pay"
# No interval, or one that includes 1.
CANNOT_TELL = "cannot tell"
# By what is said of a speed-up; of several K at one load the first of these counts.
_WORDS: dict[str, tuple[str, Style]] = {
    "faster": (PAYS, "good"),
    "cannot tell": (CANNOT_TELL, "strong"),
    "slower": (DOES_NOT_PAY, "bad"),
}


def map_page(runs: Sequence[Run[MapRow]]) -> Page | None:
    """Where it pays, for each grid; None where nothing was measured."""

    def plots() -> dict[str, list[Plot]]:
        from harness.commands.map.plots import map_plots

        return map_plots(runs)

    grids = [points for _, points in named_grids(runs)]
    if not grids:
        return None
    parts = [_page_of_grid(points, has_file=len(runs) == 1) for points in grids]
    page = parts[0]
    if len(parts) > 1:
        statements = [statement for part in parts for statement in part.statements]
        title = title_of_many([shared_row(points) for points in grids])
        page = Page(title, statements=statements, parts=parts)
    return replace(page, plots=plots)


def _page_of_grid(points: Sequence[Point], *, has_file: bool) -> Page:
    """Where it pays in one grid.

    Args:
        has_file: whether its schedule is in a file.
    """
    shared = shared_row(points)
    contexts = grouped(points, attrgetter("context")).values()
    cells = [Run([point.row]) for point in points]
    ended = {point.row.status for point in points} - {None, "ok", NO_VERDICT}
    # Where no cell can tell, the finding says why.
    undecided = _undecided(points) if highest(points) else None
    disturbed = disturbed_runs(cells, "cell")
    measured = counted(len(points), "cell")
    doubts = [
        ended and f"{', '.join(map(str, ended))} with {measured} of the grid measured.",
        undecided,
        disturbed and f"{disturbed}.",
        *shared_doubts(cells),
    ]
    largest = max(point.size for point in points)
    steps = []
    if not ended and any(point.at_once.pays and point.size == largest for point in points):
        sizes = f"{largest},{2 * largest},{4 * largest}"
        steps.append(Step(f"beyond {largest}", f"'batch_sizes=[{sizes}]'"))
    return Page(
        heading(shared, settings_line([shared])),
        [_finding(with_context) for with_context in contexts],
        [doubt for doubt in doubts if doubt],
        [_table(points)],
        [] if ended else [("Use", _schedule_in_words(points, has_file=has_file))],
        steps,
        [point.at_once for point in points],
    )


def _finding(points: Sequence[Point]) -> Line:
    """`pays at batch size 1, 4; not at 16`, and the highest speed-up.

    Args:
        points: with one context.
    """
    context = points[0].context
    prefix = f"context of {context} tokens: " if context else ""
    up_to = highest_in_words(points)
    if not up_to:
        return Line(f"{prefix}{CANNOT_TELL}", "strong", _undecided(points) or "")
    # By what the best K says there.
    sizes: dict[str, list[str]] = {relation: [] for relation in _WORDS}
    for size, at_size in grouped(points, attrgetter("size")).items():
        relations = {point.at_once.relation for point in at_size}
        relation = next(relation for relation in _WORDS if relation in relations)
        sizes[relation].append(str(size))
    relation = next(name for name in ("faster", "slower", "cannot tell") if sizes[name])
    word, style = _WORDS[relation]
    text = f"{prefix}{word} at {load_of(points)} {', '.join(sizes[relation])}"
    if relation == "faster" and sizes["slower"]:
        text += f"; not at {', '.join(sizes['slower'])}"
    return Line(text, style, up_to)


def highest_in_words(points: Sequence[Point]) -> str:
    """`up to 2.44× (2.39 to 2.49): K=5, batch size 1, by intervals for 9 cells at once`; empty without intervals."""
    point = highest(points)
    if point is None:
        return ""
    k = f"K={point.k}, " if point.k else ""
    text = f"up to {point.at_once.interval:×}: {k}{load_of(points)} {point.size}"
    family = point.at_once.family
    return f"{text}, by intervals for {family} cells at once" if family > 1 else text


def _undecided(points: Sequence[Point]) -> str | None:
    """How many measured cells have no verdict, and why; None where all have one."""
    reasons = [point.alone.why for point in points if not point.alone.has_interval]
    if not reasons:
        return None
    first, *others = dict.fromkeys(reasons)
    others_too = " (others for other reasons)" if others else ""
    number = f"{len(reasons)} of {len(points)} measured cells"
    return f"{number} cannot tell whether it pays: {first}{others_too}."


def _schedule_in_words(points: Sequence[Point], *, has_file: bool) -> str:
    """`by batch size: K=5 at 1 to 15, K=0 at 16 (schedule_vllm.json)`."""
    schedule, why_none = schedule_of(points)
    if not schedule:
        return f"no schedule: {why_none}"
    ranges = []
    for first, last, k in schedule:
        sizes = " to ".join(dict.fromkeys([str(first), str(last)]))
        ranges.append(f"K={k} at {sizes}")
    file = " (schedule_vllm.json)" if has_file else ""
    return f"by {load_of(points)}: {', '.join(ranges)}{file}"


def _table(points: Sequence[Point]) -> Table:
    """A row for each context and batch size, a column for each K."""
    all_k = sorted({point.k for point in points})
    rows = []
    for sides, with_sides in grouped(points, attrgetter("context", "size")).items():
        by_k = {point.k: point for point in with_sides}
        rows.append(TableRow((*sides, *map(by_k.get, all_k))))
    columns = (
        Column("context", once=True, varies=True, identifies_row=True),
        Column(load_of(points), identifies_row=True),
        *(Column(f"K={k}" if k else "its own K", _cell) for k in all_k),
    )
    title = f"Speed-up with 95 % intervals, by {load_of(points)} and K"
    # All of its columns, below each other where they have no room.
    return Table("map", title, columns, tuple(rows), look="plain")


def _cell(point: Point) -> str:
    """`2.50× (2.40 to 2.60)`, or `1.04× cannot tell` where no interval may be stated."""
    return f"{point.alone.interval:×}" + ("" if point.alone.has_interval else f" {CANNOT_TELL}")
