"""`map`: speed-ups by batch size, context and K, where speculation stops paying, and a schedule.

A row is a cell of the grid. With a server the batch size is the number of requests in flight, and K
is 0 where the server does not tell its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import fmean
from typing import TypeGuard

from harness.commands.map.rows import MapRow
from harness.commands.map.schedules import Schedule, unsayable
from harness.commands.names import named_runs
from harness.commands.read_runs import Run
from harness.commands.words import device_of, settings_line, title
from harness.engines.registry import is_elsewhere
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import counted
from harness.results.verdict import Verdict, judge, verdict_of
from harness.tables.table import (
    UNKNOWN,
    Column,
    Document,
    Line,
    Table,
    TableRow,
    grouped,
    in_brackets,
    interval,
    sentences,
)

# What a cell says. An interval on both sides of 1 does not tell either.
PAYS = "pays"
DOES_NOT_PAY = "does not pay"
CANNOT_TELL = "cannot tell"


def map_document(rows: Sequence[MapRow]) -> Document:
    """A run's map: the answer, the figures, and what to do with them; nothing where nothing was
    measured.
    """
    cells = cells_of(rows)
    if not cells:
        return []
    document: list[Table | Line] = [
        Line(title(cells[0]), "strong"),
        Line(_settings_of(cells), "dim"),
        Line(_answer(cells, "Speculative decoding"), "strong"),
    ]
    document += [_table(of_context) for of_context in _by_context(cells).values()]
    document += sentences("warning", _undecided(cells))
    if _is_whole(cells):
        document.append(Line(_next_step(cells)))
    else:
        document.append(Line(f"{_how_many(cells)}.", "warning"))
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
        if not cells:
            continue
        subject = named.name.pair if len(runs) > 1 else "Speculative decoding"
        prompts = f"prompts of {cells[0].prompts}" if cells[0].prompts else ""
        settings = " · ".join(filter(None, [prompts, _settings_of(cells)]))
        changes = ["other prompts"]
        if len(_by_context(cells)) == 1:
            changes.append("other contexts (contexts=[512,4096])")
        interpolated = sum(not row.measured for row in cells)
        if interpolated:
            changes.append(f"share=1, which measures the {interpolated} interpolated cells")
        lines += [
            Line(_answer(cells, subject), "strong"),
            Line(f"Measured on {device_of(cells[0])}: {settings}. {_how_many(cells)}."),
            *sentences("plain", _undecided(cells)),
            Line(f"What would change it: {'; '.join(changes)}."),
        ]
    return lines


def _settings_of(cells: Sequence[MapRow]) -> str:
    """The settings that all cells share."""
    return settings_line([replace(cells[0], num_draft_tokens=None, batch_size=None)])


def _answer(cells: Sequence[MapRow], subject: str) -> str:
    """`… pays at batch size 1 to 4.8 and does not pay at batch size 6.7 to 16, with the best K; …`."""
    by_context = _by_context(cells)
    answers = []
    for context, of_context in by_context.items():
        reaches = zip((PAYS, DOES_NOT_PAY), _reach(of_context), strict=True)
        parts = [f"{word} {_at(cells, sizes)}" for word, sizes in reaches if sizes]
        text = " and ".join(parts) or "may or may not pay: no cell can tell"
        place = f" at a context of {context} tokens" if len(by_context) > 1 else ""
        answers.append(f"{text}{place}")
    with_best = ", with the best K" if len(set(map(k_of, cells))) > 1 else ""
    highest = best_of(cells)
    top = f"; the highest speed-up is {cell_in_words(highest)}" if highest is not None else ""
    return f"{subject} {', and '.join(answers)}{with_best}{top}."


def _how_many(cells: Sequence[MapRow]) -> str:
    num_measured = sum(bool(row.measured) for row in cells)
    if not _is_whole(cells):
        measured = f"{counted(num_measured, 'cell')} of the grid measured"
        return f"{cells[0].status} with {measured}".capitalize()
    return f"{num_measured} of {len(cells)} cells were measured"


def _is_whole(cells: Sequence[MapRow]) -> bool:
    """Whether the run measured all the cells that it chose to measure."""
    return all(row.status in (None, "ok", NO_VERDICT) for row in cells)


def _undecided(cells: Sequence[MapRow]) -> str | None:
    """How many measured cells have no verdict, and why; None where all have one."""
    verdicts = [verdict_of(row) for row in cells if row.measured]
    reasons = [verdict.reason for verdict in verdicts if not verdict.can_tell]
    if not reasons:
        return None
    first, *others = dict.fromkeys(reasons)
    others_too = " (others for other reasons)" if others else ""
    number = f"{len(reasons)} of {len(verdicts)} measured cells"
    return f"{number} cannot tell whether it pays: {first}{others_too}."


def cells_of(rows: Sequence[MapRow]) -> list[MapRow]:
    """The rows that have a speed-up, or were refused one."""
    return [row for row in rows if speedup_of(row) is not None or row.status == NO_VERDICT]


def is_ratio(value: float | None) -> TypeGuard[float]:
    """Whether a speed-up is positive and finite: a damaged file may hold any number."""
    return value is not None and 0 < value < math.inf


def speedup_of(row: MapRow) -> float | None:
    """The speed-up of a cell, measured or interpolated; None where it has none."""
    speedup = None if row.speedup is None else row.speedup.estimate
    return speedup if is_ratio(speedup) else None


def k_of(row: MapRow) -> int:
    """The K of a cell; 0 where a server does not tell it."""
    return int(row.num_draft_tokens or 0)


def heading_of(cells: Sequence[MapRow]) -> str:
    """`Speed-up at a context of 512 tokens`."""
    return f"Speed-up at a context of {cells[0].context or 0} tokens"


def load_of(cells: Sequence[MapRow]) -> str:
    """`batch size`, or `requests in flight` of a server."""
    return "requests in flight" if is_elsewhere(cells[0].engine) else "batch size"


def word_of(row: MapRow) -> str:
    """What a cell says: `pays`, `does not pay` or `cannot tell`."""
    words = {"faster": PAYS, "slower": DOES_NOT_PAY}
    return words.get(verdict_of(row).conclusion, CANNOT_TELL)


def _at(cells: Sequence[MapRow], sizes: str) -> str:
    """`at batch size 1 to 4.8`, or `with 1 to 4.8 requests in flight`."""
    if not is_elsewhere(cells[0].engine):
        return f"at batch size {sizes}"
    return f"with {sizes} request{'' if sizes == '1' else 's'} in flight"


def _by_context(cells: Sequence[MapRow]) -> dict[int, list[MapRow]]:
    return grouped(cells, lambda row: row.context or 0)


def _size_of(row: MapRow) -> int:
    return row.batch_size or 1


def best_of(rows: Sequence[MapRow]) -> MapRow | None:
    """The cell with the highest speed-up of those that can tell."""
    known = [row for row in rows if verdict_of(row).can_tell]
    return max(known, key=lambda row: verdict_of(row).speedup.estimate, default=None)


def cell_in_words(row: MapRow) -> str:
    """`2.31× (95 % interval 2.12 to 2.50) with K=3 at batch size 4 and a context of 128 tokens`."""
    place = f"K={row.num_draft_tokens} at batch size {row.batch_size}"
    if is_elsewhere(row.engine):
        place = f"{counted(row.batch_size or 1, 'request')} in flight"
    speedup = verdict_of(row).speedup
    certainty = in_brackets(speedup)
    return f"{speedup.estimate:.2f}×{certainty} with {place} and a context of {row.context} tokens"


def schedule_of(rows: Sequence[MapRow]) -> Schedule | str:
    """The best K of each batch size over all contexts, 0 where none pays; or why there is none.

    Cells that cannot tell decide nothing: a batch size that has no others gets the K of the next
    smaller one. A server whose drafting is switched off keeps its draft: what counts is the gain over
    that where it was measured, else the speed-up, as if switching off were free.

    Of K=5 at batch size 1, K=2 at 16 and none at 64, [(1, 15, 5), (16, 63, 2), (64, 64, 0)].
    """
    if not any(map(k_of, rows)):
        return "the server does not tell its K"
    best: dict[int, int] = {}
    for size, cells in grouped(rows, _size_of).items():
        telling = [row for row in cells if _over_undrafted(row).conclusion in ("faster", "slower")]
        by_k = grouped(telling, k_of)
        # Logarithms, so that twice as fast and half as fast cancel out.
        worth = {
            k: fmean(math.log(_over_undrafted(row).speedup.estimate) for row in of_k)
            for k, of_k in by_k.items()
        }
        if worth:
            most = max(worth, key=lambda k: worth[k])
            best[size] = most if worth[most] > 0 else 0
        elif not best:
            return f"no cell can tell whether it pays {_at(rows, str(size))}"
    if not any(best.values()):
        return "it surely pays nowhere"
    firsts = [size for before, size in pairwise([0, *best]) if best.get(before) != best[size]]
    lasts = [first - 1 for first in firsts[1:]] + [max(best)]
    # The engines want a K from 1 on, although the smallest measured batch size may be larger.
    return [
        (first if place else 1, last, best[first])
        for place, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]


def _over_undrafted(row: MapRow) -> Verdict:
    """Whether drafting pays on a server that could also draft nothing."""
    verdict = verdict_of(row)
    return verdict if row.gain is None or row.status == NO_VERDICT else judge(row.gain)


def _next_step(cells: Sequence[MapRow]) -> str:
    """The schedule, the files that have it, and what no measurement decided."""
    schedule = schedule_of(cells)
    if isinstance(schedule, str):
        return f"No schedule of K for servers: {schedule}."
    load = load_of(cells)
    ranges = ", ".join(f"K={k} at {_range(first, last)}" for first, last, k in schedule)
    texts = [f"Next, by {load}: {ranges} (export=true writes it for vLLM and others)."]
    if any(k == 0 for _, _, k in schedule):
        taxes = [f"{row.tax.estimate:.2f}×" for row in cells if row.tax is not None]
        off = "K=0 as if switching off were free."
        if taxes:
            off = f"K=0 with the draft loaded, which is {min(taxes)} to {max(taxes)} of a server without."
        texts.append(off)
    texts += [f"Not for {engine}: it {why}." for engine, why in unsayable(schedule).items()]
    by_size = grouped([row for row in cells if row.measured], _size_of)
    undecided = [
        size
        for size, of_size in by_size.items()
        if all(word_of(row) == CANNOT_TELL for row in of_size)
    ]
    if undecided:
        sizes = " and ".join(map(str, undecided))
        texts.append(f"At {sizes}, where no cell can tell, the K below stays.")
    last = schedule[-1][1]
    texts.append(f"Above {last} vLLM and SGLang keep the last K, and TensorRT-LLM drafts nothing.")
    return " ".join(texts)


def _reach(cells: Sequence[MapRow]) -> tuple[str, str]:
    """The batch sizes at which any K pays, and those at which none does: `1 to 4.8`, `6.7 to 16`."""
    if not any(verdict_of(row).can_tell for row in cells):
        return "", ""
    lows: dict[int, float] = {}
    highs: dict[int, float] = {}
    for size, of_size in sorted(grouped(cells, _size_of).items()):
        ends = [_log_ends(row) for row in of_size]
        lows[size] = max(low for low, _ in ends)
        highs[size] = -max(high for _, high in ends)
    pays, does_not = (
        " and ".join(_range(*ends) for ends in stretches_above(values)) for values in (lows, highs)
    )
    return pays, does_not


def _log_ends(row: MapRow) -> tuple[float, float]:
    """Logarithms of the ends of a cell's interval, interpolated ones too; infinite without any."""
    speedup = row.speedup
    cannot_tell = row.measured and not verdict_of(row).can_tell
    if cannot_tell or speedup is None or not (is_ratio(speedup.low) and is_ratio(speedup.high)):
        return -math.inf, math.inf
    return math.log(speedup.low), math.log(speedup.high)


def stretches_above(values: Mapping[int, float]) -> list[tuple[float, float]]:
    """The stretches of batch sizes at which a curve is above 0.

    It is straight between logarithms of batch sizes: with values of 1 and -1 at 4 and 16 it crosses
    at 8. Next to minus infinity a stretch ends at the batch size itself.

    Args:
        values: logarithms of speed-ups by batch size, ascending.
    """
    first = next(iter(values))
    points = [(float(first), values[first] > 0)]
    for (size, value), (following, later) in pairwise(values.items()):
        if (value > 0) != (later > 0):
            share = 1.0 if value == -math.inf else value / (value - later)
            points.append((size * (following / size) ** share, True))
        points.append((float(following), later > 0))
    groups = groupby(points, itemgetter(1))
    stretches = [[size for size, _ in group] for is_above, group in groups if is_above]
    return [(stretch[0], stretch[-1]) for stretch in stretches]


def _range(first: float, last: float) -> str:
    """`4`, or `1 to 6.7`."""
    texts = [
        f"{end:.0f}" if end >= 10 or end == int(end) else f"{end:.1f}" for end in (first, last)
    ]
    return " to ".join(dict.fromkeys(texts))


def _table(cells: Sequence[MapRow]) -> Table:
    """The cells of one context: a row for each batch size, a column for each K; below them where
    each K pays.
    """
    by_k = dict(sorted(grouped(cells, k_of).items()))
    rows = []
    for size, of_size in sorted(grouped(cells, _size_of).items()):
        texts = {}
        for row in of_size:
            texts[k_of(row)] = cell_text(row)
            if row.measured:
                certainty = interval(row.speedup) or CANNOT_TELL
                texts[k_of(row)] += f"\n{certainty}"
        rows.append(TableRow((str(size), *map(texts.get, by_k))))
    reaches = [_reach(of_k) for of_k in by_k.values()]
    for place, word in enumerate((PAYS, DOES_NOT_PAY)):
        sizes = [reach[place] for reach in reaches]
        if any(sizes):
            rows.append(TableRow((f"{word} at", *sizes)))
    columns = [Column(load_of(cells)), *(Column(f"K={k}" if k else "its own K") for k in by_k)]
    brackets = "" if all(row.measured for row in cells) else ", those in brackets interpolated"
    notes = (f"{_how_many(cells)}{brackets}.",) if _is_whole(cells) else ()
    return Table("map", heading_of(cells), tuple(columns), tuple(rows), notes=notes)


def cell_text(row: MapRow) -> str:
    """`2.31×`, in brackets where it was interpolated."""
    speedup = speedup_of(row)
    if speedup is None:
        return UNKNOWN
    text = f"{speedup:.2f}×"
    return text if row.measured else f"({text})"
