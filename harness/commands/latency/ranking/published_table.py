"""Published figures next to ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from harness.commands.latency.tables.run import BOUNDS, SPEEDUP
from harness.measuring.costs import tokens_per_iteration
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number
from harness.results.published import DIFFERENCES, FIGURES, Published, published_for


@dataclass(frozen=True)
class _Counterparts:
    """A published figure, and the row of our measurement of the same pair where there is one."""

    name: str
    theirs: Published
    ours: LatencyRow | None


def published_tables(pairs: pd.DataFrame) -> list[Table]:
    """Published figures of the pairs that we measured, and a table of all that we know of."""

    def our_length(item: _Counterparts) -> float | None:
        if item.ours is None or item.theirs.mean_acceptance_length is None:
            return None
        return tokens_per_iteration(item.ours)

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
        replace(BOUNDS.at("ours"), optional=True),
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
        notes=tuple(f"{name}: {DIFFERENCES[name]}." for name in sources if name in DIFFERENCES),
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


def _counterparts(pairs: pd.DataFrame) -> list[_Counterparts]:
    """Published figures of the pairs at their best K and of the targets alone.

    A figure of a pair is in the list once, next to the fastest of ours; one of a target once per
    device.
    """
    is_alone = pairs.speedup.isna() & ~pairs.partial
    by_figure: dict[object, _Counterparts] = {}
    for pair in pd.concat([pairs[pairs.best], pairs[is_alone]]).itertuples():
        for figure in published_for(pair.row):
            place = FIGURES.index(figure)
            if figure.drafts:
                counterparts = _Counterparts(pair.name.label(), figure, pair.row)
                by_figure.setdefault(place, counterparts)
            elif pair.regular is not None:
                counterparts = _Counterparts(pair.model, figure, pair.regular)
                by_figure.setdefault((place, pair.row.devices), counterparts)
    return list(by_figure.values())
