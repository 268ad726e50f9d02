"""`map`: speed-ups by batch size, context and K, and a schedule.

A row is a cell of the grid. With a server the batch size is the number of requests in flight, and K
is 0 where the server does not report its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import TypeGuard

from harness.commands.answers import Step, answer, answer_of_sweep, heading
from harness.commands.map.rows import MapRow
from harness.commands.map.schedules import Schedule
from harness.commands.names import Named, named_runs
from harness.commands.read_runs import Run
from harness.commands.words import device_of, settings_line, title, typed_again
from harness.engines.registry import is_elsewhere
from harness.results.schema import NO_VERDICT
from harness.results.statistics.interval import counted
from harness.results.verdict import verdict_of
from harness.tables.table import (
    UNKNOWN,
    Answer,
    Column,
    Document,
    Line,
    Table,
    TableRow,
    grouped,
    in_brackets,
    interval,
    sentences,
    times,
)

# What a cell says. With an interval on both sides of 1 it is CANNOT_TELL, too.
PAYS = "pays"
DOES_NOT_PAY = "does not pay"
CANNOT_TELL = "cannot tell"


def map_answer(rows: Sequence[MapRow]) -> Answer:
    """Where it pays, in a dozen lines as long as there are three batch sizes; empty where nothing was measured."""
    cells = cells_of(rows)
    if not cells:
        return []
    schedule, _ = schedule_of(cells)
    why = []
    if schedule and _is_whole(cells):
        why.append(("Use", f"by {load_of(cells)}: {_ranges(schedule)}"))
    return answer(
        heading(replace(cells[0], num_draft_tokens=None), _settings_of(cells)),
        finding(cells),
        [_speedups(cells)],
        doubts=[] if _is_whole(cells) else [f"{_how_many(cells)}."],
        why=why,
        steps=_next_steps(cells),
    )


def map_details(rows: Sequence[MapRow]) -> Document:
    """Each cell with its interval, and the schedule of K."""
    cells = cells_of(rows)
    document: list[Table | Line] = [_table(of_context) for of_context in by_context(cells).values()]
    document += sentences("warning", _undecided(cells))
    if _is_whole(cells):
        document.append(Line(_schedule_in_words(cells)))
    else:
        document.append(Line(f"{_how_many(cells)}.", "warning"))
    return document


def map_document(rows: Sequence[MapRow]) -> Document:
    """The map of a run among others: the answer in a sentence, and every cell."""
    cells = cells_of(rows)
    if not cells:
        return []
    return [
        Line(title(cells[0]), "strong"),
        Line(_settings_of(cells), "dim"),
        Line(_answer(cells, "Speculative decoding"), "strong"),
        *map_details(rows),
    ]


def finding(cells: Sequence[MapRow]) -> Line:
    """`pays at batch size 1 and 4, not at 16`, and the highest speed-up."""
    sizes = reach(cells)
    best = best_of(cells)
    if best is None:
        return Line("cannot tell", "strong", _undecided(cells) or "nothing was measured")
    verdict = verdict_of(best)
    place = f"K={best.num_draft_tokens}, " if k_of(best) else ""
    more = (
        f"best {verdict.speedup.estimate:.2f}× ({interval(verdict.speedup)}): {place}{_place(best)}"
    )
    if len(by_context(cells)) > 1:
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
    if is_elsewhere(row.engine):
        return f"{counted(row.batch_size or 1, 'request')} in flight"
    return f"batch size {row.batch_size}"


def _speedups(cells: Sequence[MapRow]) -> Table:
    """A row for each batch size, a column for each K."""
    by_k = dict(sorted(grouped(cells, k_of).items()))
    rows = []
    for context, of_context in by_context(cells).items():
        for size, of_size in sorted(grouped(of_context, size_of).items()):
            texts = {k_of(row): _in_short(row) for row in of_size}
            rows.append(TableRow((context, str(size), *map(texts.get, by_k))))
    several = len(by_context(cells)) > 1
    columns = [
        Column("context", lambda length: str(length) if several else "", optional=True, once=True),
        Column(load_of(cells)),
        *(Column(f"K={k}" if k else "its own K") for k in by_k),
    ]
    return Table("map", "", tuple(columns), tuple(rows), look="bare")


def _in_short(row: MapRow) -> str:
    return CANNOT_TELL if word_of(row) == CANNOT_TELL else cell_text(row)


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
        yield Step("where it stops paying", typed_again(f"'batch_sizes=[{sizes}]'"))
    elif pays and not larger:
        sizes = ",".join(str(factor * pays[-1]) for factor in (1, 2, 4))
        yield Step(f"beyond {pays[-1]}", typed_again(f"'batch_sizes=[{sizes}]'"))


def map_documents(runs: Sequence[Run[MapRow]]) -> Document:
    """The maps of several runs. Plots are with the first, `map`; others have numbered keys."""
    document = [part for run in runs for part in map_document(run.rows)]
    num_tables = 0
    for place, part in enumerate(document):
        if isinstance(part, Table):
            num_tables += 1
            if num_tables > 1:
                document[place] = replace(part, key=f"{part.key}-{num_tables}")
    return document


def map_sweep(runs: Sequence[Run[MapRow]]) -> Answer:
    """The best cell of each map, and where it pays; empty where nothing was measured."""
    highest: Named[MapRow] | None = None
    best_of_all: MapRow | None = None
    rows = []
    maps = [named for named in named_runs(runs) if cells_of(named.run.rows)]
    for named in maps:
        cells = cells_of(named.run.rows)
        texts = {word: ", ".join(map(str, sizes)) for word, sizes in reach(cells).items()}
        reached = (texts[PAYS], texts[DOES_NOT_PAY], texts[CANNOT_TELL])
        best = best_of(cells)
        if best is None:
            rows.append(TableRow((named.name.cell, None, None, None, *reached)))
            continue
        speedup = verdict_of(best).speedup
        figures = (speedup.estimate, interval(speedup), k_of(best) or None)
        rows.append(TableRow((named.name.cell, *figures, *reached)))
        if best_of_all is None or speedup.estimate > verdict_of(best_of_all).speedup.estimate:
            highest = named
            best_of_all = best
    if not rows:
        return []
    columns = (
        Column("pair", text=True),
        Column("best", times),
        Column("95 %\ninterval"),
        Column("K", optional=True),
        Column(f"pays at\n{load_of([maps[0].row])}"),
        Column("not at", optional=True),
        Column("cannot\ntell at", optional=True),
    )
    findings = []
    steps = []
    if highest is not None and best_of_all is not None:
        text = f"{highest.name.pair}: {cell_in_words(best_of_all)}."
        if not verdict_of(best_of_all).pays:
            text = f"No measured cell pays; the highest is {text}"
        findings.append(Line(text, "strong"))
        pair = f"model={best_of_all.model} draft={best_of_all.draft}"
        place = f"batch_size={best_of_all.batch_size} K={k_of(best_of_all)}"
        if not is_elsewhere(best_of_all.engine):
            steps.append(Step("more prompts there", f"harness latency {pair} {place}"))
    table = Table("maps", "", columns, tuple(rows), look="bare")
    alike = [replace(named.row, num_draft_tokens=None, batch_size=None) for named in maps]
    return answer_of_sweep(alike, findings, [table], steps=steps)


def map_headlines(runs: Sequence[Run[MapRow]]) -> list[Line]:
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
        if len(by_context(cells)) == 1:
            changes.append("other contexts (contexts=[512,4096])")
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
    """`… pays at batch size 1 and 4 and does not pay at batch size 16, with the best K; …`."""
    contexts = by_context(cells)
    answers = []
    for context, of_context in contexts.items():
        sizes = reach(of_context)
        parts = [
            f"{word} {_at(cells, sizes[word])}" for word in (PAYS, DOES_NOT_PAY) if sizes[word]
        ]
        text = (
            " and ".join(parts)
            or f"may or may not pay {_at(cells, sizes[CANNOT_TELL])}: {CANNOT_TELL}"
        )
        place = f" at a context of {context} tokens" if len(contexts) > 1 else ""
        answers.append(f"{text}{place}")
    with_best = ", with the best K" if len(set(map(k_of, cells))) > 1 else ""
    highest = best_of(cells)
    top = f"; the highest speed-up is {cell_in_words(highest)}" if highest is not None else ""
    return f"{subject} {', and '.join(answers)}{with_best}{top}."


def _how_many(cells: Sequence[MapRow]) -> str:
    measured = counted(len(cells), "cell")
    if not _is_whole(cells):
        return f"{cells[0].status} with {measured} of the grid measured".capitalize()
    return f"{measured} {'was' if len(cells) == 1 else 'were'} measured"


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
    """The rows that have a speed-up, or were refused one.

    Earlier versions interpolated cells between others; their rows have no times, and are left out.
    """
    return [
        row
        for row in rows
        if row.status == NO_VERDICT
        or (speedup_of(row) is not None and row.regular_ms_per_token is not None)
    ]


def is_ratio(value: float | None) -> TypeGuard[float]:
    """Whether a speed-up is positive and finite: a damaged file may hold any number."""
    return value is not None and 0 < value < math.inf


def speedup_of(row: MapRow) -> float | None:
    """The speed-up of a cell; None where it has none."""
    speedup = None if row.speedup is None else row.speedup.estimate
    return speedup if is_ratio(speedup) else None


def k_of(row: MapRow) -> int:
    """The K of a cell; 0 where a server does not report it."""
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


def _at(cells: Sequence[MapRow], sizes: Sequence[int]) -> str:
    """`at batch size 1 and 4`, or `with 1 and 4 requests in flight`."""
    if not is_elsewhere(cells[0].engine):
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


def cell_in_words(row: MapRow) -> str:
    """`2.31× (95 % interval 2.12 to 2.50) with K=3 at batch size 4 and a context of 128 tokens`."""
    k = "" if is_elsewhere(row.engine) else f"K={row.num_draft_tokens} at "
    speedup = verdict_of(row).speedup
    certainty = in_brackets(speedup)
    return f"{speedup.estimate:.2f}×{certainty} with {k}{_place(row)} and a context of {row.context} tokens"


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
        return [], "it surely pays nowhere"
    firsts = [size for before, size in pairwise([0, *best]) if best.get(before) != best[size]]
    lasts = [first - 1 for first in firsts[1:]] + [max(best)]
    # vLLM wants a K from 1 on, although the smallest measured batch size may be larger.
    schedule = [
        (first if place else 1, last, best[first])
        for place, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]
    return schedule, ""


def _schedule_in_words(cells: Sequence[MapRow]) -> str:
    """The schedule, the files that have it, and what no measurement decided."""
    schedule, why_none = schedule_of(cells)
    if not schedule:
        return f"No schedule of K for servers: {why_none}."
    load = load_of(cells)
    texts = [f"Next, by {load}: {_ranges(schedule)}, in schedule_vllm.json."]
    if any(k == 0 for _, _, k in schedule):
        texts.append("K=0 as if switching off were free.")
    by_size = grouped(cells, size_of)
    undecided = [
        size
        for size, of_size in by_size.items()
        if all(word_of(row) == CANNOT_TELL for row in of_size)
    ]
    if undecided:
        sizes = " and ".join(map(str, undecided))
        texts.append(f"At {sizes}, where no cell can tell, the K below stays.")
    last = schedule[-1][1]
    texts.append(f"Above {last} vLLM keeps the last K.")
    return " ".join(texts)


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


def _ranges(schedule: Schedule) -> str:
    """`K=5 at 1 to 15, K=0 at 16`."""
    texts = []
    for first, last, k in schedule:
        sizes = " to ".join(dict.fromkeys([str(first), str(last)]))
        texts.append(f"K={k} at {sizes}")
    return ", ".join(texts)


def _table(cells: Sequence[MapRow]) -> Table:
    """The cells of one context: a row for each batch size, a column for each K."""
    by_k = dict(sorted(grouped(cells, k_of).items()))
    rows = []
    for size, of_size in sorted(grouped(cells, size_of).items()):
        texts = {}
        for row in of_size:
            texts[k_of(row)] = f"{cell_text(row)}\n{interval(row.speedup) or CANNOT_TELL}"
        rows.append(TableRow((str(size), *map(texts.get, by_k))))
    columns = [Column(load_of(cells)), *(Column(f"K={k}" if k else "its own K") for k in by_k)]
    notes = (f"{_how_many(cells)}.",) if _is_whole(cells) else ()
    return Table("map", heading_of(cells), tuple(columns), tuple(rows), notes=notes)


def cell_text(row: MapRow) -> str:
    """`2.31×`."""
    speedup = speedup_of(row)
    return UNKNOWN if speedup is None else f"{speedup:.2f}×"
