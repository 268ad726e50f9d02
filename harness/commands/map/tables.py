"""`map`: speed-ups by batch size, context and K, and a schedule.

A row is a cell of the grid. With a server the batch size is the number of requests in flight, and K
is 0 where the server does not report its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from harness.commands.map.rows import MapRow
from harness.config.amounts import counted
from harness.reporting.names import distinct_names
from harness.reporting.page import Page, Step, heading, title_of_many
from harness.reporting.table import Column, Line, Table, TableRow
from harness.reporting.words import settings_line
from harness.results.runs import Run, grouped
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import UNKNOWN
from harness.results.verdict import verdict_of

# First and last batch size of each range, and its K. The ranges adjoin, and the first begins at 1.
Schedule = Sequence[tuple[int, int, int]]

# What a cell says. With an interval on both sides of 1 it is CANNOT_TELL, too.
PAYS = "pays"
DOES_NOT_PAY = "does not pay"
CANNOT_TELL = "cannot tell"
# An answer of 80 characters has room for a table with this many columns.
_NARROW = 4


def map_page(runs: Sequence[Run[MapRow]]) -> Page | None:
    """Where it pays; None where nothing was measured."""
    maps = [run for run in runs if cells_of(run.rows)]
    if not maps:
        return None
    if len(maps) == 1:
        return _page_of_one(cells_of(maps[0].rows))
    cells_by_name = {
        name: cells_of(run.rows) for name, run in zip(map_names(maps), maps, strict=True)
    }
    findings = []
    use = []
    for name, cells in cells_by_name.items():
        found = finding(cells)
        findings.append(Line(f"{name}: {found.text}; {found.more}", found.style))
        if _is_whole(cells):
            use.append(("Use", f"{name}: {_schedule_in_words(cells)}"))
    title = title_of_many(_without_sides(maps))
    return Page(title, findings, tables=[_table(cells_by_name)], why=use)


def _page_of_one(cells: Sequence[MapRow]) -> Page:
    """One map, in a dozen lines as long as it has three batch sizes."""
    doubts = []
    if not _is_whole(cells):
        number = counted(len(cells), "cell")
        doubts.append(f"{cells[0].status} with {number} of the grid measured.".capitalize())
    # Where no cell can tell, the finding says why.
    undecided = _undecided(cells) if best_of(cells) else None
    if undecided:
        doubts.append(undecided)
    table = _table({"": cells})
    if len(table.columns) > _NARROW:
        # All of its columns, below each other where they have no room.
        table = replace(table, title="", look="plain")
    of_all_k = replace(cells[0], num_draft_tokens=None)
    title = heading(of_all_k, settings_line([replace(of_all_k, batch_size=None)]))
    use = [("Use", _schedule_in_words(cells))] if _is_whole(cells) else []
    return Page(title, [finding(cells)], doubts, [table], use, [*_next_steps(cells)])


def finding(cells: Sequence[MapRow]) -> Line:
    """`pays at batch size 1 and 4, not at 16`, and the highest speed-up."""
    sizes = reach(cells)
    best = best_of(cells)
    if best is None:
        return Line("cannot tell", "strong", _undecided(cells) or "nothing was measured")
    verdict = verdict_of(best)
    place = f"K={best.num_draft_tokens}, " if k_of(best) else ""
    more = f"best {verdict.speedup:×}: {place}{_place(best)}"
    if len(by_context(cells)) > 1:
        more += f", context of {best.context} tokens"
        words = [word_of(row) for row in cells]
        text = f"pays in {words.count(PAYS)} of {len(words)} measured cells"
        return Line(text, "good" if PAYS in words else "bad", more)
    if sizes[PAYS]:
        text = f"pays {_at(cells, sizes[PAYS])}"
        text += f", not at {listed(sizes[DOES_NOT_PAY])}" if sizes[DOES_NOT_PAY] else ""
        return Line(text, "good", more)
    if sizes[DOES_NOT_PAY]:
        return Line(f"does not pay {_at(cells, sizes[DOES_NOT_PAY])}", "bad", more)
    return Line(f"{CANNOT_TELL} {_at(cells, sizes[CANNOT_TELL])}", "strong", more)


def _place(row: MapRow) -> str:
    if row.is_elsewhere:
        return f"{counted(row.batch_size or 1, 'request')} in flight"
    return f"batch size {row.batch_size}"


def _next_steps(cells: Sequence[MapRow]) -> Iterator[Step]:
    """The most useful step."""
    if best_of(cells) is None or not _is_whole(cells):
        return
    measured = sorted(set(map(size_of, cells)))
    pays = reach(cells)[PAYS]
    larger = [size for size in measured if pays and size > pays[-1]]
    if larger and larger[0] > pays[-1] + 1:
        # Geometrically between both.
        between = round(math.sqrt(pays[-1] * larger[0]))
        sizes = ",".join(map(str, (pays[-1], between, larger[0])))
        yield Step("where it stops paying", f"'batch_sizes=[{sizes}]'")
    elif pays and not larger:
        sizes = ",".join(str(factor * pays[-1]) for factor in (1, 2, 4))
        yield Step(f"beyond {pays[-1]}", f"'batch_sizes=[{sizes}]'")


def map_names(runs: Sequence[Run[MapRow]]) -> list[str]:
    """A name for each run, `13B with 7B · temperature 1`. Batch size and K are no part of it: a grid has several."""
    return [name.label() for name in distinct_names(_without_sides(runs))]


def _without_sides(runs: Sequence[Run[MapRow]]) -> list[MapRow]:
    return [replace(run.last, num_draft_tokens=None, batch_size=None) for run in runs]


def _is_whole(cells: Sequence[MapRow]) -> bool:
    """Whether the run measured the whole grid."""
    return all(row.status in (None, "ok", NO_VERDICT) for row in cells)


def _undecided(cells: Sequence[MapRow]) -> str | None:
    """How many measured cells have no verdict, and why; None where all have one."""
    verdicts = [verdict_of(row) for row in cells]
    reasons = [verdict.reason for verdict in verdicts if not verdict.has_interval]
    if not reasons:
        return None
    first, *others = dict.fromkeys(reasons)
    others_too = " (others for other reasons)" if others else ""
    number = f"{len(reasons)} of {len(verdicts)} measured cells"
    return f"{number} cannot tell whether it pays: {first}{others_too}."


def cells_of(rows: Sequence[MapRow]) -> list[MapRow]:
    """The rows that have a speed-up, or were refused one."""
    return [row for row in rows if row.status == NO_VERDICT or speedup_of(row) is not None]


def speedup_of(row: MapRow) -> float | None:
    """The speed-up of a cell; None where it has none."""
    speedup = None if row.speedup is None else row.speedup.estimate
    # A damaged file may hold any number.
    is_ratio = speedup is not None and 0 < speedup < math.inf
    return speedup if is_ratio else None


def k_of(row: MapRow) -> int:
    """The K of a cell; 0 where a server does not report it."""
    return int(row.num_draft_tokens or 0)


def load_of(cells: Sequence[MapRow]) -> str:
    """`batch size`, or `requests in flight` of a server."""
    return "requests in flight" if cells[0].is_elsewhere else "batch size"


def word_of(row: MapRow) -> str:
    """What a cell says: `pays`, `does not pay` or `cannot tell`."""
    words = {"faster": PAYS, "slower": DOES_NOT_PAY}
    return words.get(verdict_of(row).conclusion, CANNOT_TELL)


def _at(cells: Sequence[MapRow], sizes: Sequence[int]) -> str:
    """`at batch size 1 and 4`, or `with 1 and 4 requests in flight`."""
    if not cells[0].is_elsewhere:
        return f"at batch size {listed(sizes)}"
    return f"with {listed(sizes)} request{'' if sizes == [1] else 's'} in flight"


def by_context(cells: Sequence[MapRow]) -> dict[int, list[MapRow]]:
    return grouped(cells, lambda row: row.context or 0)


def size_of(row: MapRow) -> int:
    return row.batch_size or 1


def best_of(rows: Sequence[MapRow]) -> MapRow | None:
    """The cell with the highest speed-up of those that can tell."""
    known = [row for row in rows if verdict_of(row).has_interval]
    return max(known, key=lambda row: verdict_of(row).speedup.estimate, default=None)


def schedule_of(rows: Sequence[MapRow]) -> tuple[Schedule, str]:
    """The best K of each batch size over all contexts, 0 where none pays. If there is no schedule
    it is empty, and the text is the reason.

    Cells that cannot tell decide nothing: a batch size that has no others gets the K of the next
    smaller one. A server whose drafting is switched off keeps its draft: what counts is the gain over
    that where it was measured, else the speed-up, as if switching off were free.

    Of K=5 at batch size 1, K=2 at 16 and none at 64, [(1, 15, 5), (16, 63, 2), (64, 64, 0)].
    """
    if not any(map(k_of, rows)):
        return [], "the server does not report its K"
    best: dict[int, int] = {}
    for size, cells in grouped(rows, size_of).items():
        telling = [row for row in cells if verdict_of(row).conclusion in ("faster", "slower")]
        by_k = grouped(telling, k_of)
        # Logarithms, so that twice as fast and half as fast cancel out.
        worth = {
            k: fmean(math.log(verdict_of(row).speedup.estimate) for row in of_k)
            for k, of_k in by_k.items()
        }
        if worth:
            most = max(worth, key=lambda k: worth[k])
            best[size] = most if worth[most] > 0 else 0
        elif not best:
            return [], f"no cell can tell whether it pays {_at(rows, [size])}"
    if not any(best.values()):
        return [], "there is no load at which it surely pays"
    firsts = [size for before, size in pairwise([0, *best]) if best.get(before) != best[size]]
    lasts = [first - 1 for first in firsts[1:]] + [max(best)]
    # vLLM wants a K from 1 on, although the smallest measured batch size may be larger.
    schedule = [
        (first if place else 1, last, best[first])
        for place, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]
    return schedule, ""


def for_vllm(schedule: Schedule) -> str:
    """Entries of vLLM's `--speculative-config`, without the draft's: [first batch size, last, K] of each range."""
    config = {
        "num_speculative_tokens": max(k for _, _, k in schedule),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
    }
    return json.dumps(config, indent=2) + "\n"


def _schedule_in_words(cells: Sequence[MapRow]) -> str:
    """`by batch size: K=5 at 1 to 15, K=0 at 16 (schedule_vllm.json)`."""
    schedule, why_none = schedule_of(cells)
    if not schedule:
        return f"no schedule: {why_none}"
    ranges = []
    for first, last, k in schedule:
        sizes = " to ".join(dict.fromkeys([str(first), str(last)]))
        ranges.append(f"K={k} at {sizes}")
    return f"by {load_of(cells)}: {', '.join(ranges)} (schedule_vllm.json)"


def reach(cells: Sequence[MapRow]) -> dict[str, list[int]]:
    """The batch sizes at which the best K pays, those at which no K does, and where no cell can tell."""
    sizes: dict[str, list[int]] = {PAYS: [], DOES_NOT_PAY: [], CANNOT_TELL: []}
    for size, of_size in sorted(grouped(cells, size_of).items()):
        words = set(map(word_of, of_size))
        best = next(word for word in (PAYS, CANNOT_TELL, DOES_NOT_PAY) if word in words)
        sizes[best].append(size)
    return sizes


def listed(sizes: Sequence[int]) -> str:
    """`1, 4 and 16`."""
    *others, last = map(str, sizes)
    return f"{', '.join(others)} and {last}" if others else last


def _table(maps: Mapping[str, Sequence[MapRow]]) -> Table:
    """A row for each map, context and batch size, a column for each K.

    Args:
        maps: their cells by name.
    """
    cells = [cell for of_map in maps.values() for cell in of_map]
    all_k = sorted(set(map(k_of, cells)))
    rows = []
    for name, of_map in maps.items():
        for context, of_context in by_context(of_map).items():
            for size, of_size in sorted(grouped(of_context, size_of).items()):
                # `2.50× 2.40 to 2.60`, or `1.04× cannot tell` where no interval may be stated.
                texts: dict[int, str] = {}
                for row in of_size:
                    verdict = verdict_of(row)
                    bounds = verdict.speedup.bounds() if verdict.has_interval else CANNOT_TELL
                    texts[k_of(row)] = f"{cell_text(row)} {bounds}"
                rows.append(TableRow((name, context, size, *map(texts.get, all_k))))
    columns = [
        Column("map", text=True, once=True),
        Column("context", once=True, identifies_row=True),
        Column("in flight" if cells[0].is_elsewhere else "batch", identifies_row=True),
        *(Column(f"K={k}" if k else "its own K") for k in all_k),
    ]
    title = f"Speed-up with 95 % intervals, by {load_of(cells)} and K"
    table = Table("map", title, tuple(columns), tuple(rows))
    unneeded = [len(maps) < 2, len({cell.context for cell in cells}) < 2]
    for place in (1, 0):
        table = table.without_column(place) if unneeded[place] else table
    return table


def cell_text(row: MapRow) -> str:
    """`2.31×`."""
    speedup = speedup_of(row)
    return UNKNOWN if speedup is None else f"{speedup:.2f}×"
