"""The page of `map`, about one run or many: speed-ups by batch size, context and K, and a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from harness.commands.latency.tables.doubts import shared_doubts
from harness.commands.map.grid import (
    CANNOT_TELL,
    DOES_NOT_PAY,
    PAYS,
    Point,
    load_of,
    named_points,
    schedule_of,
    shared_row,
)
from harness.commands.map.rows import MapRow
from harness.config.amounts import counted
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Style, Table, TableRow
from harness.reporting.words import disturbed_runs, settings_line
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT

if TYPE_CHECKING:
    from harness.reporting.drawing import Plot

_STYLES: dict[str, Style] = {PAYS: "good", CANNOT_TELL: "strong", DOES_NOT_PAY: "bad"}


def map_page(runs: Sequence[Run[MapRow]]) -> Page | None:
    """Where it pays; None where nothing was measured."""

    def plots() -> dict[str, list[Plot]]:
        from harness.commands.map.plots import map_plots

        return map_plots(runs)

    maps = named_points(runs)
    if not maps:
        return None
    firsts = [shared_row(points) for points in maps.values()]
    is_alone = len(maps) == 1
    title = heading(firsts[0], settings_line(firsts)) if is_alone else title_of_many(firsts)
    findings = []
    doubts = []
    use = []
    for name, points in maps.items():
        prefix = "" if is_alone else f"{name}: "
        for with_context in grouped(points, attrgetter("context")).values():
            line = _finding(with_context)
            findings.append(replace(line, text=prefix + line.text))
        ended = {point.row.status for point in points} - {None, "ok", NO_VERDICT}
        if not ended:
            use.append(("Use", prefix + _schedule_in_words(points)))
        else:
            number = counted(len(points), "cell")
            doubts.append(
                f"{prefix}{', '.join(map(str, ended))} with {number} of the grid measured."
            )
        # Where no cell can tell, the finding says why.
        undecided = _undecided(points)
        if undecided and best_in_words(points):
            doubts.append(prefix + undecided)
        cells = [Run([point.row]) for point in points]
        disturbed = disturbed_runs(cells, "cell")
        if disturbed:
            doubts.append(f"{prefix}{disturbed}.")
        doubts += [prefix + doubt for doubt in shared_doubts(cells)]
    steps = []
    largest = max(point.size for point in points)
    if is_alone and use and any(point.word == PAYS and point.size == largest for point in points):
        sizes = f"{largest},{2 * largest},{4 * largest}"
        steps.append(Step(f"beyond {largest}", f"'batch_sizes=[{sizes}]'"))
    return Page(title, findings, doubts, [_table(maps)], use, steps, plots)


def _finding(points: Sequence[Point]) -> Line:
    """`pays at batch size 1, 4; not at 16`, and the highest speed-up.

    Args:
        points: with one context.
    """
    context = points[0].context
    prefix = f"context of {context} tokens: " if context else ""
    best = best_in_words(points)
    if not best:
        return Line(f"{prefix}{CANNOT_TELL}", "strong", _undecided(points) or "")
    # By what the best K says there.
    sizes: dict[str, list[str]] = {word: [] for word in _STYLES}
    for size, at_size in grouped(points, attrgetter("size")).items():
        words = {point.word for point in at_size}
        sizes[next(word for word in _STYLES if word in words)].append(str(size))
    word = next(word for word in (PAYS, DOES_NOT_PAY, CANNOT_TELL) if sizes[word])
    text = f"{prefix}{word} at {load_of(points)} {', '.join(sizes[word])}"
    if word == PAYS and sizes[DOES_NOT_PAY]:
        text += f"; not at {', '.join(sizes[DOES_NOT_PAY])}"
    return Line(text, _STYLES[word], best)


def best_in_words(points: Sequence[Point]) -> str:
    """`best 2.44× (2.39 to 2.49): K=5, batch size 1`, of the points that can tell; empty without any."""
    decidable = [point for point in points if point.verdict.has_interval]
    if not decidable:
        return ""
    best = max(decidable, key=lambda point: point.verdict.speedup.estimate)
    k = f"K={best.k}, " if best.k else ""
    return f"best {best.verdict.speedup:×}: {k}{load_of(points)} {best.size}"


def _undecided(points: Sequence[Point]) -> str | None:
    """How many measured cells have no verdict, and why; None where all have one."""
    reasons = [point.verdict.reason for point in points if not point.verdict.has_interval]
    if not reasons:
        return None
    first, *others = dict.fromkeys(reasons)
    others_too = " (others for other reasons)" if others else ""
    number = f"{len(reasons)} of {len(points)} measured cells"
    return f"{number} cannot tell whether it pays: {first}{others_too}."


def _schedule_in_words(points: Sequence[Point]) -> str:
    """`by batch size: K=5 at 1 to 15, K=0 at 16 (schedule_vllm.json)`."""
    schedule, why_none = schedule_of(points)
    if not schedule:
        return f"no schedule: {why_none}"
    ranges = []
    for first, last, k in schedule:
        sizes = " to ".join(dict.fromkeys([str(first), str(last)]))
        ranges.append(f"K={k} at {sizes}")
    return f"by {load_of(points)}: {', '.join(ranges)} (schedule_vllm.json)"


def _table(maps: Mapping[str, Sequence[Point]]) -> Table:
    """A row for each map, context and batch size, a column for each K.

    Args:
        maps: their points by name.
    """
    points = [point for points in maps.values() for point in points]
    all_k = sorted({point.k for point in points})
    rows = []
    for name, map_points in maps.items():
        for sides, with_sides in grouped(map_points, attrgetter("context", "size")).items():
            by_k = {point.k: point for point in with_sides}
            rows.append(TableRow((name, *sides, *map(by_k.get, all_k))))
    columns = (
        Column("map", text=True, once=True, varies=True),
        Column("context", once=True, varies=True, identifies_row=True),
        Column(load_of(points), identifies_row=True),
        *(Column(f"K={k}" if k else "its own K", _cell) for k in all_k),
    )
    title = f"Speed-up with 95 % intervals, by {load_of(points)} and K"
    # All of its columns, below each other where they have no room.
    return Table("map", title, columns, tuple(rows), look="plain")


def _cell(point: Point) -> str:
    """`2.50× (2.40 to 2.60)`, or `1.04× cannot tell` where no interval may be stated."""
    verdict = point.verdict
    return f"{verdict.speedup:×}" + ("" if verdict.has_interval else f" {CANNOT_TELL}")
