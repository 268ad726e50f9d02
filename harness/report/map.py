"""`map`: speed-ups by batch size, context and K, where speculation stops paying, and a schedule.

A row is a cell of the grid. With a server the batch size is the number of requests in flight, and K
is 0 where the server does not tell its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeGuard

from harness.menu.records import is_elsewhere
from harness.report.names import named_runs
from harness.report.runs import Run
from harness.report.table import Column, Document, Line, Table, TableRow, grouped, sentences
from harness.report.words import device_of, settings_line, title
from harness.results.rows.map import MapRow
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL, counted


def map_document(rows: Sequence[MapRow]) -> Document:
    """A run's map; nothing where nothing was measured."""
    cells = cells_of(rows)
    if not cells:
        return []
    document: list[Table | Line] = [
        Line(title(cells[0]), "strong"),
        Line(_settings_of(cells), "dim"),
    ]
    for of_context in _by_context(cells).values():
        document.append(_table(of_context))
        document += [Line(text) for text in _reach_by_k(of_context)]
    best = best_of(cells)
    if best is not None:
        document.append(Line(f"The highest speed-up is {cell_in_words(best)}.", "strong"))
    if any(map(k_of, cells)) and _is_whole(cells):
        schedule = schedule_of(cells)
        ranges = ", ".join(f"{k} from {size} on" for size, k in schedule.items())
        text = f"K by {load_of(cells)}, 0 where drafting does not pay: {ranges}."
        document.append(Line(text))
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


def _settings_of(cells: Sequence[MapRow]) -> str:
    """The settings that all cells share."""
    return settings_line([replace(cells[0], num_draft_tokens=None, batch_size=None)])


def _answer(cells: Sequence[MapRow], subject: str) -> list[Line]:
    by_context = _by_context(cells)
    reaches = []
    for context, of_context in by_context.items():
        place = f" at a context of {context} tokens" if len(by_context) > 1 else ""
        best = _best_by_size(of_context)
        reaches.append(f"{_reach(best)}{place}{_reach_interval(best)}")
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
    prompts = f"prompts of {cells[0].prompts}" if cells[0].prompts else ""
    settings = " · ".join(filter(None, [prompts, _settings_of(cells)]))
    return f"Measured on {device_of(cells[0])}: {settings}. {_how_many(cells)}."


def _how_many(cells: Sequence[MapRow]) -> str:
    num_measured = sum(bool(row.measured) for row in cells)
    if not _is_whole(cells):
        measured = f"{counted(num_measured, 'cell')} of the grid measured"
        return f"{cells[0].status} with {measured}".capitalize()
    others = ", others interpolated" if num_measured < len(cells) else ""
    return f"{num_measured} of {len(cells)} cells were measured{others}"


def _is_whole(cells: Sequence[MapRow]) -> bool:
    """Whether the run measured all the cells that it chose to measure."""
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
    """The rows that have a speed-up."""
    return [row for row in rows if is_ratio(row.speedup)]


def is_ratio(value: float | None) -> TypeGuard[float]:
    """Whether a speed-up is positive and finite: a damaged file may hold any number."""
    return value is not None and 0 < value < math.inf


def k_of(row: MapRow) -> int:
    """The K of a cell; 0 where a server does not tell it."""
    return int(row.num_draft_tokens or 0)


def heading_of(cells: Sequence[MapRow]) -> str:
    """`Speed-up at a context of 512 tokens`."""
    return f"Speed-up at a context of {cells[0].context or 0} tokens"


def load_of(cells: Sequence[MapRow]) -> str:
    """`batch size`, or `requests in flight` of a server."""
    return "requests in flight" if is_elsewhere(cells[0].engine) else "batch size"


def _by_context(cells: Sequence[MapRow]) -> dict[int, list[MapRow]]:
    return grouped(cells, lambda row: row.context or 0)


def _best_by_size(cells: Sequence[MapRow]) -> list[MapRow]:
    """The cell with the highest speed-up of each batch size."""
    by_size = grouped(cells, _size_of).values()
    return [max(of_size, key=lambda row: row.speedup or 0.0) for of_size in by_size]


def _size_of(row: MapRow) -> int:
    return row.batch_size or 1


def best_of(rows: Sequence[MapRow]) -> MapRow | None:
    """The measured cell with the highest speed-up."""
    measured = [row for row in rows if row.measured and row.speedup]
    return max(measured, key=lambda row: row.speedup or 0.0, default=None)


def cell_in_words(row: MapRow) -> str:
    """`2.31× with K=3 at batch size 4 and a context of 128 tokens`."""
    place = f"K={row.num_draft_tokens} at batch size {row.batch_size}"
    if is_elsewhere(row.engine):
        place = f"{counted(row.batch_size or 1, 'request')} in flight"
    return f"{row.speedup:.2f}× with {place} and a context of {row.context} tokens"


def schedule_of(rows: Sequence[MapRow]) -> dict[int, int]:
    """The best K from each batch size on, over all contexts; 0 where none is above 1.

    {1: 5, 16: 2, 64: 0}: K=5 for batch sizes 1 to 15, K=2 for 16 to 63, no drafting from 64 on.
    """
    schedule: dict[int, int] = {}
    last = None
    for batch_size, cells in grouped(rows, _size_of).items():
        by_k = grouped(cells, k_of)
        # Logarithms, so that twice as fast and half as fast cancel out.
        worth = {k: fmean(math.log(row.speedup or 1.0) for row in of_k) for k, of_k in by_k.items()}
        best = max(worth, key=lambda k: worth[k])
        chosen = best if worth[best] > 0 else 0
        if chosen != last:
            schedule[batch_size] = chosen
        last = chosen
    return schedule


def crossing(batch_sizes: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The batch size at which the speed-up falls to 1; None if it does not.

    It is interpolated between logarithms: speed-ups of 2 and 0.5 at batch sizes 4 and 16 cross at
    8. It is 0 where the speed-up is not above 1 at the smallest batch size.

    Args:
        batch_sizes: ascending, with a speed-up each.
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
    """The cells of one context: a row for each batch size, a column for each K."""
    numbers = sorted({k_of(row) for row in cells})
    rows = []
    for size, of_size in grouped(cells, _size_of).items():
        by_k = {k_of(row): row for row in of_size}
        rows.append(TableRow((size, *map(by_k.get, numbers))))
    columns = [Column(load_of(cells))]
    columns += [Column(f"K={k}" if k else "its own K", cell_text) for k in numbers]
    notes: tuple[str, ...] = ()
    if not all(row.measured for row in cells):
        notes = ("In brackets: interpolated between cells that were measured.",)
    return Table("map", heading_of(cells), tuple(columns), tuple(rows), notes=notes)


def cell_text(row: MapRow) -> str:
    """`2.31×`, in brackets where it was interpolated."""
    text = f"{row.speedup:.2f}×"
    return text if row.measured else f"({text})"


def _reach_by_k(cells: Sequence[MapRow]) -> list[str]:
    """A sentence for each K: `K=4 pays up to a batch size of 12 (95 % intervals: 10 to 15).`"""
    texts = []
    for k, of_k in grouped(cells, k_of).items():
        subject = f"K={k}" if k else "Speculation"
        texts.append(f"{subject} {_reach(of_k)}{_reach_interval(of_k)}.")
    return texts


def _reach(cells: Sequence[MapRow]) -> str:
    """`pays up to a batch size of 12`.

    Args:
        cells: one for each batch size, ascending.
    """
    sizes = list(map(_size_of, cells))
    end = crossing(sizes, [row.speedup or 1.0 for row in cells])
    in_batches = load_of(cells) == "batch size"
    if end == 0:
        return "does not pay"
    if end is None:
        every = "at every batch size" if in_batches else "with any number of requests in flight"
        return f"pays {every} up to {sizes[-1]}"
    up_to = f"a batch size of {end:.2g}" if in_batches else f"{end:.2g} requests in flight"
    return f"pays up to {up_to}"


def _reach_interval(cells: Sequence[MapRow]) -> str:
    """The batch sizes at which the ends of the intervals fall to 1; empty without intervals."""
    lows = [row.speedup_low for row in cells if row.speedup_low is not None]
    highs = [row.speedup_high for row in cells if row.speedup_high is not None]
    if len(lows) < len(cells) or len(highs) < len(cells):
        return ""
    sizes = list(map(_size_of, cells))
    ends = [crossing(sizes, lows), crossing(sizes, highs)]
    low, high = (f"over {sizes[-1]}" if end is None else f"{end:.2g}" for end in ends)
    return f" (95 % intervals: {low} to {high})" if low != high else ""
