"""Speed-ups over a grid of batch size, context and K: tables, where speculation stops paying, and a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple, TypeGuard

from harness.menu.records import is_elsewhere
from harness.report.names import named_runs
from harness.report.runs import Run
from harness.report.table import Column, Document, Line, Table, grouped, sentences
from harness.report.words import settings_line, title
from harness.results.schema import MapRow
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL


class MapLine(NamedTuple):
    """The cells of one batch size and context, by K."""

    batch_size: int
    by_k: dict[int, MapRow]


def map_document(rows: Sequence[MapRow]) -> Document:
    """A run's map; nothing where nothing was measured."""
    cells = cells_of(rows)
    if not cells:
        return []
    document: list[Table | Line] = [Line(title(cells[0]), "strong")]
    common = replace(cells[0], num_draft_tokens=None, batch_size=None)
    document.append(Line(settings_line([common]), "dim"))
    for of_context in _by_context(cells).values():
        document.append(_table(of_context))
        document += [Line(text) for text in _lines(of_context)]
    best = best_of(cells)
    if best is not None:
        document.append(Line(f"The highest speed-up is {cell_in_words(best)}.", "strong"))
    if any(map(k_of, cells)) and _is_whole(cells):
        schedule = schedule_of(cells)
        words = ", ".join(f"{k} from {size} on" for size, k in schedule.items())
        by = load_of(cells)
        document.append(Line(f"K by {by}, 0 where drafting does not pay: {words}."))
    document.append(Line(f"{_how_many(cells)}.", "dim" if _is_whole(cells) else "warning"))
    document += sentences("warning", _without_interval(cells))
    return document


def map_documents(runs: Sequence[Run]) -> Document:
    """The maps of several runs. Plots are with the first, `map`; others have numbered keys."""
    document = [part for run in runs for part in map_document(run.rows)]
    num_tables = 0
    for place, part in enumerate(document):
        if isinstance(part, Table):
            num_tables += 1
            if num_tables > 1:
                document[place] = replace(part, key=f"{part.key}-{num_tables}")
    return document


def map_headlines(runs: Sequence[Run]) -> list[Line]:
    """The answer of each map, what it covers, and what would change it."""
    lines = []
    for named in named_runs(runs):
        cells = cells_of(named.run.rows)
        if cells:
            lines += _answer(cells, named.name.pair if len(runs) > 1 else "Speculative decoding")
    return lines


def _answer(cells: Sequence[MapRow], subject: str) -> list[Line]:
    by_context = _by_context(cells)
    reaches = []
    for context, of_context in by_context.items():
        place = f" at a context of {context} tokens" if len(by_context) > 1 else ""
        sizes, best = _best_by_size(of_context)
        reaches.append(f"{_reach(best, sizes)}{place}{_bounds(best, sizes)}")
    highest = best_of(cells)
    top = f"; the highest speed-up is {cell_in_words(highest)}" if highest is not None else ""
    with_best = ", with the best K" if any(map(k_of, cells)) else ""
    answer = f"{subject} {', and '.join(reaches)}{with_best}{top}."
    changes = ["other prompts"]
    if len(by_context) == 1:
        changes.append("other contexts (contexts=[512,4096])")
    interpolated = sum(not row.measured for row in cells)
    if interpolated:
        changes.append(f"share=1, which measures the {interpolated} interpolated cells")
    return [
        Line(answer, "strong"),
        Line(_coverage(cells)),
        *sentences("plain", _without_interval(cells)),
        Line(f"What would change it: {'; '.join(changes)}."),
    ]


def _coverage(cells: Sequence[MapRow]) -> str:
    common = replace(cells[0], num_draft_tokens=None, batch_size=None)
    parts = [f"prompts of {cells[0].prompts}" if cells[0].prompts else "", settings_line([common])]
    where = cells[0].devices or "an unknown device"
    return f"Measured on {where}: {' · '.join(filter(None, parts))}. {_how_many(cells)}."


def _how_many(cells: Sequence[MapRow]) -> str:
    num_measured = sum(bool(row.measured) for row in cells)
    if not _is_whole(cells):
        plural = "" if num_measured == 1 else "s"
        measured = f"{num_measured} cell{plural} of the grid measured"
        return f"{cells[0].status} with {measured}".capitalize()
    others = ", others interpolated" if num_measured < len(cells) else ""
    return f"{num_measured} of {len(cells)} cells were measured{others}"


def _is_whole(cells: Sequence[MapRow]) -> bool:
    """Whether the run measured all that it wanted to."""
    return cells[0].status in (None, "ok")


def _without_interval(cells: Sequence[MapRow]) -> str | None:
    """How many measured cells have no interval, and what would give them one; None where all have one."""
    measured = [row for row in cells if row.measured]
    missing = [row for row in measured if row.speedup_low is None]
    if not missing:
        return None
    enough = FEWEST_FOR_INTERVAL * max(row.batch_size or 1 for row in missing)
    return (
        f"{len(missing)} of {len(measured)} measured cells have no interval, so that it is not"
        f" certain whether speculation pays there: it takes {FEWEST_FOR_INTERVAL} batches (of a"
        f" server, laps), here num_prompts={enough} of a set that has as many."
    )


def cells_of(rows: Sequence[MapRow]) -> list[MapRow]:
    """The rows that have a speed-up. A damaged file may hold any number."""
    return [row for row in rows if is_ratio(row.speedup)]


def is_ratio(value: float | None) -> TypeGuard[float]:
    """Whether it is a positive number."""
    return value is not None and 0 < value < math.inf


def k_of(row: MapRow) -> int:
    """The K of a cell; 0 where a server does not tell it."""
    return int(row.num_draft_tokens or 0)


def heading_of(cells: Sequence[MapRow]) -> str:
    """`Speed-up at a context of 512 tokens`."""
    return f"Speed-up at a context of {cells[0].context or 0} tokens"


def load_of(cells: Sequence[MapRow]) -> str:
    """The word for batch sizes."""
    return "requests in flight" if is_elsewhere(cells[0].engine) else "batch size"


def _by_context(cells: Sequence[MapRow]) -> dict[int, list[MapRow]]:
    return grouped(cells, lambda row: row.context or 0)


def _best_by_size(cells: Sequence[MapRow]) -> tuple[list[int], list[MapRow]]:
    """Batch sizes, and of each the cell with the highest speed-up."""
    by_size = grouped(cells, lambda row: row.batch_size or 1)
    best = [max(of_size, key=lambda row: row.speedup or 0.0) for of_size in by_size.values()]
    return list(by_size), best


def best_of(rows: Sequence[MapRow]) -> MapRow | None:
    """The measured cell with the highest speed-up."""
    measured = [row for row in rows if row.measured and row.speedup]
    return max(measured, key=lambda row: row.speedup or 0.0, default=None)


def cell_in_words(row: MapRow) -> str:
    """`2.31× with K=3 at batch size 4 and a context of 128 tokens`."""
    place = f"K={row.num_draft_tokens} at batch size {row.batch_size}"
    if is_elsewhere(row.engine):
        plural = "" if row.batch_size == 1 else "s"
        place = f"{row.batch_size} request{plural} in flight"
    return f"{row.speedup:.2f}× with {place} and a context of {row.context} tokens"


def schedule_of(rows: Sequence[MapRow]) -> dict[int, int]:
    """The best K from each batch size on, over all contexts; 0 where none is above 1."""
    schedule: dict[int, int] = {}
    for batch_size, cells in grouped(rows, lambda row: row.batch_size or 1).items():
        by_k = grouped(cells, k_of)
        worth = {k: fmean(math.log(row.speedup or 1.0) for row in of_k) for k, of_k in by_k.items()}
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


def _table(cells: Sequence[MapRow]) -> Table:
    numbers = sorted({k_of(row) for row in cells})
    lines = [
        MapLine(size, {k_of(row): row for row in of_size})
        for size, of_size in grouped(cells, lambda row: row.batch_size or 1).items()
    ]
    columns = [Column(load_of(cells), str, "batch_size")]
    columns += [Column(f"K={k}" if k else "its own K", of=partial(_cell, k=k)) for k in numbers]
    notes: tuple[str, ...] = ()
    if not all(row.measured for row in cells):
        notes = ("In brackets: interpolated between cells that were measured.",)
    return Table.of("map", heading_of(cells), lines, columns, notes=notes)


def _cell(line: MapLine, k: int) -> str | None:
    row = line.by_k.get(k)
    return None if row is None else cell_text(row)


def cell_text(row: MapRow) -> str:
    """`2.31×`, in brackets where it was interpolated."""
    text = f"{row.speedup:.2f}×"
    return text if row.measured else f"({text})"


def _lines(cells: Sequence[MapRow]) -> list[str]:
    """Up to which batch size each K pays."""
    sentences = []
    for k, of_k in grouped(cells, k_of).items():
        subject = f"K={k}" if k else "Speculation"
        sizes = [row.batch_size or 1 for row in of_k]
        sentences.append(f"{subject} {_reach(of_k, sizes)}{_bounds(of_k, sizes)}.")
    return sentences


def _reach(cells: Sequence[MapRow], sizes: Sequence[int]) -> str:
    """Up to which batch size these cells pay, one for each size."""
    end = crossing(sizes, [row.speedup or 1.0 for row in cells])
    in_batches = load_of(cells) == "batch size"
    if end == 0:
        return "does not pay"
    if end is None:
        every = "at every batch size" if in_batches else "with any number of requests in flight"
        return f"pays {every} up to {sizes[-1]}"
    up_to = f"a batch size of {end:.2g}" if in_batches else f"{end:.2g} requests in flight"
    return f"pays up to {up_to}"


def _bounds(cells: Sequence[MapRow], sizes: Sequence[int]) -> str:
    """Where the ends of the intervals cross 1; empty without intervals."""
    lows = [row.speedup_low for row in cells if row.speedup_low is not None]
    highs = [row.speedup_high for row in cells if row.speedup_high is not None]
    if len(lows) < len(cells) or len(highs) < len(cells):
        return ""
    ends = [crossing(sizes, lows), crossing(sizes, highs)]
    words = [f"over {sizes[-1]}" if end is None else f"{end:.2g}" for end in ends]
    return f" (95 % intervals: {words[0]} to {words[1]})" if words[0] != words[1] else ""


def _without_repetitions(schedule: dict[int, int]) -> dict[int, int]:
    kept: dict[int, int] = {}
    for size, k in schedule.items():
        if not kept or list(kept.values())[-1] != k:
            kept[size] = k
    return kept
