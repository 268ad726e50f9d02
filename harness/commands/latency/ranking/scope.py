"""Two sentences behind the first one of a report: what it covers, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from harness.commands.latency.ranking.pairs import MeasuredPair, fastest_pair
from harness.commands.latency.tables.categories import Category
from harness.commands.latency.tables.costs import auto_gave_up, best_of, held_back, predicted_by_k
from harness.commands.words import device_of, in_words, settings_line
from harness.tables.table import Line, times


def scope_of_the_fastest(pairs: Sequence[MeasuredPair]) -> list[Line]:
    """`Measured on ...` and `What would change it: ...`; none without a complete pair."""
    pair = fastest_pair(pairs)
    if pair is None:
        return []
    lines = [Line(_coverage(pair))]
    changes = list(_changes(pair, pairs))
    if changes:
        lines.append(Line(f"What would change it: {'; '.join(changes)}."))
    return lines


def _coverage(pair: MeasuredPair) -> str:
    runs = "in one run (repeats=5 would cover what changes from run to run)"
    if pair.row.repeat == "all":
        runs = f"in {pair.row.repeats} runs"
    return f"Measured on {device_of(pair.row)}, {runs}: {settings_line(pair.run.rows)}."


def _changes(pair: MeasuredPair, pairs: Sequence[MeasuredPair]) -> Iterator[str]:
    row = pair.row
    if len(pair.categories) > 1:
        yield f"other prompts ({_range(pair.categories)})"
    yield from _other_loads(pair, pairs)
    if not pair.best_of_several:
        yield from _other_k(pair)
    decode = row.decode_speedup
    if decode is not None and row.speedup is not None and decode.estimate > row.speedup.high:
        yield f"longer answers, towards {times(decode.estimate)}"
    limit = held_back(pair.regular, row)
    if limit is not None and not auto_gave_up(row):
        yield f"most of all, {limit.in_short}"


def _range(categories: Sequence[Category]) -> str:
    """`2.43× for multiplication to 2.60× for addition`."""
    ordered = sorted(categories, key=attrgetter("speedup.estimate"))
    least, *_, most = ordered
    return " to ".join(f"{times(end.speedup.estimate)} for {end.name}" for end in (least, most))


def _other_loads(pair: MeasuredPair, pairs: Sequence[MeasuredPair]) -> Iterator[str]:
    """The same pair at the largest and the smallest other load that was measured."""
    same = [
        other
        for other in pairs
        if other.complete
        and other.best
        and other.load != pair.load
        and other.unit_of_load == pair.unit_of_load
        and other.name_without_load.group == pair.name_without_load.group
    ]
    same.sort(key=attrgetter("load"))
    ends = same if len(same) < 3 else [same[0], same[-1]]
    for other in ends:
        load = in_words(other.row, "batch_size") or "batches of 1"
        _, speedup = other.worth
        yield f"{load} ({times(speedup)})"


def _other_k(pair: MeasuredPair) -> Iterator[str]:
    """The K for which more is predicted than for the measured one."""
    predictions = predicted_by_k(pair.regular, pair.row)
    if not predictions:
        return
    best = best_of(predictions)
    if best is not predictions[-1]:
        yield f"K={best.num_draft_tokens} ({times(best.figure.estimate)} predicted)"
