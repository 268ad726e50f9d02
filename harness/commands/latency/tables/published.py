"""Published figures next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.commands.latency.tables.figures import SPEEDUP
from harness.commands.latency.tables.ranked import RankedRun
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number
from harness.results.published import DIFFERENCES, Published, figures, published_for


class _Counterparts(NamedTuple):
    """A published figure, and the row of our measurement of the same pair where there is one."""

    name: str
    theirs: Published
    ours: LatencyRow | None


def published_tables(pairs: Sequence[RankedRun]) -> list[Table]:
    """Published figures of the pairs, or targets alone, that we measured, and a table of all that we know of."""

    def our_length(item: _Counterparts) -> float | None:
        if item.ours is None or item.theirs.mean_acceptance_length is None:
            return None
        return item.ours.tokens_per_iteration

    columns = (
        Column("pair", text=True, of="name"),
        Column("prompts", text=True, of="theirs.prompts_text", optional=True),
        Column("published by", text=True, of="theirs.source"),
        Column("their hardware", text=True, of=lambda item: item.theirs.hardware or "not stated"),
        Column("our hardware", text=True, of="ours.devices", optional=True),
        Column("their\nms/token", "{:.3g}".format, "theirs.ms_per_token"),
        Column("our\nms/token", number(), "ours.ms_per_token", optional=True),
        Column("their\nspeed-up", of="theirs.speedup_text"),
        replace(SPEEDUP.at("ours"), heading="our\nspeed-up", optional=True, reference=None),
        Column(
            "their tokens\nper iteration", number(), "theirs.mean_acceptance_length", optional=True
        ),
        Column("our tokens\nper iteration", number(), our_length, optional=True),
    )
    counterparts = _counterparts(pairs)
    sources = dict.fromkeys(item.theirs.source for item in counterparts)
    next_to_ours = Table.of(
        "published",
        "Next to published figures",
        counterparts,
        columns,
        about="Hardware, prompts and code differ: compare speed-ups rather than times.",
        notes=[f"{name}: {DIFFERENCES[name]}." for name in sources if name in DIFFERENCES],
    )
    accuracy = Column("correct products %, regular / speculative", of="theirs.accuracy_text")
    every = Table.of(
        "all_published",
        "All published figures",
        [_Counterparts(figure.named, figure, None) for figure in figures()],
        (*columns, accuracy),
        in_full=True,
    )
    return [next_to_ours, every]


def _counterparts(pairs: Sequence[RankedRun]) -> list[_Counterparts]:
    """Published figures of pairs and of the targets alone.

    A figure of a pair is in the list once, next to the first of ours; one of a target once per device.
    """
    by_figure: dict[object, _Counterparts] = {}
    for pair in pairs:
        for figure in published_for(pair.row):
            index = figures().index(figure)
            if figure.drafts:
                name = pair.name.label()
                by_figure.setdefault(index, _Counterparts(name, figure, pair.row))
            elif pair.regular is not None:
                counterparts = _Counterparts(pair.model, figure, pair.regular)
                by_figure.setdefault((index, pair.row.devices), counterparts)
    return list(by_figure.values())
