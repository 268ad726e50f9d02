"""Speed-ups over a grid of batch size, context and K: tables, where speculation stops paying, and a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from harness.report.table import Column, Document, Line, Table, grouped
from harness.report.words import settings_line, title
from harness.results.schema import MapRow


class MapLine(NamedTuple):
    """The cells of one batch size and context, by K."""

    batch_size: int
    by_k: dict[int, MapRow]


def map_document(rows: Sequence[MapRow]) -> Document:
    """A run's map; nothing where nothing was measured."""
    cells = [row for row in rows if row.speedup is not None]
    if not cells:
        return []
    document: list[Table | Line] = [Line(title(cells[0]), "strong")]
    common = replace(cells[0], num_draft_tokens=None, batch_size=None)
    document.append(Line(settings_line([common]), "dim"))
    for context, of_context in grouped(cells, lambda row: row.context or 0).items():
        document.append(_table(context, of_context))
        document += [Line(text) for text in _lines(of_context)]
    best = best_of(cells)
    assert best is not None
    document.append(Line(f"The highest speed-up is {cell_in_words(best)}.", "strong"))
    schedule = schedule_of(cells)
    words = ", ".join(f"{k} from batch size {size} on" for size, k in schedule.items())
    document.append(Line(f"K by batch size, 0 where drafting does not pay: {words}."))
    num_measured = sum(bool(row.measured) for row in cells)
    document.append(
        Line(f"{num_measured} of {len(cells)} cells were measured, others interpolated.", "dim")
    )
    return document


def best_of(rows: Sequence[MapRow]) -> MapRow | None:
    """The measured cell with the highest speed-up."""
    measured = [row for row in rows if row.measured and row.speedup]
    return max(measured, key=lambda row: row.speedup or 0.0, default=None)


def cell_in_words(row: MapRow) -> str:
    """`2.31× with K=3 at batch size 4 and a context of 128 tokens`."""
    place = f"K={row.num_draft_tokens} at batch size {row.batch_size}"
    return f"{row.speedup:.2f}× with {place} and a context of {row.context} tokens"


def schedule_of(rows: Sequence[MapRow]) -> dict[int, int]:
    """The best K from each batch size on, over all contexts; 0 where none is above 1."""
    schedule: dict[int, int] = {}
    for batch_size, cells in grouped(rows, lambda row: row.batch_size or 1).items():
        by_k = grouped(cells, lambda row: int(row.num_draft_tokens or 0))
        worth = {k: _mean_log(of_k) for k, of_k in by_k.items()}
        best = max(worth, key=lambda k: worth[k])
        schedule[batch_size] = best if worth[best] > 0 else 0
    return _without_repetitions(schedule)


def crossing(batch_sizes: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The batch size at which the speed-up falls to 1, on a line through the logarithms; None if it does not.

    0 where it is not above 1 at the smallest batch size.
    """
    if speedups[0] <= 1:
        return 0.0
    for place in range(1, len(speedups)):
        if speedups[place] <= 1:
            above, below = math.log(speedups[place - 1]), math.log(speedups[place])
            part = above / (above - below)
            smaller, larger = math.log(batch_sizes[place - 1]), math.log(batch_sizes[place])
            return math.exp(smaller + part * (larger - smaller))
    return None


def _table(context: int, cells: Sequence[MapRow]) -> Table:
    numbers = sorted({int(row.num_draft_tokens or 0) for row in cells})
    lines = [
        MapLine(size, {int(row.num_draft_tokens or 0): row for row in of_size})
        for size, of_size in grouped(cells, lambda row: row.batch_size or 1).items()
    ]
    columns = [Column("batch size", str, "batch_size")]
    columns += [Column(f"K={k}", of=partial(_cell, k=k)) for k in numbers]
    notes = ("In brackets: interpolated between cells that were measured.",)
    heading = f"Speed-up at a context of {context} tokens"
    return Table.of("map", heading, lines, columns, notes=notes)


def _cell(line: MapLine, k: int) -> str:
    row = line.by_k[k]
    text = f"{row.speedup:.2f}×"
    return text if row.measured else f"({text})"


def _lines(cells: Sequence[MapRow]) -> list[str]:
    """Up to which batch size each K pays."""
    sentences = []
    for k, of_k in grouped(cells, lambda row: row.num_draft_tokens).items():
        sizes = [row.batch_size or 1 for row in of_k]
        end = crossing(sizes, [row.speedup or 1.0 for row in of_k])
        sentences.append(f"K={k} {_reach(end, sizes)}{_bounds(of_k, sizes)}.")
    return sentences


def _reach(end: float | None, sizes: Sequence[int]) -> str:
    if end is None:
        return f"pays at every batch size up to {sizes[-1]}"
    if end == 0:
        return "does not pay"
    return f"pays up to a batch size of {end:.2g}"


def _bounds(cells: Sequence[MapRow], sizes: Sequence[int]) -> str:
    """Where the ends of the intervals cross 1; empty without intervals."""
    lows = [row.speedup_low for row in cells if row.speedup_low is not None]
    highs = [row.speedup_high for row in cells if row.speedup_high is not None]
    if len(lows) < len(cells) or len(highs) < len(cells):
        return ""
    ends = [crossing(sizes, lows), crossing(sizes, highs)]
    words = [f"over {sizes[-1]}" if end is None else f"{end:.2g}" for end in ends]
    return f" (95 % intervals: {words[0]} to {words[1]})" if words[0] != words[1] else ""


def _mean_log(rows: Sequence[MapRow]) -> float:
    return sum(math.log(row.speedup or 1.0) for row in rows) / len(rows)


def _without_repetitions(schedule: dict[int, int]) -> dict[int, int]:
    kept: dict[int, int] = {}
    for size, k in schedule.items():
        if not kept or list(kept.values())[-1] != k:
            kept[size] = k
    return kept
