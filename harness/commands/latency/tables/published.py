"""Published figures next to ours."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.commands.latency.tables.figures import SPEEDUP
from harness.commands.latency.tables.ranking import RankedRun
from harness.measuring.rows import LatencyRow
from harness.reporting.table import Column, Table, number
from harness.results.published import DIFFERENCES, Published, published_for


class _Counterparts(NamedTuple):
    """A published figure, and the row of our measurement of the same pair."""

    name: str
    theirs: Published
    ours: LatencyRow


def published_table(pairs: Sequence[RankedRun]) -> Table:
    """Published figures next to those of the pairs, or of the targets alone, that we measured.

    A figure of a pair is in the table once, next to the first of ours; one of a target once per device.
    """
    counterparts: dict[Hashable, _Counterparts] = {}
    for pair in pairs:
        for figure in published_for(pair.row):
            name, ours, device = pair.name.label(), pair.run.row("speculative"), None
            if not figure.drafts:
                name, ours, device = pair.model, pair.regular, pair.row.devices
            if ours is not None:
                key = (id(figure), device)
                counterparts.setdefault(key, _Counterparts(name, figure, ours))
    sources = dict.fromkeys(item.theirs.source for item in counterparts.values())
    return Table.of(
        "published",
        "Next to published figures",
        counterparts.values(),
        _COLUMNS,
        about="Hardware, prompts and code differ: compare speed-ups rather than times.",
        notes=[f"{name}: {DIFFERENCES[name]}." for name in sources if name in DIFFERENCES],
    )


def _our_length(item: _Counterparts) -> float | None:
    """Our tokens per iteration, where theirs are known."""
    return item.ours.tokens_per_iteration if item.theirs.mean_acceptance_length else None


_COLUMNS = (
    Column("pair", text=True, of="name"),
    Column("prompts", text=True, of="theirs.prompts_text", optional=True),
    Column("published by", text=True, of="theirs.source"),
    Column("their hardware", text=True, of=lambda item: item.theirs.hardware or "not stated"),
    Column("our hardware", text=True, of="ours.devices", optional=True),
    Column("their\nms/token", "{:.3g}".format, "theirs.ms_per_token"),
    Column("our\nms/token", number(), "ours.ms_per_token", optional=True),
    Column("their\nspeed-up", of="theirs.speedup_text"),
    replace(SPEEDUP.at("ours"), heading="our\nspeed-up", optional=True, reference=None),
    Column("their tokens\nper iteration", number(), "theirs.mean_acceptance_length", optional=True),
    Column("our tokens\nper iteration", number(), _our_length, optional=True),
)
