"""Published figures next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.commands.latency.ranking.pairs import MeasuredPair
from harness.commands.latency.rows import LatencyRow
from harness.commands.latency.tables.costs import tokens_per_iteration
from harness.commands.latency.tables.run import BOUNDS
from harness.commands.published import DIFFERENCES, FIGURES, Published, published_for
from harness.tables.table import Column, Table, number, times

_LENGTH = number()


class _Counterparts(NamedTuple):
    """A published figure, and the row of our measurement of the same pair where there is one."""

    name: str
    theirs: Published
    ours: LatencyRow | None


def published_tables(pairs: Sequence[MeasuredPair]) -> list[Table]:
    """Published figures of the pairs that we measured, and a table of all that we know of."""
    columns = (
        Column("pair", text=True, of="name"),
        Column("prompts", text=True, of="theirs.prompts_text", optional=True),
        Column("published by", text=True, of="theirs.source"),
        Column("their hardware", text=True, of=lambda item: item.theirs.hardware or "not stated"),
        Column("our hardware", text=True, of="ours.devices", optional=True),
        Column("their\nms/token", _published_ms, "theirs.ms_per_token"),
        Column("our\nms/token", number(), "ours.ms_per_token", optional=True),
        Column("their\nspeed-up", of="theirs.speedup_text"),
        Column("our\nspeed-up", times, "ours.speedup.estimate", optional=True),
        replace(BOUNDS.at("ours"), optional=True),
        Column(
            "their tokens\nper iteration", _LENGTH, "theirs.mean_acceptance_length", optional=True
        ),
        Column("our tokens\nper iteration", _LENGTH, _our_length, optional=True),
    )
    counterparts = _counterparts(pairs)
    next_to_ours = Table.of(
        "published",
        "Next to published figures",
        counterparts,
        columns,
        about="Hardware, prompts and code differ: compare speed-ups rather than times.",
        notes=_differences(counterparts),
    )
    accuracy = Column("correct products %, regular / speculative", of="theirs.accuracy_text")
    every = Table.of(
        "all_published",
        "All published figures",
        [_Counterparts(figure.named, figure, None) for figure in FIGURES],
        (*columns, accuracy),
        in_full=True,
    )
    return [next_to_ours, every]


def _counterparts(pairs: Sequence[MeasuredPair]) -> list[_Counterparts]:
    """Published figures of the pairs at their best K and of the targets alone.

    A figure of a pair is in the list once, next to the fastest of ours; one of a target once per
    device.
    """
    bests = [pair for pair in pairs if pair.best]
    alone = [pair for pair in pairs if pair.row.speedup is None and not pair.partial]
    found: dict[object, _Counterparts] = {}
    for pair in (*bests, *alone):
        for figure in published_for(pair.row):
            place = FIGURES.index(figure)
            if figure.drafts:
                counterparts = _Counterparts(pair.name.label(), figure, pair.row)
                found.setdefault(place, counterparts)
            elif pair.regular is not None:
                counterparts = _Counterparts(str(pair.row.model), figure, pair.regular)
                found.setdefault((place, pair.row.devices), counterparts)
    return list(found.values())


def _differences(counterparts: Sequence[_Counterparts]) -> tuple[str, ...]:
    """The differences that cannot be removed, for each source of the figures."""
    sources = dict.fromkeys(item.theirs.source for item in counterparts)
    return tuple(f"{source}: {DIFFERENCES[source]}." for source in sources if source in DIFFERENCES)


def _our_length(item: _Counterparts) -> float | None:
    """Our tokens per iteration, where theirs are published."""
    if item.ours is None or item.theirs.mean_acceptance_length is None:
        return None
    return tokens_per_iteration(item.ours)


def _published_ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2f}"
